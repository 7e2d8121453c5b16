"""``sdbench prune``: a checkpoint that says what it was made of, goes on after a kill, and is never half there."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sdbench as package
from sdbench.calibrate.magnitude import keep_mask
from sdbench.checkpoints import write
from sdbench.checkpoints.files import CheckpointFiles
from sdbench.checkpoints.verify import verify
from sdbench.engine.packed_linear import PackedLinear
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites import prune
from sdbench.suites.data import make_manifest

SMALL = ("--calibration-examples", 3, "--max-tokens", 12, "--device", "cpu")


def pruned(sdbench: Any, *arguments: Any) -> dict[str, Any]:
    done = sdbench("prune", "--json", *SMALL, *arguments)
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
    first, layers, calibration, size, seconds, then = done.out.splitlines()
    assert (first, layers, then) == ("out: demo at 2:4, wanda, packed", "pruned layers: 28", "next: sdbench verify out")
    assert calibration.startswith("calibration: prefill, 1 examples, ") and seconds.startswith("seconds: load ")
    share = float(size.split()[4])
    # Between the mask and half of the values in fp32 (17/32), and all of the embedding as it was.
    assert 17 / 32 < share < 0.65


def test_a_random_model_has_no_tokenizer_and_needs_none(sdbench, checkpoint):
    found = pruned(sdbench, "--model", f"random:{checkpoint()}", "--output", "out", "--prompt-tokens", 5)
    assert found["provenance"]["source"]["kind"] == "random"
    # Random replies ignore EOS: 3 replies of 12 tokens.
    assert found["provenance"]["calibration"]["rows"] == {"min": 33, "max": 33}


KILL = """
import os, signal, sys
from sdbench.results import RunDirectory
add_row = RunDirectory.add_row
def add_and_die(self, row):
    add_row(self, row)
    if sum(row["record"] == "layer" for row in self.rows) == {layers}:
        os.kill(os.getpid(), signal.SIGKILL)
RunDirectory.add_row = add_and_die
from sdbench.cli import main
sys.argv = {argv!r}
main()
"""


def test_a_killed_run_goes_on(sdbench, checkpoint, tmp_path, monkeypatch):
    base = ("--model", checkpoint(), "--method", "sparsegpt")
    whole = pruned(sdbench, *base, "--output", "whole")
    argv = ["sdbench", "prune", "--json", *map(str, (*SMALL, *base)), "--output", "out"]
    code = KILL.format(layers=9, argv=argv)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "out").exists() and len(list(tmp_path.glob("out.work-*"))) == 1
    monkeypatch.setattr(prune, "calibrate", None)  # the calibration texts are there: nothing is answered again
    found = pruned(sdbench, *base, "--output", "out")
    assert found["resumed_layers"] == 9
    assert content(found) == content(whole)
    assert not list(tmp_path.glob("out.work-*"))


@pytest.fixture
def interrupted(sdbench, monkeypatch) -> Callable[..., None]:  # type: ignore[no-untyped-def]
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


def test_sequential_goes_on_with_whole_blocks(sdbench, checkpoint, interrupted):
    """A block's 7 layers are pruned from one look at it: the one that was left half done begins anew."""
    base = ("--model", checkpoint(), "--method", "sparsegpt", "--sequential")
    whole = pruned(sdbench, *base, "--output", "whole")
    interrupted(9, *base)
    found = pruned(sdbench, *base, "--output", "out")
    assert found["resumed_layers"] == 7
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
    monkeypatch.setattr(prune, "state_sha256", lambda state: "0" * 64)
    done = sdbench("prune", *SMALL, "--model", model, "--output", "out")
    done.refuses(1, "another model than the one that the interrupted run in out.work-")


class TestRefused:
    def test_an_output_that_is_there(self, sdbench, tmp_path):
        (tmp_path / "out").mkdir()
        sdbench("prune", "--output", tmp_path / "out").refuses(2, "out is there already; choose another --output, or remove it")

    def test_a_packed_checkpoint_as_the_model(self, sdbench, checkpoint):
        pruned(sdbench, "--model", checkpoint(), "--output", "packed", "--method", "magnitude")
        sdbench("prune", *SMALL, "--model", "packed", "--output", "out").refuses(
            2, "is pruned and packed already; give the dense checkpoint"
        )
        assert not Path("out").exists()

    def test_not_enough_disk(self, sdbench, checkpoint, monkeypatch):
        usage = shutil.disk_usage(".")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=write.SLACK_BYTES + 1000))
        sdbench("prune", *SMALL, "--model", checkpoint(), "--output", "out").refuses(1, "not enough disk for out", "0.07 GB are free")
        assert not Path("out").exists()

    def test_a_disk_that_is_full_after_all(self, sdbench, checkpoint, monkeypatch):
        def fail(*arguments: Any, **options: Any) -> None:
            raise OSError(28, "No space left on device")

        model = checkpoint()
        with monkeypatch.context() as patch:
            patch.setattr(write, "save_file", fail)
            sdbench("prune", *SMALL, "--model", model, "--output", "out").refuses(1, "cannot write out: No space left on device")
        assert not Path("out").exists() and not list(Path().glob(".out*"))
        assert pruned(sdbench, "--model", model, "--output", "out")["resumed_layers"] == 14

    def test_an_output_that_cannot_be_written(self, sdbench, checkpoint, tmp_path):
        (tmp_path / "file").write_text("")
        sdbench("prune", *SMALL, "--model", checkpoint(), "--output", tmp_path / "file" / "out").refuses(1, "cannot write")

    def test_no_output(self, sdbench):
        sdbench("prune").refuses(2, "Missing option '--output'")

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (("--calib", "decod"), 2, "did you mean decode"),
            (("--method", "wand"), 2, "did you mean wanda"),
            (("--pattern", "5:4"), 2, "N must lie between 1 and 3"),
            (("--targets", "up_prj"), 2, "did you mean up_proj"),
            (("--train", "train.jsonl"), 2, "--train and --split-manifest go together"),
            (("--calibration-examples", 1000), 2, "1000 examples asked for"),
        ],
    )
    def test_wrong_arguments(self, arguments, code, message, sdbench, checkpoint):
        sdbench("prune", "--device", "cpu", "--model", checkpoint(), "--output", "out", *arguments).refuses(code, message)
        assert not Path("out").exists()

    def test_a_width_that_is_no_multiple(self, sdbench, checkpoint):
        """CASES 6: names the layer, the width and M."""
        model = checkpoint(intermediate_size=40)
        done = sdbench("prune", *SMALL, "--model", model, "--output", "out", "--pattern", "16:32")
        done.refuses(2, "layer model.layers.0.mlp.down_proj: in_features 40 is not a multiple of M=32")

    def test_a_changed_training_file(self, sdbench, checkpoint, tmp_path):
        for name, text in (("train", "1 + 1?"), ("validation", "2 + 2?")):
            (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": text, "answer": "#### 2"}) + "\n")
        make_manifest("train.jsonl", "validation.jsonl", "r1").write("manifest.json")
        Path("validation.jsonl").unlink()  # only the training part is read
        files = ("--train", "train.jsonl", "--split-manifest", "manifest.json", "--calibration-examples", 1)
        pruned(sdbench, "--model", checkpoint(), "--output", "out", *files)
        Path("train.jsonl").write_text(json.dumps({"question": "1 + 2?", "answer": "#### 3"}) + "\n")
        sdbench("prune", "--model", "tiny", "--output", "other", *files).refuses(3, "is not the train part that manifest.json pins")
