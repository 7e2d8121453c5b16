"""``sdbench verify``: a table of the layers, a line a failure, exit code 3."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def pruned(sdbench, checkpoint) -> Path:
    done = sdbench("prune", "--method", "magnitude", "--device", "cpu", "--model", checkpoint(), "--output", "pruned")
    assert done.code == 0, done.err
    return Path("pruned")


def spoil(folder: Path, name: str, index: tuple[int, int], value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][index] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_good_checkpoint(sdbench, pruned):
    done = sdbench("verify", pruned)
    assert done.code == 0, done.err
    assert done.out.startswith("pruned: packed, 2:4\n")
    rows = [line.split() for line in done.out.splitlines() if "_proj" in line]
    assert len(rows) == 14
    assert rows[0] == ["model.layers.0.self_attn.q_proj", "128x64", "yes", "ok", "ok", "ok", "ok", "ok"]
    assert done.out.splitlines()[-1] == "hashes: checked"


def test_a_bad_one(sdbench, pruned):
    spoil(pruned, f"{UP}.compressed", (2, 5), float("nan"))
    done = sdbench("verify", pruned)
    assert done.code == 3
    (row,) = (line.split() for line in done.out.splitlines() if "FAILED" in line)
    assert row == [UP, "128x64", "yes", "ok", "ok", "ok", "FAILED", "FAILED"]
    lines = done.out.splitlines()
    assert f"values: {UP}.compressed[2, 5]: is nan (1 such value)" in lines
    assert f"hash: {UP}.compressed: is not what sdbench.json lists: another SHA-256" in lines
    last = done.err.splitlines()[-1]
    assert last == f"sdbench: error: pruned: 3 failed checks, the first {UP}.compressed[2, 5]: is nan (1 such value)"


def test_json(sdbench, pruned):
    spoil(pruned, f"{UP}.compressed", (2, 5), float("inf"))
    done = sdbench("verify", pruned, "--json")
    assert done.code == 3
    found = json.loads(done.out)
    assert (found["schema"], found["ok"], found["pattern"], found["format"]) == ("sdbench.verify/1", False, "2:4", "packed")
    assert found["failures"][0] == {"tensor": f"{UP}.compressed", "check": "values", "message": "is inf (1 such value)", "index": [2, 5]}
    assert {layer["name"]: layer["checks"]["values"] for layer in found["layers"]}[UP] == "FAILED"


def test_a_dense_checkpoint_with_zeros(sdbench, checkpoint):
    def zero(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "_proj" in name:
                parameter.view(-1, 4)[:, 1:3] = 0

    model = checkpoint(spoil=zero)
    sdbench("verify", model).refuses(2, "say which pattern it should hold")
    done = sdbench("verify", model, "--pattern", "2:4")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "hashes: no sdbench.json, so no hash is checked"
    assert sdbench("verify", model, "--pattern", "1:4").code == 3


def test_transposed(sdbench, checkpoint):
    def zero(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "_proj" in name:
                rows = torch.arange(len(parameter))
                parameter[rows % 4 < 2] = 0

    done = sdbench("verify", checkpoint(spoil=zero), "--pattern", "2:4")
    assert done.code == 3
    lines = [line for line in done.out.splitlines() if line.startswith("axis: ")]
    assert len(lines) == 14
    assert lines[0].endswith("q_proj.weight: is transposed: its 2:4 groups run along out_features instead of in_features")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nowhere",), 2, "is no checkpoint folder: cannot read config.json"),
        (("pruned", "--pattern", "2-4"), 2, "write it as N:M"),
        (("pruned", "--pattern", "4:8"), 3, "config.json: names the pattern 2:4, not 4:8"),
    ],
)
def test_what_cannot_be_verified(arguments, code, message, sdbench, pruned):
    done = sdbench("verify", *arguments)
    assert done.code == code and message in done.err.splitlines()[-1]


def test_a_cut_off_file(sdbench, pruned):
    file = pruned / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    sdbench("verify", pruned).refuses(3, "model.safetensors is damaged or cut short")


def test_another_version(sdbench, pruned):
    config = json.loads((pruned / "config.json").read_text())
    config["quantization_config"]["version"] = 7
    (pruned / "config.json").write_text(json.dumps(config))
    sdbench("verify", pruned).refuses(1, "packed checkpoint of format version 7, and this sdbench reads version 1")
