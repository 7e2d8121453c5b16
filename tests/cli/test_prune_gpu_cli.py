"""``sdbench prune`` on a GPU: replies by a graph, Hessians a block at a time, two processes; the speed itself is for a run to show."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sdbench.checkpoint_files import CheckpointFiles
from sdbench.checkpoints.verify import verify
from sdbench.engine.paths import FUSED_GRAPH, GRAPH
from sdbench.progress import Progress

pytestmark = pytest.mark.gpu

SMALL = ("--calibration-examples", 5, "--max-tokens", 12, "--prompt-tokens", 5)


@pytest.fixture
def pruned(sdbench: Any) -> Any:
    def call(*arguments: Any) -> dict[str, Any]:
        about_calibration = () if "magnitude" in arguments else SMALL
        done = sdbench("prune", "--json", "--device", "cuda", *about_calibration, *arguments)
        assert done.code == 0, done.err
        found = json.loads(done.out)
        assert verify(CheckpointFiles.open(Path(found["output"])), None, Progress()).failures == []
        return found

    return call


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize(("batch", "path"), [(2, GRAPH), (1, FUSED_GRAPH)])
def test_replies_come_from_the_engine(method: str, batch: int, path: str, pruned: Any, checkpoint: Any) -> None:
    found = pruned("--model", f"random:{checkpoint()}", "--output", "out", "--method", method, "--batch-size", batch)
    assert found["peak_bytes"] >= found["model_bytes"] > 0
    assert found["calibration"]["generation"] == {"path": path, "reason": None, "batch": batch}
    assert found["provenance"]["calibration"]["rows"] == {"min": 55, "max": 55}
    assert found["calibration"]["collection_overhead"] > 0


def test_magnitude_needs_no_replies(pruned: Any, checkpoint: Any) -> None:
    found = pruned("--model", f"random:{checkpoint()}", "--output", "out", "--method", "magnitude")
    assert found["peak_bytes"] >= found["model_bytes"] > 0


def test_padded_replies_of_a_real_tokenizer(pruned: Any, checkpoint: Any) -> None:
    found = pruned("--model", checkpoint(), "--output", "out", "--batch-size", 4)
    assert found["calibration"]["generation"] == {"path": GRAPH, "reason": None, "batch": 4}


def test_memory_holds_one_block_of_hessians(pruned: Any, checkpoint: Any) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24}
    found = pruned("--model", f"random:{checkpoint(**sizes)}", "--output", "out", "--method", "sparsegpt", "--batch-size", 2)
    # Queries, keys and values share one; o reads 128 columns.
    block = 4 * (2 * 512**2 + 128**2 + 2048**2)
    work = found["peak_bytes"] - found["model_bytes"]
    assert work < 12 * block < 24 * block


def test_a_process_a_gpu(pruned: Any, checkpoint: Any) -> None:
    devices = ",".join(f"cuda:{index % torch.cuda.device_count()}" for index in range(2))
    model = checkpoint()
    found = pruned("--model", model, "--output", "out", "--method", "sparsegpt", "--devices", devices)
    assert [shard["shard"] for shard in found["shards"]] == [1, 2]
    assert all(shard["peak_bytes"] > 0 and shard["speed"]["generation"]["path"] == GRAPH for shard in found["shards"])
    whole = pruned("--model", model, "--output", "whole", "--method", "sparsegpt")
    assert found["provenance"]["calibration"]["examples"] == whole["provenance"]["calibration"]["examples"]
