"""Several prompts at once in the decode suite: what is counted, what is printed, and what a run directory keeps."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel

from sdbench.engine.decoders import TransformersDecoder
from sdbench.engine.fused import FusedDecoder, Unfusable
from sdbench.engine.packed_linear import PackedLinear
from sdbench.engine.paths import COMPILED, EAGER, FUSED, FUSED_GRAPH, GRAPH
from sdbench.errors import CheckFailed, UsageError
from sdbench.models import resolve_model
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.decode import suite
from sdbench.suites.decode.batches import batch_table
from sdbench.suites.decode.options import DecodeOptions
from sdbench.suites.decode.report import of_run, report
from sdbench.suites.decode.suite import run
from sdbench.suites.runs import read_run


def options(folder: Path, **changes: Any) -> DecodeOptions:
    cpu = torch.device("cpu")
    spec = resolve_model(f"random:{folder}", None, cpu)
    standard: dict[str, Any] = {"device": cpu, "dtype": torch.float32}
    standard |= {"patterns": (Pattern(2, 4),), "contexts": (4,), "tokens": 5, "repeats": 1, "warmup_tokens": 0}
    standard |= {"baselines": False, "profiled": False, "targets": (), "ignore": (), "seed": 0}
    return DecodeOptions(spec=spec, **standard | changes)


@pytest.fixture
def folder(tiny_qwen3: PreTrainedModel, tmp_path: Path) -> Path:
    tiny_qwen3.config.save_pretrained(tmp_path / "architecture")
    return tmp_path / "architecture"


def measure(wanted: DecodeOptions, directory: RunDirectory | None = None) -> list[dict[str, Any]]:
    return run(wanted, directory, Progress(Console(file=io.StringIO())))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], float]]:
    """Lengths of the prompts of each timed reply, and its decode seconds, whatever decodes it."""
    found: list[tuple[list[int], float]] = []

    def spied(decode: Any) -> Any:
        def spy(self: Any, prompts: Any, **request: Any) -> Any:
            replies = decode(self, prompts, **request)
            if request["max_new_tokens"] == 5:
                found.append(([len(prompt) for prompt in prompts], replies[0].decode_seconds))
            return replies

        return spy

    for decoder in (FusedDecoder, TransformersDecoder):
        monkeypatch.setattr(decoder, "replies", spied(decoder.replies))
    return found


def test_rows_of_several_prompts(
    folder: Path, tmp_path: Path, asked: list[tuple[list[int], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = options(folder, batches=(1, 3), baselines=True)
    with RunDirectory.open(tmp_path / "run", "decode", wanted.arguments(), {}) as directory:
        rows = measure(wanted, directory)
        directory.add_row({"record": "other"})
    single = [("dense", FUSED, 1), ("dense", EAGER, 1), ("2:4", FUSED, 1)]
    assert [(row["arm"], row["path"], row.get("batch", 1)) for row in rows] == [*single, *((arm, path, 3) for arm, path, _ in single)]
    assert {row["outcome"] for row in rows} == {"correct"}
    # Arms are measured one after the other. An eager cache is warmed up at full length.
    lengths = [[4], [4], [4], [4] * 3, [4] * 3, [4] * 3, [4], [4] * 3]
    assert [prompts for prompts, _ in asked] == lengths
    for row, took in zip(rows[3:], (asked[3][1], asked[5][1], asked[7][1]), strict=True):
        assert row["decode_rate"]["p50"] == pytest.approx(3 * 4 / took)
        assert row["ms_per_token"] == pytest.approx(1e3 * took / 4)
    assert rows[5]["speedup"] == rows[5]["decode_rate"]["p50"] / max(row["decode_rate"]["p50"] for row in rows[3:5])
    saved = read_run(tmp_path / "run")
    assert [row["record"] for row in saved.rows] == ["decode", "decode", "batch", "batch", "decode", "batch", "prompt", "other"]
    assert of_run(saved).document["rows"] == report(rows, wanted.arguments(), {}).document["rows"]
    monkeypatch.setattr(suite, "load_model", None)
    with RunDirectory.open(tmp_path / "run", "decode", wanted.arguments(), {}) as directory:
        assert measure(wanted, directory) == rows


@pytest.mark.gpu
def test_on_a_gpu_every_way_takes_several_prompts(folder: Path) -> None:
    """In bf16, whose products of several tokens run on the matrix units."""
    rows = measure(options(folder, batches=(4, 40), baselines=True, device=torch.device("cuda"), dtype=torch.bfloat16))
    ways = [("dense", FUSED_GRAPH), ("dense", COMPILED), ("dense", GRAPH), ("2:4", FUSED_GRAPH)]
    found = [(row["arm"], row["path"], row["batch"], row["outcome"], row["reason"]) for row in rows]
    assert sorted(found) == sorted((*way, batch, "correct", None) for way in ways for batch in (4, 40))
    assert all(row["speedup"] > 0 and row["capture"] if row["path"] == FUSED_GRAPH else row["speedup"] for row in rows)


def test_a_row_that_is_gone_is_measured_again(folder: Path, tmp_path: Path) -> None:
    """Also where another way's row could have taken its place, had the model been refused."""
    wanted = options(folder, batches=(1, 2), baselines=True)
    with RunDirectory.open(tmp_path / "run", "decode", wanted.arguments(), {}) as directory:
        rows = measure(wanted, directory)
    lines = (tmp_path / "run" / "rows.jsonl").read_text().splitlines(keepends=True)
    for number in range(len(lines)):
        (tmp_path / "run" / "rows.jsonl").write_text("".join(lines[:number] + lines[number + 1 :]))
        with RunDirectory.open(tmp_path / "run", "decode", wanted.arguments(), {}) as directory:
            again = measure(wanted, directory)
            assert len(directory.rows) == len(lines)
        assert [(row["arm"], row["path"], row.get("batch")) for row in again] == [
            (row["arm"], row["path"], row.get("batch")) for row in rows
        ]


def test_without_room_on_a_cpu_the_other_rows_are_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(model: Any, *arguments: Any, batch: int = 1, **others: Any) -> Any:
        if batch > 2:
            torch.empty(1 << 60)
        return FusedDecoder(model, *arguments, batch=batch, **others)

    monkeypatch.setattr("sdbench.engine.decoders.FusedDecoder", no_room)
    rows = measure(options(folder, batches=(2, 4)))
    assert [(row["arm"], row["batch"], row["outcome"]) for row in rows] == [
        (arm, *found) for arm in ("dense", "2:4") for found in ((2, "correct"), (4, "out_of_resources"))
    ]


def test_what_has_no_fused_step_is_decoded_by_transformers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arm alike; a ratio of one loop to another is none."""

    def refuse(*arguments: Any, **others: Any) -> None:
        raise Unfusable("no fused step: not today")

    with monkeypatch.context() as patch:
        patch.setattr("sdbench.engine.decoders.FusedDecoder", refuse)
        wanted = options(folder, batches=(2,))
        with RunDirectory.open(tmp_path / "run", "decode", wanted.arguments(), {}) as directory:
            rows = measure(wanted, directory)
    told = [(row["arm"], row["path"], row["outcome"], row["speedup"] is not None) for row in rows]
    ways = ((FUSED, "constraint", False), (EAGER, "correct", True))
    assert told == [(arm, *way) for arm in ("dense", "2:4") for way in ways]
    with RunDirectory.open(tmp_path / "run", "decode", wanted.arguments(), {}) as directory:
        assert measure(wanted, directory) == rows
    found = report(rows, wanted.arguments(), {})
    assert [cells[:4] for cells in found.cells] == [["dense", "4", "2", "eager"], ["2:4", "4", "2", "eager"]]
    assert "linears of one input" in found.lines[-1]

    def refuse_pruned(model: Any, *arguments: Any, **others: Any) -> Any:
        if any(isinstance(module, PackedLinear) for module in model.modules()):
            refuse()
        return FusedDecoder(model, *arguments, **others)

    monkeypatch.setattr("sdbench.engine.decoders.FusedDecoder", refuse_pruned)
    rows = measure(wanted)
    assert [(row["arm"], row["path"], row["speedup"]) for row in rows if row["decode_rate"]] == [
        ("dense", FUSED, 1.0),
        ("2:4", EAGER, None),
    ]
    assert any("no x dense for 2:4, eager" in line for line in report(rows, wanted.arguments(), {}).lines)


def test_a_product_that_does_not_fit_is_a_row_and_a_wrong_one_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: Exception) -> None:
        def fail(*arguments: Any) -> None:
            raise error

        monkeypatch.setattr(suite, "require_right", fail)

    def refuse(*arguments: Any, **others: Any) -> None:
        raise Unfusable("no fused step: not today")

    # A fused step checks its own products.
    raises(CheckFailed("wrong here"))
    assert {row["outcome"] for row in measure(options(folder, batches=(3,)))} == {"correct"}
    monkeypatch.setattr("sdbench.engine.decoders.FusedDecoder", refuse)
    with pytest.raises(CheckFailed, match="wrong here"):
        measure(options(folder, batches=(3,)))
    raises(torch.OutOfMemoryError("no room"))
    rows = measure(options(folder, batches=(3,)))
    assert [(row["arm"], row["outcome"], row["reason"]) for row in rows[3:]] == [("2:4", "out_of_resources", "no room")]


def test_no_room_to_pack_costs_the_arm_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(suite, "pack", refuse)
    rows = measure(options(folder, batches=(1, 3)))
    assert {(row["arm"], row["outcome"], row["reason"]) for row in rows} == {
        ("dense", "correct", None),
        ("2:4", "out_of_resources", "no room"),
    }
    assert len(report(rows, options(folder).arguments(), {}).cells) > 0


def test_no_room_beside_the_rates_keeps_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth's probe takes two buffers, and a profile its events, where a large model leaves little."""

    def refuse() -> float:
        raise torch.OutOfMemoryError("no room")

    assert (suite._where_there_is_room(refuse), suite._where_there_is_room(lambda: 4.0)) == (None, 4.0)


def made(arm: str, batch: int, rate: float, speedup: float | None) -> dict[str, Any]:
    spread = {"p20": rate - 1, "p50": rate, "p80": rate + 1}
    row = {"arm": arm, "path": EAGER, "context": 4, "batch": batch, "decode_rate": spread, "speedup": speedup}
    return row | {"ms_per_token": 1.0, "of_ceiling": 0.642}


def test_the_batch_at_which_pruning_stops_paying_is_printed() -> None:
    rows = [made("dense", 1, 10, 1.0), made("dense", 1, 20, 1.0), made("2:4", 1, 30, 1.5), made("2:4", 4, 40, 1.1), made("2:4", 8, 30, 0.8)]
    table = batch_table(rows)
    assert "2:4 at 4 of context stops paying at batch 8: 1.50x at 1, 1.10x at 4, 0.80x at 8" in table.lines
    assert table.cells[0] == ["dense", "4", "1", "eager", "20.0", "19.0-21.0", "1.00", "64"]
    assert any("pays up to batch 4, the largest that was timed" in line for line in batch_table(rows[:4]).lines)


def test_one_repeat_has_no_spread(folder: Path) -> None:
    """Neither in the table of one prompt, nor in that of several, nor in that of prompts in turn."""
    wanted = options(folder, repeats=1, batches=(1, 2))
    found = report(measure(wanted), wanted.arguments(), {})
    assert "EOS ignored, timed once; " in found.lines[0]
    with_spread = [table for table in (found, *found.more) if any(column.name == "p20-p80" for column in table.columns)]
    assert {table.title for table in with_spread[1:]} >= {"several prompts at once"}
    for table in with_spread:
        at = [column.name for column in table.columns].index("p20-p80")
        assert {row[at] for row in table.cells} == {"-"} and table.cells


def test_without_a_single_prompt_the_table_is_that_of_several(folder: Path) -> None:
    wanted = options(folder, batches=(2,))
    found = report(measure(wanted), wanted.arguments(), {})
    assert found.title.endswith("several prompts at once") and not found.more
    assert [cells[:3] for cells in found.cells] == [["dense", "4", "2"], ["2:4", "4", "2"]]


def test_no_prompt_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="--batch is 0; it must be at least 1"):
        options(folder, batches=(0, 2))
