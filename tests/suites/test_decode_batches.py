"""Several prompts at once in the decode suite: what is counted, what is printed, and what a run directory keeps."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel

from sdbench.engine.decoders import EAGER, FUSED
from sdbench.engine.greedy import greedy
from sdbench.errors import CheckFailed, UsageError
from sdbench.models import resolve_model
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.decode import suite
from sdbench.suites.decode.batches import batch_table
from sdbench.suites.decode.report import of_run, report
from sdbench.suites.decode.suite import DecodeOptions, run
from sdbench.suites.runs import read_run


def options(folder: Path, **changes: Any) -> DecodeOptions:
    cpu = torch.device("cpu")
    spec = resolve_model(f"random:{folder}", None, cpu)
    standard: dict[str, Any] = {"patterns": (Pattern(2, 4),), "contexts": (4,), "tokens": 5, "repeats": 1, "warmup_tokens": 0}
    standard |= {"baselines": False, "profiled": False, "targets": (), "ignore": (), "seed": 0}
    return DecodeOptions(spec=spec, device=cpu, dtype=torch.float32, **standard | changes)


@pytest.fixture
def folder(tiny_qwen3: PreTrainedModel, tmp_path: Path) -> Path:
    tiny_qwen3.config.save_pretrained(tmp_path / "architecture")
    return tmp_path / "architecture"


def test_rows_of_several_prompts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seconds = [], []

    def spy(model: Any, prompts: Any, **request: Any) -> Any:
        found = greedy(model, prompts, **request)
        if request["max_new_tokens"] == 5:
            asked.append([len(prompt) for prompt in prompts])
            seconds.append(found[0].decode_seconds)
        return found

    monkeypatch.setattr("sdbench.engine.decoders.greedy", spy)
    wanted = options(folder, batches=(1, 3))
    with RunDirectory.open(tmp_path / "run", "decode", wanted.arguments(), {}) as directory:
        rows = run(wanted, directory, Progress(Console(file=io.StringIO())))
        directory.add_row({"record": "other"})
    ways = [("dense", FUSED, 1), ("2:4", FUSED, 1), ("dense", EAGER, 3), ("2:4", EAGER, 3)]
    assert [(row["arm"], row["path"], row.get("batch", 1)) for row in rows] == ways
    assert {row["outcome"] for row in rows} == {"correct"}
    # Arms are measured one after the other; a fused step's replies don't come from the loop. An eager cache is warmed up at full length.
    assert asked == [[4, 4, 4]] * 4
    for row, took in zip(rows[2:], seconds[1::2], strict=True):
        assert row["decode_rate"]["p50"] == pytest.approx(3 * 4 / took)
        assert row["ms_per_token"] == pytest.approx(1e3 * took / 4)
    assert rows[3]["speedup"] == rows[3]["decode_rate"]["p50"] / rows[2]["decode_rate"]["p50"]
    saved = read_run(tmp_path / "run")
    assert [row["record"] for row in saved.rows] == ["decode", "batch", "decode", "batch", "prompt", "other"]
    assert of_run(saved).document["rows"] == report(rows, wanted.arguments(), {}).document["rows"]
    monkeypatch.setattr(suite, "load_model", None)
    with RunDirectory.open(tmp_path / "run", "decode", wanted.arguments(), {}) as directory:
        assert run(wanted, directory, Progress(Console(file=io.StringIO()))) == rows


def test_a_product_that_does_not_fit_is_a_row_and_a_wrong_one_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: Exception) -> None:
        def fail(*arguments: Any) -> None:
            raise error

        monkeypatch.setattr(suite, "require_right", fail)

    raises(torch.OutOfMemoryError("no room"))
    rows = run(options(folder, batches=(3,)), None, Progress(Console(file=io.StringIO())))
    assert [(row["arm"], row["outcome"], row["reason"]) for row in rows[1:]] == [("2:4", "out_of_resources", "no room")]
    raises(CheckFailed("wrong here"))
    with pytest.raises(CheckFailed, match="wrong here"):
        run(options(folder, batches=(3,)), None, Progress(Console(file=io.StringIO())))


def made(arm: str, batch: int, rate: float, speedup: float | None) -> dict[str, Any]:
    spread = {"p20": rate, "p50": rate, "p80": rate}
    return {"arm": arm, "path": EAGER, "context": 4, "batch": batch, "decode_rate": spread, "speedup": speedup, "ms_per_token": 1.0}


def test_the_batch_at_which_pruning_stops_paying_is_printed() -> None:
    rows = [made("dense", 1, 10, 1.0), made("dense", 1, 20, 1.0), made("2:4", 1, 30, 1.5), made("2:4", 4, 40, 1.1), made("2:4", 8, 30, 0.8)]
    table = batch_table(rows)
    assert "2:4 at 4 of context stops paying at batch 8: 1.50x at 1, 1.10x at 4, 0.80x at 8" in table.lines
    assert table.cells[0][:5] == ["dense", "4", "1", "eager", "20.0"]
    assert any("pays up to batch 4, the largest that was timed" in line for line in batch_table(rows[:4]).lines)


def test_without_a_single_prompt_the_table_is_that_of_several(folder: Path) -> None:
    wanted = options(folder, batches=(2,))
    found = report(run(wanted, None, Progress(Console(file=io.StringIO()))), wanted.arguments(), {})
    assert found.title.endswith("several prompts at once") and not found.more
    assert [cells[:3] for cells in found.cells] == [["dense", "4", "2"], ["2:4", "4", "2"]]


def test_no_prompt_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="--batch is 0; it must be at least 1"):
        options(folder, batches=(0, 2))
