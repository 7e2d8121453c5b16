"""The command line in-process, and tiny checkpoints to call it with."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config

from sdbench import devices, environment
from sdbench.cli import main
from sdbench.demo import MODEL_DIR
from sdbench.results import read_jsonl, strict_json

GPU = {"name": "NVIDIA H200", "capability": "9.0"}


@dataclass(frozen=True)
class Finished:
    """How a call ended."""

    code: int
    out: str
    err: str

    def refuses(self, code: int, *messages: str) -> None:
        """One line about the error, after whatever progress there was, and nothing on stdout."""
        assert self.code == code, self.err
        assert self.out == ""
        *progress, last = self.err.splitlines()
        assert last.startswith("sdbench: error: ")
        assert not any("error:" in line or "Traceback" in line for line in progress)
        for message in messages:
            assert message in last


@pytest.fixture
def sdbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Finished]:
    """Calls the entry point with arguments, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path | int | float) -> Finished:
        monkeypatch.setattr(sys, "argv", ["sdbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Finished(int(ended.value.code or 0), out, err)

    return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], Any]:
    """A machine whose GPU is the CPU, and a function that moves a suite's options there, which the command made for the GPU."""
    resolve, describe = devices.resolve_device, environment.describe
    monkeypatch.setenv("SDBENCH_CACHE", str(tmp_path / "cache"))
    device = type("Device", (), {"type": "cuda"})()
    monkeypatch.setattr(devices, "resolve_device", lambda text: device if text == "auto" else resolve(text))
    monkeypatch.setattr(environment, "describe", lambda target: describe(None) | {"gpu": GPU})
    monkeypatch.setattr("sdbench.kernels.launching.capability", lambda device: 90)

    def on_cpu(options: Any) -> Any:
        object.__setattr__(options, "device", torch.device("cpu"))
        return options

    return on_cpu


@pytest.fixture
def timed_run(sdbench: Callable[..., Finished], gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """``run``: a finished run of ``sdbench kernels`` on a GPU with made-up times; a call of it changes what its correct rows say."""
    from sdbench.suites.kernels import suite

    run, us = suite.run, {"linear": 4.0, "gemv": 3.0, "reference": 400.0, "lane_row": 2.0, "int8": 2.5, "fp8": 2.6}
    monkeypatch.setattr(suite, "run", lambda options, directory, progress: run(gpu(options), directory, progress))
    call = ("kernels", "--shapes", "8x32", "--variant", "reference", "--variant", "lane_row", "--output", "run")
    assert sdbench(*call).code == 0

    def change(**changes: Any) -> None:
        rows = read_jsonl(tmp_path / "run/rows.jsonl")
        for row in rows:
            if row["record"] == "result" and row["outcome"] == "correct":
                p50 = us[row["variant"]]
                row |= {"us": {"p20": p50 - 0.25, "p50": p50, "p80": p50 + 0.25}, "gbps": 4123.4, "roofline": 0.876} | changes
        (tmp_path / "run/rows.jsonl").write_text("".join(strict_json(row) + "\n" for row in rows))

    change()
    return change


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a random Qwen3 checkpoint of 14 linears with the demo model's tokenizer."""

    def write(name: str = "tiny", spoil: Callable[[Any], None] = lambda model: None, shard: str = "50GB", **changes: Any) -> Path:
        sizes = {
            "vocab_size": 1024,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "tie_word_embeddings": True,
        }
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes | changes), dtype=torch.float32)
            spoil(model)
        model.generation_config = GenerationConfig.from_pretrained(MODEL_DIR)
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size=shard)
        AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def saved_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run directory by hand; ``recorded`` is how many rows its run.json speaks of, ``replies`` how many samples."""

    def write(
        name: str,
        command: str,
        arguments: dict[str, Any],
        rows: Sequence[Any] = (),
        samples: Sequence[Any] = (),
        recorded: int | None = None,
        replies: int | None = None,
        **record: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        whole = {
            "schema": "sdbench.run/1",
            "command": command,
            "arguments": arguments,
            "environment": {"torch": "2.11.0", "triton": "3.6.0", "gpu": {"name": "NVIDIA H200"}},
            "versions": {"sdbench": "0.1.0"},
            "git": {"commit": "0123456789abcdef", "dirty": False},
            "created": "2026-12-01T00:00:00+00:00",
            "outcome": "complete",
            "audit": [{"attempt": 1, "started": "2026-12-01T00:00:00+00:00", "outcome": "complete"}],
        }
        whole |= {name: count for name, count in (("rows", recorded), ("samples", replies)) if count is not None}
        (folder / "run.json").write_text(json.dumps(whole | record))
        for file, lines in (("rows.jsonl", rows), ("samples.jsonl", samples)):
            if lines or file == "rows.jsonl":
                (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return write


@pytest.fixture
def heavy_imports() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Calls a command in a process of its own, whose stderr ends with the list of slow packages that it imported."""

    def call(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
        code = (
            "import atexit, sys; from sdbench.cli import main; "
            "atexit.register(lambda: print([name for name in ('torch', 'triton') if name in sys.modules], file=sys.stderr)); "
            f"sys.argv = {['sdbench', *arguments]!r}; main()"
        )
        return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)

    return call
