"""Searches end to end on the CPU, with a timer that believes what a config says of itself: cache, resume, ties, efforts, export."""

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sdbench.errors import SdbenchError, UsageError
from sdbench.kernels import registry, tuned
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.results import RunDirectory, read_jsonl, strict_json
from sdbench.suites.kernels import tune
from sdbench.suites.kernels.measure import Measurement, measure
from sdbench.suites.kernels.runner import Local
from sdbench.suites.kernels.tune import TuneRun
from sdbench.suites.runs import require_same_gpu

FAKES = Path(__file__).parent / "fakes"
CPU = torch.device("cpu")
SHAPE = {"o": (8, 32)}

Config = dict[str, int]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("SDBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(FAKES)
    module = importlib.import_module("faulty_variant")
    monkeypatch.setattr(module, "LAUNCHED", [])
    space = [{"kind": module.RIGHT, "us": us} for us in range(20, 60)]
    monkeypatch.setattr(module, "SPACE", [*space[:5], {"kind": module.NAN, "us": 1}, {"kind": module.RAISES, "us": 2}, *space[5:]])
    yield module


class Notes(Progress):
    """Keeps what would be printed."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def go(faulty: Any, shapes: Any = None, directory: Path | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """One command: its rows and notes, and the configs that it launched."""
    faulty.LAUNCHED.clear()
    measurement = Measurement([], shapes or SHAPE, dtype, CPU, [], 0, **options)
    progress = Notes()
    products = [(faulty.VARIANT, layer, None, 1) for layer in measurement.shapes]
    if directory is None:
        rows = measure(products, measurement, None, progress, Local(faulty.times))
    else:
        with RunDirectory.open(directory, "tune", {}, {}) as run:
            rows = measure(products, measurement, run, progress, Local(faulty.times))
    return rows, progress.notes, [dict(config) for config in faulty.LAUNCHED]


def distinct(configs: Sequence[Config]) -> int:
    return len({strict_json(config) for config in configs})


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.json"))


def test_a_full_search_tries_every_config_and_the_fastest_right_one_is_kept(faulty: Any, tmp_path: Path) -> None:
    """CASES 5, 10: a wrong config that would be the fastest never wins."""
    (row,), notes, launched = go(faulty, effort="full")
    assert row["config"] == {"kind": faulty.RIGHT, "us": 20} and row["config_source"] == "search"
    assert row["us"] == {"p20": 19.9, "p50": 20.0, "p80": 20.1}
    # The space and the default, which is not in it.
    assert row["outcomes"] == {"correct": 41, "incorrect": 1, "crash": 1} and row["configs"] == 43 == distinct(launched)
    assert notes == []
    (file,) = files(tmp_path)
    held = json.loads(file.read_text())
    assert (held["config"], held["effort"], held["outcomes"]) == (row["config"], "full", row["outcomes"])


def test_a_warm_cache_checks_and_times_the_choice_alone(faulty: Any, tmp_path: Path) -> None:
    go(faulty, effort="full")
    before = [file.read_bytes() for file in files(tmp_path)]
    (row,), notes, launched = go(faulty, effort="quick")
    assert row["config_source"] == "cache" and row["config"] == {"kind": faulty.RIGHT, "us": 20} and row["outcomes"] == {"correct": 1}
    assert row["us"]["p50"] == 20 and distinct(launched) == 1 and notes == []
    assert [file.read_bytes() for file in files(tmp_path)] == before


def test_a_fuller_search_does_not_stop_at_a_quick_ones_choice_and_begins_with_it(faulty: Any) -> None:
    (quick,), _, launched = go(faulty, effort="quick")
    assert quick["configs"] == 12 == distinct(launched)
    assert launched[0] == faulty.DEFAULT
    (full,), _, launched = go(faulty, effort="full")
    assert full["config_source"] == "search" and full["config"]["us"] == 20
    assert launched[0] == quick["config"]


def test_what_ships_is_tried_first_even_by_a_quick_search(faulty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tuned.key_of(faulty.VARIANT, registry.Problem(8, 32, torch.float32, None, 1, 0), CPU)
    shipped = {"kind": faulty.RIGHT, "us": 5}
    choice = tuned.Choice(schema=tuned.CHOICE_SCHEMA, key=key, config=shipped, us={}, effort="full", outcomes={}, created="")
    monkeypatch.setattr(tuned, "shipped", lambda capability: (choice,))
    (row,), _, launched = go(faulty)
    assert launched[0] == shipped == row["config"]


def test_without_effort_the_default_is_checked_and_nothing_written(faulty: Any, tmp_path: Path) -> None:
    go(faulty, effort="full", use_cache=False)
    assert files(tmp_path) == []
    (row,), _, launched = go(faulty, effort="none")
    assert row["config"] == faulty.DEFAULT and row["config_source"] == "default" and row["us"]["p50"] == 100
    assert distinct(launched) == 1 and files(tmp_path) == []


def test_the_cache_can_be_left_alone(faulty: Any, tmp_path: Path) -> None:
    go(faulty, effort="full")
    before = {file: file.read_bytes() for file in files(tmp_path)}
    (row,), _, launched = go(faulty, effort="quick", use_cache=False)
    assert row["config_source"] == "search" and distinct(launched) == 12
    assert {file: file.read_bytes() for file in files(tmp_path)} == before


def test_a_cached_choice_that_is_wrong_now_is_searched_again(faulty: Any, tmp_path: Path) -> None:
    """CASES 9."""
    go(faulty, effort="full")
    (file,) = files(tmp_path)
    held = json.loads(file.read_text())
    file.write_text(json.dumps(held | {"config": {"kind": faulty.WRONG, "us": 1}}))
    (row,), notes, _ = go(faulty, effort="quick")
    assert row["outcome"] == "correct" and row["config_source"] == "search" and row["config"]["kind"] == faulty.RIGHT
    assert len(notes) == 1 and notes[0].startswith(
        "warning: faulty/faulty 8x32: the tuned config in the cache is no longer right (incorrect"
    )
    (again,), notes, _ = go(faulty, effort="quick")
    assert again["config_source"] == "cache" and again["config"] == row["config"] and notes == []


def test_a_damaged_cache_is_one_warning_and_a_new_search(faulty: Any, tmp_path: Path) -> None:
    """CASES 9: a truncated cache file."""
    go(faulty)
    (file,) = files(tmp_path)
    file.write_text(file.read_text()[:100])
    (row,), notes, _ = go(faulty)
    assert row["config_source"] == "search" and len(notes) == 1 and "is damaged" in notes[0] and "searching again" in notes[0]
    assert go(faulty)[0][0]["config_source"] == "cache"


def test_a_cache_that_cannot_be_written_is_one_warning(faulty: Any, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    rows, notes, _ = go(faulty, shapes={"o": (8, 32), "qkv": (16, 32)})
    assert [row["outcome"] for row in rows] == ["correct"] * 2
    assert len(notes) == 1 and "cannot keep tuned configs" in notes[0] and "SDBENCH_CACHE" in notes[0]


def test_all_configs_bad(faulty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 10: the failures are recorded, the row says so, and nothing is kept."""
    monkeypatch.setattr(faulty, "DEFAULT", {"kind": faulty.RAISES, "us": 0})
    monkeypatch.setattr(faulty, "SPACE", [{"kind": faulty.NO_COMPILE, "us": 1}, {"kind": faulty.NO_MEMORY, "us": 2}])
    (row,), _, _ = go(faulty)
    assert row["outcome"] == "crash" and "illegal memory access" in row["message"] and row["us"] is None
    assert row["outcomes"] == {"crash": 1, "compile_error": 1, "out_of_resources": 1} and files(tmp_path) == []
    assert row["bytes"] == 8 * 32 * 4 + 32 * 4


def test_what_the_variant_does_not_take_is_a_row_and_runs_nothing(faulty: Any) -> None:
    (row,), _, launched = go(faulty, shapes={"o": (2, 32)})
    assert (row["outcome"], row["message"], row["bytes"]) == ("constraint", "takes four rows or more", None) and launched == []


def test_a_killed_search_goes_on_where_it_was(faulty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No finished trial runs again, whatever its outcome; the row counts them all."""
    whole, _, _ = go(faulty, directory=tmp_path / "whole", effort="full", use_cache=False)
    rows = read_jsonl(tmp_path / "whole" / "rows.jsonl")
    assert [row["record"] for row in rows] == ["trial"] * (43 + 3 + 1) + ["result"]
    assert [row["replays"] for row in rows[:-1]] == [3] * 43 + [20] * 4

    real, ran = faulty.times, []

    def stopped(calls: Any, *, replays: int) -> Any:
        if len(ran) == 17:
            raise KeyboardInterrupt
        ran.append(replays)
        return real(calls, replays=replays)

    monkeypatch.setattr(faulty, "times", stopped)
    with pytest.raises(KeyboardInterrupt):
        go(faulty, directory=tmp_path / "run", effort="full")
    kept = read_jsonl(tmp_path / "run" / "rows.jsonl")
    assert len(kept) == 17 + 2 and {row["outcome"] for row in kept} == {"correct", "incorrect", "crash"}
    monkeypatch.setattr(faulty, "times", real)
    resumed, _, launched = go(faulty, directory=tmp_path / "run", effort="full")
    # The finalists and the figure to publish run at length; of the short timings only what was missing.
    assert distinct([config for config in launched if config in [row["config"] for row in kept]]) <= 3
    assert {strict_json(row["config"]) for row in kept if row["outcome"] != "correct"}.isdisjoint(map(strict_json, launched))
    assert [row | {"compile_seconds": 0} for row in resumed] == [row | {"compile_seconds": 0} for row in whole]
    # And a finished one runs nothing at all.
    again, _, launched = go(faulty, directory=tmp_path / "run", effort="full")
    assert again == resumed and launched == []


def test_trials_of_another_source_are_not_taken_for_this_ones(faulty: Any, tmp_path: Path) -> None:
    go(faulty, directory=tmp_path / "run", use_cache=False)
    path = tmp_path / "run" / "rows.jsonl"
    rows = [row for row in read_jsonl(path) if row["record"] == "trial"]
    for row in rows:
        row["key"] = row["key"] and "0" * 12
    path.write_text("".join(strict_json(row) + "\n" for row in rows))
    _, _, launched = go(faulty, directory=tmp_path / "run", use_cache=False)
    assert distinct(launched) == 12


def test_rows_of_a_shape_that_was_cut_short_are_measured_again_as_a_whole(faulty: Any, tmp_path: Path) -> None:
    shapes = {"o": (8, 32), "qkv": (16, 32)}
    rows, _, _ = go(faulty, shapes=shapes, directory=tmp_path / "run", effort="none")
    path = tmp_path / "run" / "rows.jsonl"
    path.write_text("".join(strict_json(row) + "\n" for row in read_jsonl(path)[:-1]))
    again, _, launched = go(faulty, shapes=shapes, directory=tmp_path / "run", effort="none")
    assert again == rows and 0 < len(launched) <= 4


def test_rows_of_another_gpu_are_not_mixed_in(tmp_path: Path) -> None:
    gpus = {name: {"gpu": {"name": name, "capability": "9.0", "driver": driver}} for name, driver in (("H100", "1"), ("H200", "2"))}
    with RunDirectory.open(tmp_path, "kernels", {}, gpus["H100"]):
        pass
    with RunDirectory.open(tmp_path, "kernels", {}, gpus["H200"]) as run:
        require_same_gpu(run)  # there are no rows yet
        run.add_row({"record": "trial"})
    newer = {"gpu": gpus["H200"]["gpu"] | {"driver": "3"}}
    with RunDirectory.open(tmp_path, "kernels", {}, newer) as run:
        require_same_gpu(run)
    with (
        pytest.raises(SdbenchError, match=r"holds rows of H200 \(9.0\), and this is H100 \(9.0\); choose another --output"),
        RunDirectory.open(tmp_path, "kernels", {}, gpus["H100"]) as run,
    ):
        require_same_gpu(run)


def options(**others: Any) -> TuneRun:
    return replace(TuneRun([Pattern(2, 4), Pattern(1, 4)], SHAPE, torch.bfloat16, CPU, [], 0, "full"), **others)


def test_tuning_covers_every_kernel_with_a_choice_of_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"lane_row", "lane_row_nibble", "portable", "gemv"} <= {variant.name for variant in tune.tunable()}
    # What torch multiplies is searched for nothing.
    assert not {"reference", "linear", "expand"} & {variant.name for variant in tune.tunable()}
    seen: list[Any] = []
    row = {"outcome": "correct"}
    monkeypatch.setattr(tune, "measure", lambda products, *others: seen.extend(products) or [row])
    assert tune.run(options(variants=["gemv", "lane_row"]), None, Notes()) == [row]
    found = [(variant.name, layer, str(pattern)) for variant, layer, pattern, tokens in seen if tokens == 1]
    assert set(found) == {("gemv", "o", "None"), ("lane_row", "o", "1:4"), ("lane_row", "o", "2:4")}
    seen.clear()
    tune.run(options(patterns=[Pattern(2, 4)], batches=[1, 4], variants=["tile", "gemv"]), None, Notes())
    assert [(variant.name, tokens) for variant, _, _, tokens in seen] == [("gemv", 1), ("tile", 4)]
    with pytest.raises(UsageError, match="did you mean 'lane_row'"):
        options(variants=["lanerow"])
    with pytest.raises(UsageError, match=r"o: in_features 34 is not a multiple of M=4"):
        options(shapes={"o": (8, 34)})


def test_nothing_that_a_variant_takes() -> None:
    with pytest.raises(SdbenchError, match="nothing to tune: lane_row at 1:8 takes 8, 16 or 24 values") as refused:
        tune.run(options(variants=["lane_row"], patterns=[Pattern(1, 8)]), None, Notes())
    assert refused.value.exit_code == 5
    with pytest.raises(SdbenchError, match="nothing to tune: tile is for 2 to 64 tokens, not 1; choose another --batch") as refused:
        tune.run(options(variants=["tile"]), None, Notes())
    assert refused.value.exit_code == 5


def test_a_number_of_tokens_whose_config_no_product_takes() -> None:
    with pytest.raises(UsageError, match="--batch 3: a product takes the config of the next larger number among 1, 2, 4, 8, 16, 32; tune"):
        options(batches=[1, 3])


def test_export_of_what_a_run_chose(tmp_path: Path) -> None:
    us = {"p20": 1.0, "p50": 2.0, "p80": 3.0}
    row = {
        "kernel": "spmv",
        "variant": "lane_row",
        "layer": "o",
        "pattern": "2:4",
        "config": {"n": 1},
        "tokens": 1,
        "us": us,
        "outcomes": {"correct": 9},
    }
    rows = [
        row | {"config_source": "search"},
        row | {"config_source": "cache", "pattern": "1:4"},
        row | {"config_source": "search", "kernel": "spmm", "variant": "tile", "tokens": 4},
        row | {"config_source": "default", "variant": "portable"},
        row | {"config_source": "search", "kernel": "dense", "variant": "gemv", "pattern": None, "us": None},
    ]
    assert tune.export(tmp_path / "sm_0.json", rows, options()) == 3
    found = tuned.read_shipped(tmp_path / "sm_0.json")
    assert found is not None and found.capability == 0
    assert [(choice.key.task, choice.config, choice.us, choice.effort) for choice in found.choices] == [
        ((*task, "bf16", tokens), {"n": 1}, us, "full")
        for *task, tokens in (
            ("spmm", "tile", (8, 32), "2:4", 4),
            ("spmv", "lane_row", (8, 32), "1:4", 1),
            ("spmv", "lane_row", (8, 32), "2:4", 1),
        )
    ]
