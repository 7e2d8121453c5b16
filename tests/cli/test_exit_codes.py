"""Exit codes 1 and 2: what was typed is wrong (2), or it may be right and the world is not (1)."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors

E2E = ("e2e", "--device", "cpu", "--output", "run", "--model")
TYPED = [
    ((*E2E, "nowhere.gguf"), "no such file"),
    ((*E2E, "empty"), "no config.json, so it is not a transformers checkpoint"),
    ((*E2E, "notes.txt"), "a file, but not a .gguf one"),
    ((*E2E, "no/such/folder"), "no such folder or file, and not a hub id"),
    ((*E2E, "int4"), "quantised; pruning needs the unquantised checkpoint"),
    ((*E2E, "demo", "--calib", "text", "--calibration-text", "none.txt"), "cannot read none.txt: No such file"),
    ((*E2E, "demo", "--fidelity-only", "--rate-repeats", "2"), "--fidelity-only times nothing; leave out --rate-repeats"),
    ((*E2E, "demo", "--equal-tokens", "100000"), "--equal-tokens 100000 after a prompt of 52 exceed the 2048 positions of demo"),
    (("split", "none.jsonl", "--output", "data"), "cannot read none.jsonl: No such file"),
    (("split", "empty", "--output", "data"), "cannot read empty: Is a directory"),
    (("verify", "nowhere"), "nowhere is no checkpoint folder: cannot read config.json (No such file"),
    (("verify", "empty"), "empty is no checkpoint folder"),
    (("verify", "int4"), "int4 has no model.safetensors"),
    (("report", "empty"), "empty is no run directory"),
    (("compare", "empty", "empty"), "empty is no run directory"),
    (("pool", "nowhere"), "nowhere is no run directory"),
    (("kernels", "--device", "cpu", "--min-speedup", "1"), "--device cpu: --min-speedup needs timings"),
]
WORLD = [
    ((*E2E, "broken"), "model.safetensors is damaged or cut short"),
    ((*E2E, "lacking"), "the weight file model.safetensors is missing"),
    (("e2e", "--device", "cuda", "--model", "demo"), "finds no CUDA GPU"),
    (("kernels", "--min-speedup", "1"), "no CUDA device: --min-speedup needs timings"),
    (("tune",), "no CUDA device"),
    (("split", "questions.jsonl", "--output", "notes.txt/data"), "cannot write"),
    (("split", "bad.jsonl", "--output", "data"), "bad.jsonl, line 1"),
    (("report", "cut"), "cut/run.json is no sdbench.run/1 record"),
    (("kernels", "--device", "cpu", "--shapes", "8x32", "--output", "notes.txt/run"), "cannot write the run directory"),
]


@pytest.fixture
def world(tmp_path: Path, checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and folders that the calls name, on a machine without a GPU and without a hub."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(4)))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/run.json").write_text("{")
    (checkpoint("broken") / "model.safetensors").write_bytes(b"\x08")
    (checkpoint("lacking") / "model.safetensors").unlink()
    config = checkpoint("int4") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    (tmp_path / "int4/model.safetensors").unlink()


@pytest.mark.parametrize(("code", "call", "message"), [(2, *one) for one in TYPED] + [(1, *one) for one in WORLD])
def test_which_of_the_two(code: int, call: tuple[str, ...], message: str, sdbench: Any, world: None) -> None:
    sdbench(*call).refuses(code, message)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (2, hub_errors.RepositoryNotFoundError, "no such (public) model on the hub"),
        (2, hub_errors.RevisionNotFoundError, "but not this revision"),
        (1, hub_errors.GatedRepoError, "accept its licence"),
        (1, hub_errors.LocalEntryNotFoundError, "cannot be reached (offline?)"),
    ],
)
def test_a_hub_without_the_model_and_a_hub_out_of_reach(
    code: int, kind: type[Exception], message: str, sdbench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*others: Any, **options: Any) -> None:
        raise kind.__new__(kind, "first line")  # the hub's own want a response object

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    sdbench(*E2E, "nobody/nothing").refuses(code, message)
