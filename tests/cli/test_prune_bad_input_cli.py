"""What ``sdbench prune`` refuses, in one line and leaving nothing that looks whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sdbench.checkpoints import write
from sdbench.cli.prune import WITHOUT_CALIBRATION, command
from sdbench.suites import prune
from sdbench.suites.data import make_manifest

SMALL = ("--calibration-examples", 3, "--max-tokens", 12, "--device", "cpu")
MAGNITUDE = ("--method", "magnitude", "--device", "cpu")


def pruned(sdbench: Any, *arguments: Any) -> dict[str, Any]:
    done = sdbench("prune", "--json", *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_an_output_that_is_there(sdbench, tmp_path):
    (tmp_path / "out").mkdir()
    sdbench("prune", "--output", tmp_path / "out").refuses(2, "out is there already; choose another --output, or remove it")


def test_a_packed_checkpoint_as_the_model(sdbench, checkpoint):
    pruned(sdbench, *MAGNITUDE, "--model", checkpoint(), "--output", "packed")
    sdbench("prune", *SMALL, "--model", "packed", "--output", "out").refuses(2, "is pruned and packed already; give the dense checkpoint")
    assert not Path("out").exists()


def test_a_dense_export_as_the_model(sdbench, checkpoint):
    """It loads as any model does, and would be the dense one that others are compared with."""
    pruned(sdbench, *MAGNITUDE, "--model", checkpoint(), "--format", "dense", "--output", "zeros")
    told = "model 'zeros' holds weights that 'sdbench prune' pruned (sdbench.json says so); give the dense checkpoint"
    sdbench("prune", *SMALL, "--model", "zeros", "--output", "out").refuses(2, told)
    sdbench("e2e", "--device", "cpu", "--model", "zeros", "--output", "run").refuses(2, told)
    assert not Path("out").exists() and not Path("run").exists()


@pytest.mark.parametrize(
    ("draft", "arguments"),
    [
        (".out.draft", (*MAGNITUDE, "--output", "out")),
        ("shards/.shard-1-of-2.draft", (*SMALL, "--shard", "1/2", "--statistics", "shards")),
    ],
)
def test_what_a_killed_run_left_takes_no_room_from_the_next(sdbench, checkpoint, monkeypatch, draft, arguments):
    """The disk is full as long as it is there."""
    Path(draft).mkdir(parents=True)
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0 if Path(draft).exists() else 10**9))
    assert sdbench("prune", *arguments, "--model", checkpoint()).code == 0


def test_not_enough_disk(sdbench, checkpoint, monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=write.SLACK_BYTES + 1000))
    sdbench("prune", *SMALL, "--model", checkpoint(), "--output", "out").refuses(1, "not enough disk for out", "0.07 GB are free")
    assert not Path("out").exists()


def test_a_disk_that_is_full_after_all(sdbench, checkpoint, monkeypatch):
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    model = checkpoint()
    with monkeypatch.context() as patch:
        patch.setattr(write, "save_file", fail)
        done = sdbench("prune", *SMALL, "--model", model, "--output", "out")
    done.refuses(1, "cannot write out: No space left on device")
    (work,) = Path().glob("out.work-*")
    assert f"what is finished is in {work}, and the same command goes on with it" in done.err.splitlines()
    assert not Path("out").exists() and not list(Path().glob(".out*"))
    assert pruned(sdbench, *SMALL, "--model", model, "--output", "out")["resumed_layers"] == 14


def test_a_gpu_that_is_too_small(sdbench, checkpoint, monkeypatch):
    def fail(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB.\nGPU 0 has")

    monkeypatch.setattr(prune, "calibrate", fail)
    done = sdbench("prune", *SMALL, "--model", checkpoint(), "--output", "out")
    done.refuses(1, "out of GPU memory (CUDA out of memory. Tried to allocate 6.00 GiB.", "use a smaller --batch-size")


def test_an_output_that_cannot_be_written(sdbench, checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    sdbench("prune", *SMALL, "--model", checkpoint(), "--output", tmp_path / "file" / "out").refuses(1, "cannot write")


def test_a_run_directory_that_holds_a_layer_of_nobody(sdbench, checkpoint):
    Path("run").mkdir()
    file = Path("run/layer-00003.safetensors")
    file.write_text("mine")
    done = sdbench("prune", *MAGNITUDE, "--model", checkpoint(), "--output", "out", "--run-directory", "run")
    done.refuses(2, "run/layer-00003.safetensors is there already, and no layer that this run pruned; choose another --run-directory")
    assert file.read_text() == "mine" and not Path("out").exists()


def test_no_output(sdbench):
    sdbench("prune").refuses(2, "Missing option '--output'")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--calib", "decod"), 2, "did you mean decode"),
        (("--method", "wand"), 2, "did you mean wanda"),
        (("--pattern", "5:4"), 2, "N must lie between 1 and 3"),
        (("--targets", "up_prj"), 2, "did you mean up_proj"),
        (("--train", "train.jsonl"), 2, "--train and --split-manifest go together"),
        (("--calibration-examples", 1000), 2, "--calibration-examples 1000"),
    ],
)
def test_wrong_arguments(arguments, code, message, sdbench, checkpoint):
    sdbench("prune", "--device", "cpu", "--model", checkpoint(), "--output", "out", *arguments).refuses(code, message)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--calib", "decode"), "--calib would change nothing; leave it out"),  # the default, but asked for
        (("--max-tokens", 12, "--calibration-tokens", "64k", "--sequential"), "--max-tokens, --calibration-tokens, --sequential would"),
        (("--batch-size", 4, "--seed", 1), "--batch-size, --seed would change nothing; leave them out"),
    ],
)
def test_calibration_options_of_a_method_that_needs_none(arguments, named, sdbench, checkpoint):
    done = sdbench("prune", *MAGNITUDE, "--model", checkpoint(), "--output", "out", *arguments)
    done.refuses(2, "--method magnitude needs no calibration, and ", named)
    assert sorted(path.name for path in Path().iterdir()) == ["tiny"]


def test_every_option_is_about_calibration_or_not():
    names = {option.name for option in command.params}
    assert names > WITHOUT_CALIBRATION and {"calib", "train", "mix", "seed", "sequential", "top_p"} <= names - WITHOUT_CALIBRATION


def test_a_width_that_is_no_multiple(sdbench, checkpoint):
    """CASES 6: names the layer, the width and M."""
    model = checkpoint(intermediate_size=40)
    done = sdbench("prune", *SMALL, "--model", model, "--output", "out", "--pattern", "16:32")
    done.refuses(2, "layer model.layers.0.mlp.down_proj: in_features 40 is not a multiple of M=32")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_nan_and_inf_in_any_tensor(name, value, sdbench, checkpoint):
    def spoil(model):
        model.get_parameter(name).view(-1)[70 % model.get_parameter(name).numel()] = value

    done = sdbench("prune", *MAGNITUDE, "--model", checkpoint(spoil=spoil), "--output", "out")
    index = "[6]" if "norm" in name else "[1, 6]"
    done.refuses(1, f"layer {name.removesuffix('.weight')}: weight{index} is {value}; the checkpoint is damaged")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("norm", "value", "message"),
    [
        ("model.norm", 3e38, "NaN or Inf in the logits of new token 1"),
        (
            "model.layers.1.input_layernorm",
            1e30,
            "layer model.layers.1.self_attn.q_proj: NaN or Inf (or a square past float32) among the inputs",
        ),
    ],
)
def test_what_overflows_on_the_way(norm, value, message, sdbench, checkpoint):
    """Every weight is finite, but not what the norm gives, or its square."""

    def spoil(model):
        model.get_parameter(f"{norm}.weight")[3] = value

    sdbench("prune", *SMALL, "--model", checkpoint(spoil=spoil), "--output", "out").refuses(1, message)
    assert not Path("out").exists()


def test_replies_without_a_decode_step(sdbench, checkpoint):
    done = sdbench("prune", *SMALL, "--model", checkpoint(), "--output", "out", "--max-tokens", 1)
    done.refuses(1, "no calibration text has a row that counts (a reply of one token has no decode step)")


def test_a_model_without_a_chat_template(sdbench, checkpoint):
    model = checkpoint()
    (model / "chat_template.jinja").unlink()
    sdbench("prune", *SMALL, "--model", model, "--output", "out").refuses(2, "has no chat template: choose an instruction-tuned model")


def test_a_changed_training_file(sdbench, checkpoint, tmp_path):
    for name, text in (("train", "1 + 1?"), ("validation", "2 + 2?")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": text, "answer": "#### 2"}) + "\n")
    make_manifest("train.jsonl", "validation.jsonl", "r1").write("manifest.json")
    Path("validation.jsonl").unlink()  # only the training part is read
    files = ("--train", "train.jsonl", "--split-manifest", "manifest.json", "--calibration-examples", 1)
    pruned(sdbench, *SMALL, "--model", checkpoint(), "--output", "out", *files)
    Path("train.jsonl").write_text(json.dumps({"question": "1 + 2?", "answer": "#### 3"}) + "\n")
    sdbench("prune", "--model", "tiny", "--output", "other", *files).refuses(3, "is not the train part that manifest.json pins")
