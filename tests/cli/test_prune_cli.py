"""``sdbench prune``: a checkpoint that says what it was made of, goes on after a kill, and is never half there."""

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sdbench as package
from sdbench.calibrate.collect import statistics_of
from sdbench.calibrate.magnitude import keep_mask
from sdbench.calibrate.sequential import BlockWalk
from sdbench.checkpoint_files import CheckpointFiles
from sdbench.checkpoints.stored import to_dense
from sdbench.checkpoints.verify import verify
from sdbench.engine.packed_linear import PackedLinear
from sdbench.errors import CheckFailed
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.results import RunDirectory, RunRecord, read_jsonl
from sdbench.suites import dense, prune

SMALL = ("--calibration-examples", 3, "--max-tokens", 12, "--device", "cpu")


def pruned(sdbench: Any, *arguments: Any) -> dict[str, Any]:
    # Magnitude takes no options of calibration.
    done = sdbench("prune", "--json", *(("--device", "cpu") if "magnitude" in arguments else SMALL), *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


def content(document: dict[str, Any]) -> dict[str, Any]:
    """What two runs of the same command have in common: all but the time of day, the hashes that it changes, and a figure of rounding."""
    common = {name: value for name, value in document["provenance"].items() if name not in ("created", "sha256")}
    # How far the replay is from live steps is rounding, which differs with the threads that a CPU happens to use.
    report = {name: value for name, value in common["calibration"]["report"].items() if name != "replay_difference"}
    return common | {"calibration": common["calibration"] | {"report": report}}


def test_the_checkpoint_and_its_record(sdbench, checkpoint, tmp_path):
    model = checkpoint()
    found = pruned(sdbench, "--model", model, "--output", "out", "--method", "wanda", "--calib", "decode+sink")
    record = found["provenance"]
    assert (found["schema"], record["schema"], record["format"]) == ("sdbench.prune/1", "sdbench.checkpoint/1", "packed")
    assert (record["method"], record["pattern"], record["seed"]) == ("wanda", "2:4", 0)
    assert (record["source"]["model"], record["source"]["dtype"]) == ("tiny", "float32")
    calibration = record["calibration"]
    replies = calibration["report"]["replies"]
    # A reply of T tokens has T - 1 decode steps; position 0 counts as well.
    assert calibration["rows"] == {"min": replies["tokens"], "max": replies["tokens"]}
    assert len(calibration["examples"]) == len({example["prompt_hash"] for example in calibration["examples"]}) == 3
    assert calibration["source"] == calibration["arguments"]["calib"][0] == "decode+sink"
    assert len(record["layers"]) == 14 and record["layers"]["model.layers.0.mlp.up_proj"]["shape"] == [128, 64]
    assert found["bytes"] == sum(tensor.nbytes for name, tensor in stored(Path("out")).items() if not name.endswith(".shape"))
    assert verify(CheckpointFiles.open(Path("out")), None, Progress()).failures == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny"]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_what_is_written_is_the_pruned_model(kind, sdbench, checkpoint):
    model = checkpoint(tie_word_embeddings=False)
    pruned(sdbench, "--model", model, "--output", "out", "--method", "magnitude", "--pattern", "1:4", "--format", kind)
    for name, tensor in stored(model).items():
        layer = name.removesuffix(".weight")
        if "_proj" not in name:
            assert torch.equal(stored(Path("out"))[name], tensor)
            continue
        keep = keep_mask(tensor, Pattern(1, 4))
        if kind == "dense":
            assert torch.equal(stored(Path("out"))[name], tensor * keep)
        else:
            packed = package.load("out", device="cpu").get_submodule(layer).packed
            assert torch.equal(packed.keep(), keep) and torch.equal(packed.unpack(), tensor * keep)


def test_targets_and_ignore(sdbench, checkpoint):
    found = pruned(
        sdbench, "--model", checkpoint(), "--output", "out", "--targets", "*.mlp.*", "--ignore", "up_proj", "--method", "magnitude"
    )
    assert set(found["provenance"]["layers"]) == {f"model.layers.{n}.mlp.{name}_proj" for n in (0, 1) for name in ("gate", "down")}
    loaded = package.load("out", device="cpu")
    assert sum(isinstance(module, PackedLinear) for module in loaded.modules()) == 4


def test_the_default_is_the_demo_model_and_a_table_for_people(sdbench):
    done = sdbench("prune", "--output", "out", "--calib", "prefill", "--calibration-examples", 1, "--device", "cpu")
    assert done.code == 0, done.err
    assert done.err.startswith("model: demo (the default without a CUDA device")
    first, layers, calibration, size, memory, seconds, then = done.out.splitlines()
    assert memory.startswith("peak memory: ")
    assert (first, layers, then) == ("out: demo at 2:4, wanda, packed", "pruned layers: 28", "next: sdbench verify out")
    assert calibration.startswith("calibration: prefill, 1 example, ") and seconds.startswith("seconds: load ")
    stages = [part.split()[0] for part in seconds.removeprefix("seconds: ").split(", ")]
    assert stages == ["load", "hash", "collection", "pruning", "packing", "writing"]
    share = float(size.split()[4])
    # Between the mask and half of the values in fp32 (17/32), and all of the embedding as it was.
    assert 17 / 32 < share < 0.65


def test_a_random_model_has_no_tokenizer_and_needs_none(sdbench, checkpoint):
    found = pruned(sdbench, "--model", f"random:{checkpoint()}", "--output", "out", "--prompt-tokens", 5)
    assert found["provenance"]["source"]["kind"] == "random"
    # Random replies ignore EOS: 3 replies of 12 tokens.
    assert found["provenance"]["calibration"]["rows"] == {"min": 33, "max": 33}


def test_what_calibration_took(sdbench, checkpoint):
    """A random model's replies have a known length: what is reported of their speed can be checked."""
    model = f"random:{checkpoint()}"
    base = ("--model", model, "--prompt-tokens", 5, "--method", "sparsegpt", "--batch-size", 2)
    found = pruned(sdbench, *base, "--output", "out", "--run-directory", "run")
    seconds, speed = found["seconds"], found["calibration"]
    assert list(seconds) == ["load", "hash", "capture", "generation", "replay check", "collection", "pruning", "packing", "writing"]
    assert all(time >= 0 for time in seconds.values())
    assert speed["generated_tokens"] == 3 * 12
    assert speed["tokens_per_second"] == pytest.approx(36 / seconds["generation"])
    assert speed["collection_overhead"] == pytest.approx(seconds["collection"] / seconds["generation"])
    assert speed["generation"] == {"path": "transformers, eager", "reason": None, "batch": 2}
    assert found["peak_bytes"] is None or found["peak_bytes"] > 0
    # The run directory stays, without what is in the checkpoint now, and has the same figures.
    assert sorted(path.name for path in Path("run").iterdir()) == ["rows.jsonl", "run.json"]
    assert RunRecord.model_validate_json(Path("run/run.json").read_bytes()).outcome == "complete"
    *_, result = read_jsonl(Path("run/rows.jsonl"))
    assert result["record"] == "result" and result["seconds"] == seconds and result["calibration"] == speed
    assert result["provenance"] == found["provenance"]["sha256"]
    lines = sdbench("prune", *SMALL, *base, "--output", "other").out.splitlines()
    assert lines[3].startswith("calibration replies: 36 tokens at ") and lines[3].endswith(" tok/s, 2 at once by transformers, eager")
    assert lines[4].startswith("collecting added, the replay check apart: ") and lines[4].endswith("% of that time")


@pytest.mark.parametrize("mode", [(), ("--sequential",)], ids=["one pass", "sequential"])
def test_one_block_of_hessians_at_a_time(mode, sdbench, checkpoint, monkeypatch):
    """Neither the sums of the block before nor what became of them is in memory when the next one is collected."""
    alive: list[weakref.ref[torch.Tensor]] = []
    collected = BlockWalk.collect

    def collect(self, kind, *, advance):
        assert not [hessian for hessian in alive if hessian() is not None]
        sums = collected(self, kind, advance=advance)
        alive.extend(weakref.ref(layer.total) for layer in sums.values())
        return sums

    def normalise(sums):
        statistics = statistics_of(sums)
        alive.extend(weakref.ref(layer.hessian) for layer in statistics.values())
        return statistics

    monkeypatch.setattr(BlockWalk, "collect", collect)
    monkeypatch.setattr("sdbench.suites.e2e.calibration.statistics_of", normalise)
    monkeypatch.setattr("sdbench.calibrate.sequential.statistics_of", normalise)
    pruned(sdbench, "--model", checkpoint(), "--output", "out", "--method", "sparsegpt", *mode)
    assert len(alive) == 2 * 14


def test_a_model_that_is_no_chain_of_blocks_is_collected_at_once_and_told(sdbench, checkpoint, monkeypatch):
    base = ("--model", checkpoint(), "--method", "sparsegpt", "--output")
    whole = pruned(sdbench, *base, "whole")

    def refuse(*arguments):
        raise CheckFailed("model.layers.1 gets other hidden states")

    monkeypatch.setattr(BlockWalk, "__init__", refuse)
    done = sdbench("prune", "--json", *SMALL, *base, "out")
    assert "Hessians of all layers at once, since the model cannot be run block by block: model.layers.1 gets other" in done.err
    assert content(json.loads(done.out)) == content(whole)


KILL = """
import os, signal, sys
from sdbench.results import RunDirectory, RunRecord, read_jsonl
add_row = RunDirectory.add_row
def add_and_die(self, row):
    add_row(self, row)
    if sum(row["record"] == {record!r} for row in self.rows) == {count}:
        os.kill(os.getpid(), signal.SIGKILL)
RunDirectory.add_row = add_and_die
from sdbench.cli import main
sys.argv = {argv!r}
main()
"""


def kill(tmp_path: Path, record: str, count: int, *arguments: Any) -> None:
    """Runs the command until so many rows of a kind are there, then kills it."""
    code = KILL.format(record=record, count=count, argv=["sdbench", "prune", "--json", *map(str, (*SMALL, *arguments))])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr


def test_a_killed_run_goes_on(sdbench, checkpoint, tmp_path, monkeypatch):
    """Layer 9 is the second of three that are pruned together: the third comes out the same alone."""
    base = ("--model", checkpoint(), "--method", "sparsegpt")
    whole = pruned(sdbench, *base, "--output", "whole")
    kill(tmp_path, "layer", 9, *base, "--output", "out")
    assert not (tmp_path / "out").exists() and len(list(tmp_path.glob("out.work-*"))) == 1
    monkeypatch.setattr(prune, "calibrate", None)  # the calibration texts are there: nothing is answered again
    found = pruned(sdbench, *base, "--output", "out")
    assert found["resumed_layers"] == 9
    assert content(found) == content(whole)
    assert not list(tmp_path.glob("out.work-*"))
    assert found["calibration"]["collection_overhead_reason"] == "no reply was decoded by this process"


def test_a_run_that_is_killed_while_it_answers_keeps_its_replies(sdbench, checkpoint, tmp_path):
    base = ("--model", f"random:{checkpoint()}", "--prompt-tokens", 5, "--batch-size", 1, "--output")
    whole = pruned(sdbench, *base, "whole")
    kill(tmp_path, "replies", 2, *base, "out")
    found = pruned(sdbench, *base, "out")
    # One of three replies of 12 tokens was missing.
    assert found["calibration"]["generated_tokens"] == 12
    assert found["calibration"]["collection_overhead_reason"] == "an earlier run did a part of it"
    assert content(found) == content(whole)


def test_a_layer_whose_file_is_torn_is_pruned_again(sdbench, checkpoint, tmp_path):
    base = ("--model", checkpoint(), "--method", "sparsegpt", "--output")
    whole = pruned(sdbench, *base, "whole")
    kill(tmp_path, "layer", 9, *base, "out")
    (work,) = tmp_path.glob("out.work-*")
    file = work / "layer-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    (work / "layer-00004.safetensors").unlink()
    found = pruned(sdbench, *base, "out")
    assert found["resumed_layers"] == 7
    assert content(found) == content(whole)


@pytest.fixture
def interrupted(sdbench: Any, monkeypatch: Any) -> Callable[..., None]:
    """Runs the command until Ctrl-C comes, once so many layers are pruned."""

    def call(layers: int, *arguments: Any) -> None:
        add_row = RunDirectory.add_row

        def add_and_stop(self: RunDirectory, row: Any) -> None:
            add_row(self, row)
            if sum(row["record"] == "layer" for row in self.rows) == layers:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "add_row", add_and_stop)
            done = sdbench("prune", *SMALL, *arguments, "--output", "out")
            done.refuses(130, "interrupted; the same command goes on with what is in out.work-")
        assert not Path("out").exists()

    return call


def test_sequential_goes_on_with_whole_blocks(sdbench, checkpoint, interrupted, monkeypatch):
    """A block's 7 layers are pruned from one look at it: the one that was left half done begins anew.

    Of the layers that are finished no two lie beside the model at once.
    """
    made = []

    def watched(*arguments):
        assert all(matrix() is None for matrix in made)
        matrix = to_dense(*arguments)
        made.append(weakref.ref(matrix))
        return matrix

    monkeypatch.setattr(prune, "to_dense", watched)
    base = ("--model", checkpoint(), "--method", "sparsegpt", "--sequential")
    whole = pruned(sdbench, *base, "--output", "whole")
    interrupted(9, *base)
    found = pruned(sdbench, *base, "--output", "out")
    assert (found["resumed_layers"], len(made)) == (7, 7)
    assert content(found) == content(whole)


def test_another_command_does_not_go_on_with_it(sdbench, checkpoint, interrupted, tmp_path):
    model = checkpoint()
    interrupted(2, "--model", model)
    assert pruned(sdbench, "--model", model, "--output", "out", "--pattern", "4:8")["resumed_layers"] == 0
    assert len(list(tmp_path.glob("out.work-*"))) == 1


def test_a_changed_model_does_not_go_on_either(sdbench, checkpoint, interrupted, monkeypatch):
    """A hub id's default branch may have moved on since."""
    model = checkpoint()
    interrupted(2, "--model", model)
    monkeypatch.setattr(dense, "state_sha256", lambda parts: "0" * 64)
    done = sdbench("prune", *SMALL, "--model", model, "--output", "out")
    done.refuses(1, "another model than the one that the interrupted run in out.work-")
