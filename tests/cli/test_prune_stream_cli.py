"""``sdbench prune --stream``: the checkpoint of a run with the whole model in memory, made with one block of it at a time."""

import gc
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdbench.errors import SdbenchError
from sdbench.models import open_model, resolve_model, weight_bytes
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.streaming import StoredWeights, Stream, resident
from sdbench.suites import dense

SMALL = ("--calibration-examples", 3, "--prompt-tokens", 12, "--max-tokens", 12, "--device", "cpu")
CPU = torch.device("cpu")


def pruned(sdbench: Any, *arguments: Any) -> dict[str, Any]:
    # Options of calibration are refused where a method needs none.
    small = ("--device", "cpu") if "magnitude" in arguments else SMALL
    done = sdbench("prune", "--json", *small, *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


def content(document: dict[str, Any]) -> dict[str, Any]:
    """What a streamed run and one in memory have in common: every tensor, every other file, what was counted; all but the option."""
    found = {name: value for name, value in document["provenance"].items() if name not in ("created", "sha256")}
    arguments = {name: value for name, value in found["calibration"]["arguments"].items() if name != "stream"}
    return found | {"calibration": found["calibration"] | {"arguments": arguments}}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--method", "wanda", "--calib", "teacher-forced"),
        ("--method", "sparsegpt", "--calib", "prefill", "--format", "dense"),
        ("--method", "sparsegpt", "--calib", "teacher-forced", "--sequential"),
        ("--method", "magnitude"),
        ("--method", "wanda", "--calib", "prefill", "--dtype", "bf16", "--targets", "*.1.mlp.*"),
    ],
    ids=lambda arguments: " ".join(arguments[1::2]),
)
def test_every_tensor_is_the_same(arguments, sdbench, checkpoint):
    """Bit for bit: the same forwards of the same blocks over the same batches."""
    base = ("--model", checkpoint(tie_word_embeddings="prefill" in arguments, shard="40KB"), *arguments, "--output")
    whole, streamed = pruned(sdbench, *base, "whole"), pruned(sdbench, *base, "out", "--stream")
    assert content(streamed) == content(whole)
    assert whole["streaming"] is None and streamed["streaming"]["blocks"] == 2
    assert list(streamed["seconds"]) == list(whole["seconds"])


@pytest.mark.parametrize("method", ["sparsegpt", "magnitude"])
def test_random_weights_of_a_block_are_those_of_the_whole_model(method, sdbench, checkpoint):
    calibration = () if method == "magnitude" else ("--calib", "prefill")
    base = ("--model", f"random:{checkpoint()}", "--method", method, *calibration, "--output")
    assert content(pruned(sdbench, *base, "out", "--stream")) == content(pruned(sdbench, *base, "whole"))


def test_statistics_of_shards(sdbench, checkpoint):
    """Shards may be collected with the model streamed, and used without, and the other way round."""
    base = ("--model", checkpoint(), "--method", "sparsegpt", "--calib", "prefill")
    for folder, stream in (("shards", ()), ("streamed", ("--stream",))):
        for number in (1, 2):
            assert sdbench("prune", *SMALL, *base, *stream, "--shard", f"{number}/2", "--statistics", folder).code == 0
    whole = pruned(sdbench, *base, "--merge", "streamed", "--output", "whole")
    assert content(pruned(sdbench, *base, "--merge", "shards", "--output", "out", "--stream")) == content(whole)


def test_no_more_than_a_block_is_in_memory(sdbench, checkpoint, monkeypatch):
    """Counted among the live tensors whenever weights of a part are asked for, and by the stream itself."""
    layers, fill, seen = 6, StoredWeights.__call__, []
    model = checkpoint(num_hidden_layers=layers)
    shapes = [tuple(tensor.shape) for name, tensor in load_file(model / "model.safetensors").items() if "layers.0" in name]
    linear = {shape for shape in shapes if len(shape) == 2}
    block = sum(4 * rows * columns for rows, columns in (shape for shape in shapes if len(shape) == 2))

    def count(self, name, module, device):
        fill(self, name, module, device)
        alive = {
            tensor.data_ptr(): tensor.nbytes
            for tensor in gc.get_objects()
            if type(tensor) is torch.nn.Parameter and not tensor.is_meta and tuple(tensor.shape) in linear
        }
        seen.append(sum(alive.values()))

    monkeypatch.setattr(StoredWeights, "__call__", count)
    base = ("--model", model, "--method", "sparsegpt", "--calib", "prefill", "--sequential", "--stream", "--output", "out")
    streaming = pruned(sdbench, *base)["streaming"]
    assert max(seen) == block
    norms = 4 * (2 * 64 + 2 * 32)
    assert streaming["block_bytes"] == block + norms
    # The embedding, the last norm and the rotary frequencies (twice 16) stay.
    assert streaming["peak_weight_bytes"] == block + norms + 4 * (1024 * 64 + 64 + 2 * 16)
    rows = streaming["hidden_states"]["bytes"] / (64 * 4)
    assert rows == int(rows) > 0 and streaming["hidden_states"]["device"] == "cpu"


@pytest.mark.parametrize("mode", [(), ("--sequential",)], ids=["one pass", "sequential"])
def test_an_interrupted_run_goes_on(mode, sdbench, checkpoint, monkeypatch):
    """With the pruned layers of the blocks before in their place, where the next block is calibrated on them."""
    base = ("--model", checkpoint(), "--method", "sparsegpt", "--calib", "prefill", "--stream", *mode)
    whole = pruned(sdbench, *base, "--output", "whole")
    add_row = RunDirectory.add_row

    def add_and_stop(self: RunDirectory, row: Any) -> None:
        add_row(self, row)
        if sum(row["record"] == "layer" for row in self.rows) == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "add_row", add_and_stop)
        assert sdbench("prune", *SMALL, *base, "--output", "out").code == 130
    found = pruned(sdbench, *base, "--output", "out")
    assert found["resumed_layers"] == (7 if mode else 9)
    assert content(found) == content(whole)


def test_what_people_read(sdbench, checkpoint):
    done = sdbench("prune", *SMALL, "--model", checkpoint(), "--calib", "prefill", "--stream", "--output", "out")
    (line,) = (line for line in done.out.splitlines() if line.startswith("streamed: "))
    assert line.startswith("streamed: 2 blocks of up to 0.00 GB, 0.00 GB of weights at once, 0.00 GB of hidden states on the cpu")


def test_progress_while_weights_are_drawn(sdbench, checkpoint, monkeypatch):
    """A part at a time: what lies outside of the blocks, then each of the two."""
    monkeypatch.setattr("sdbench.progress.LINE_SECONDS", 0)
    magnitude = ("--method", "magnitude", "--device", "cpu")
    done = sdbench("prune", *magnitude, "--model", f"random:{checkpoint()}", "--stream", "--output", "out")
    told = [line for line in done.err.splitlines() if line.startswith("hashing weights")]
    assert told == [f"hashing weights: {number}/3" for number in (1, 2, 3)]


@pytest.mark.parametrize("mode", ["one pass", "sequential", "shard"])
def test_progress_of_every_forward(mode, sdbench, checkpoint, monkeypatch):
    """The first text goes through both blocks and the others up to them; then all of them go through one block after the other."""
    monkeypatch.setattr("sdbench.progress.LINE_SECONDS", 0)
    monkeypatch.setattr("sdbench.calibrate.replay.BATCH_POSITIONS", 1)
    goal = ("--shard", "1/1", "--statistics", "shards") if mode == "shard" else ("--output", "out")
    goal += ("--sequential",) if mode == "sequential" else ()
    done = sdbench("prune", *SMALL, "--model", f"random:{checkpoint()}", "--calib", "prefill", "--stream", *goal)
    assert done.code == 0, done.err
    told = [line for line in done.err.splitlines() if line.startswith(("statistics", "outputs"))]
    expected = [f"statistics: first forward: {number}/4" for number in (1, 2, 3, 4)]
    for block in ("model.layers.0", "model.layers.1"):
        for what in ("statistics", *(("outputs",) if mode == "sequential" else ())):
            expected += [f"{what}: {block}: {number}/3" for number in (1, 2, 3)]
    assert told == expected


@pytest.mark.parametrize("kind", ["", "random:"], ids=["checkpoint", "random"])
def test_what_lies_outside_of_the_blocks_is_brought_after_a_line(kind, sdbench, checkpoint, monkeypatch):
    """An embedding is large, and nothing else is said before it is there."""
    model, keep = checkpoint(), Stream.keep_outside

    def keep_and_tell(self: Stream, blocks: Any) -> None:
        sys.stderr.write("embedding\n")
        keep(self, blocks)

    monkeypatch.setattr(Stream, "keep_outside", keep_and_tell)
    done = sdbench("prune", *SMALL, "--model", f"{kind}{model}", "--calib", "prefill", "--stream", "--output", "out")
    lines = done.err.splitlines()
    assert lines[lines.index("embedding") - 1] == f"opening {model}, one block at a time"


class TestRefused:
    @pytest.mark.parametrize("calib", [("decode",), ("self",), ("mixed", "--mix", "prefill=1", "--mix", "decode+sink=1")])
    def test_sources_of_replies(self, calib, sdbench, checkpoint):
        done = sdbench("prune", *SMALL, "--model", checkpoint(), "--stream", "--output", "out", "--calib", *calib)
        done.refuses(
            2, f"calibration source {calib[0]} needs", "give replies that the model made where it is served as --replies", "--calib prefill"
        )

    def test_a_gguf_file(self, sdbench, tmp_path):
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        done = sdbench("prune", *SMALL, "--model", "m.gguf", "--calib", "prefill", "--stream", "--output", "out")
        done.refuses(2, "m.gguf is converted as a whole; give a folder with safetensors")

    def test_a_checkpoint_that_is_not_whole(self, sdbench, checkpoint):
        model = checkpoint()
        base = ("prune", *SMALL, "--model", model, "--calib", "prefill", "--stream", "--output", "out")
        weights, lost = load_file(model / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
        save_file({name: tensor for name, tensor in weights.items() if name != lost}, model / "model.safetensors", {"format": "pt"})
        sdbench(*base).refuses(1, f"lacks 1 weight, {lost} the first")
        save_file(weights | {lost: torch.zeros(8, 8)}, model / "model.safetensors", {"format": "pt"})
        sdbench(*base).refuses(1, f"{lost} is (8, 8), but the config asks for (128, 64)")

    def test_a_weight_that_is_no_number(self, sdbench, checkpoint):
        def spoil(model: Any) -> None:
            model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")

        done = sdbench("prune", *SMALL, "--model", checkpoint(spoil=spoil), "--calib", "prefill", "--stream", "--output", "out")
        done.refuses(1, "model.layers.1.mlp.up_proj", "[3, 5] is nan")

    def test_a_model_that_does_not_fit_names_the_option(self, monkeypatch):
        monkeypatch.setattr("sdbench.models.in_use", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 10**9, 140 * 10**9))
        device = torch.device("cuda", 0)

        def asked(name: str) -> Any:
            return SimpleNamespace(spec=resolve_model(f"random:{name}", None, device), device=device, dtype=torch.bfloat16)

        dense._require_room(asked("qwen3-32b"), Progress())
        with pytest.raises(SdbenchError, match=r"llama-3.3-70b takes 141.1 GB, and 100.0 GB of cuda:0 are free; --stream prunes it"):
            dense._require_room(asked("llama-3.3-70b"), Progress())


def test_the_room_that_a_model_takes_hangs_on_no_name_in_its_files(checkpoint):
    """Loading renames what older checkpoints call otherwise, and streaming refuses it: a run without --stream must get that far."""
    model = checkpoint()
    weights = load_file(model / "model.safetensors")
    save_file({f"old.{name}": tensor for name, tensor in weights.items()}, model / "model.safetensors", {"format": "pt"})
    spec = resolve_model(str(model), None, CPU)
    assert weight_bytes(spec, torch.bfloat16) == sum(2 * tensor.numel() for tensor in weights.values())
    with pytest.raises(SdbenchError, match="old names"):
        open_model(spec, CPU, torch.bfloat16)


def test_a_part_is_held_until_its_last_holder_leaves(checkpoint):
    opened = open_model(resolve_model(str(checkpoint()), None, CPU), CPU, torch.float32)
    stream, block = opened.stream, opened.model.model.layers[0]
    assert isinstance(stream, Stream) and stream.bytes == 0
    weight = load_file(Path(opened.spec.source) / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    with resident([block]):
        with resident([block.mlp.up_proj]):
            assert torch.equal(block.mlp.up_proj.weight, weight)
        assert torch.equal(block.mlp.up_proj.weight, weight) and stream.bytes > 0
        assert opened.model.model.layers[1].mlp.up_proj.weight.is_meta
    assert block.mlp.up_proj.weight.is_meta and stream.bytes == 0
    shutil.rmtree(opened.spec.source)


@pytest.mark.parametrize("kind", ["", "random:"], ids=["checkpoint", "random"])
def test_what_a_model_computes_comes_from_the_cpu(kind, checkpoint, monkeypatch):
    """A GPU's powers differ in the last bit, and a model that is loaded whole has its rotary frequencies from the CPU."""
    opened = open_model(resolve_model(f"{kind}{checkpoint()}", None, CPU), torch.device("meta"), torch.float32)
    seen = []
    monkeypatch.setattr(opened.model.model, "_init_weights", lambda module: seen.append(torch.ones(1).device))
    opened.stream.fill("model.rotary_emb", opened.model.model.rotary_emb, torch.device("meta"))
    assert seen == [CPU]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["", "random:"], ids=["checkpoint", "random"])
def test_on_a_gpu(kind, sdbench, checkpoint, monkeypatch):
    """Hidden states that rest in main memory, and streamed weights, change no bit."""
    base = ("--model", f"{kind}{checkpoint()}", "--method", "sparsegpt", "--calib", "prefill", "--device", "cuda", "--output")
    whole = pruned(sdbench, *base, "whole")
    monkeypatch.setattr("sdbench.calibrate.sequential.DEVICE_SHARE", 10**12)
    found = pruned(sdbench, *base, "out", "--stream")
    assert content(found) == content(whole) and found["streaming"]["hidden_states"]["device"] == "cpu"
