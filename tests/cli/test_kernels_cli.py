"""``sdbench kernels`` as a user calls it. Without a GPU there are no timings, so figures for tables are put into a finished run."""

import io
import json
import sys
from dataclasses import replace as changed
from typing import Any

import pytest
import torch
import triton
from rich.text import Text

from sdbench.kernels import registry
from sdbench.records import RunRecord
from sdbench.results import read_jsonl, strict_json
from sdbench.suites.kernels.report import table

SMALL = ["kernels", "--shapes", "8x32", "--device", "cpu", "--variant", "reference"]
TWO = [*SMALL, "--variant", "lane_row"]
TIMED = ["kernels", "--shapes", "8x32", "--variant", "reference", "--variant", "lane_row", "--output", "run"]


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def of_kernels(rows: list[dict[str, Any]], *kernels: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kernel"] in kernels]


@pytest.fixture
def swap(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives one variant another launch."""

    def replace(name: str, launch: Any) -> None:
        registry.variants("spmv")  # all are registered from here on
        known = registry.find("spmv", name)
        monkeypatch.setitem(registry._VARIANTS, ("spmv", name), changed(known, launch=launch))

    return replace


def test_json_is_one_strict_document_and_nothing_else(sdbench):
    done = sdbench(*TWO, "--pattern", "2:4", "--json")
    assert done.code == 0
    whole = strict(done.out)
    assert whole["schema"] == "sdbench.kernels/1"
    assert whole["environment"]["triton"] == triton.__version__
    rows = of_kernels(whole["rows"], "dense", "spmv")
    assert [(row["kernel"], row["variant"], row["pattern"]) for row in rows] == [
        ("dense", "gemv", None),
        ("dense", "linear", None),
        ("spmv", "reference", "2:4"),
        ("spmv", "lane_row", "2:4"),
    ]
    for row in rows:
        assert row["config_source"] == "default" and row["outcomes"] == {"correct": 1} and row["compile_seconds"] == 0
        assert row["outcome"] == "correct" and row["dtype"] == "bf16" and row["of_shape"] == [8, 32]
        assert 0 <= row["error"] < 5e-3
        assert isinstance(row["config"], dict) and row["bytes"] > 0
        assert row["us"] is row["gbps"] is row["roofline"] is None and row["us_reason"].startswith("no GPU")
        assert set(row["speedup"].values()) == {None} and row["best"] is False
    assert done.err.startswith("no CUDA device: every variant is checked in Triton's interpreter")


def test_a_small_shape_is_checked_as_it_is(sdbench):
    """Fewer rows or columns than what a large one is reduced to, or than a mask word has."""
    done = sdbench("kernels", "--shapes", "1x4,9x40", "--device", "cpu", "--variant", "lane_row", "--json")
    rows = [row for row in strict(done.out)["rows"] if row["outcome"] != "constraint"]
    assert done.code == 0 and {tuple(row["shape"]) for row in rows} == {(1, 4), (9, 40)}
    assert all(row["outcome"] == "correct" and row["shape"] == row["of_shape"] for row in rows)
    assert {row["us_reason"] for row in rows} == {"no GPU: checked in the interpreter"}


def test_output_holds_every_trial_and_resumes(sdbench, tmp_path, swap):
    call = (*TWO, "--shapes", "8x32,8x64", "--output", "run")
    first = sdbench(*call, "--json")
    rows = read_jsonl(tmp_path / "run/rows.jsonl")
    ran = [row for row in strict(first.out)["rows"] if row["outcome"] != "constraint"]
    assert sum(row["record"] == "trial" for row in rows) == len(ran)
    assert [row["variant"] for row in rows if row["record"] == "result"] == [row["variant"] for row in strict(first.out)["rows"]]
    record = RunRecord.model_validate_json((tmp_path / "run/run.json").read_bytes())
    assert (record.command, record.outcome, record.arguments["shapes"]) == ("kernels", "complete", "8x32,8x64")

    # As if the run had been stopped while it wrote the second shape: only that one is run again, as a whole.
    (tmp_path / "run/rows.jsonl").write_text("".join(strict_json(row) + "\n" for row in rows[:-1]))
    launch = registry.find("spmv", "reference").launch

    def second_only(packed: Any, *others: Any) -> torch.Tensor:
        assert packed.in_features != 32, "8x32 is done"
        return launch(packed, *others)

    swap("reference", second_only)
    second = sdbench(*call, "--json")
    assert strict(second.out)["rows"] == strict(first.out)["rows"]
    record = RunRecord.model_validate_json((tmp_path / "run/run.json").read_bytes())
    assert [(attempt.outcome, attempt.resumed_rows) for attempt in record.audit] == [("complete", 0), ("complete", len(rows) - 1)]
    sdbench(*call, "--pattern", "4:8").refuses(2, "run holds a run with other arguments: pattern")
    sdbench(*call, "--effort", "full").refuses(2, "run holds a run with other arguments: effort")


def test_speedups_and_the_best_of_each_kind(sdbench, timed_run):
    rows = {row["variant"]: row for row in of_kernels(strict(sdbench(*TIMED, "--json").out)["rows"], "dense", "spmv")}
    assert {name: row["best"] for name, row in rows.items()} == {"gemv": True, "linear": False, "reference": False, "lane_row": True}
    assert rows["lane_row"]["speedup"].items() >= {"linear": 2.0, "dense": 1.5}.items()  # over F.linear, and over the fastest dense
    assert rows["linear"]["speedup"].items() >= {"linear": 1.0, "dense": 0.75}.items()


def test_options_that_a_shell_or_a_comparison_lets_through(sdbench, tmp_path):
    sdbench(*TWO, "--output", "").refuses(2, "is empty, or the current folder")
    for option in ("--timeout", "--min-speedup"):
        sdbench(*TWO, option, "nan").refuses(2, option, "is no number")
    sdbench("e2e", "--min-speedup", "nan").refuses(2, "--min-speedup", "is no number")
    assert not list(tmp_path.iterdir())


def test_columns_are_explained_under_the_table(sdbench, timed_run):
    lines = sdbench(*TIMED).out.splitlines()
    assert [line.partition(":")[0] for line in lines[-4:-1]] == ["*", "% read roofline", "error"]
    assert lines[-1] == "linear rounds y to bf16, which is most of its error; y of others is float32"
    untimed = sdbench(*TWO).out.splitlines()
    assert [line.partition(":")[0] for line in (untimed[-3], untimed[-1])] == ["error", "no CUDA device"]
    assert untimed[-2] == lines[-1]
    assert not any(line.startswith(("*", "% read roofline")) for line in untimed)


def test_slower_than_asked_for(sdbench, timed_run):
    assert sdbench(*TIMED, "--min-speedup", 1.5).code == 0
    slower = sdbench(*TIMED, "--min-speedup", 1.6)
    assert slower.code == 4 and slower.err.splitlines()[-1] == "sdbench: error: slower than --min-speedup 1.6: 1.50 over the fastest dense"
    assert "2:4: sum of 1 shape 2.0 us, 2.00x over F.linear, 1.50x over the fastest dense" in slower.out
    timed_run(us=None, gbps=None)
    untimed = sdbench(*TIMED, "--min-speedup", 1.5)
    assert untimed.code == 4 and untimed.err.splitlines()[-1] == "sdbench: error: slower than --min-speedup 1.5: no timings"


@pytest.mark.parametrize("option", [("--min-speedup", 1.5), ("--plot", "plot.png"), ("--chain", 2)])
def test_what_needs_timings_is_refused_before_a_run_without_any(option, sdbench, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    call = ("kernels", "--shapes", "64x64", "--output", "run", *option)
    sdbench(*call).refuses(1, f"no CUDA device: {option[0]} needs timings, and those take a GPU; leave it out")
    sdbench(*call, "--device", "cpu").refuses(2, f"--device cpu: {option[0]} needs timings")
    assert not list(tmp_path.iterdir())


def test_a_damaged_row_is_one_line_and_leaves_the_run_as_it_was(sdbench, tmp_path):
    call = (*SMALL, "--output", "run")
    whole = sdbench(*call, "--json").out
    rows, record = read_jsonl(tmp_path / "run/rows.jsonl"), (tmp_path / "run/run.json").read_bytes()
    number = next(number for number, row in enumerate(rows, start=1) if row["record"] == "result")
    good = rows[number - 1]
    for bad, fault in (({"pattern": 24}, "pattern: Input should be a valid string"), ({"config": "big"}, "config: Input should be")):
        rows[number - 1] = good | bad
        (tmp_path / "run/rows.jsonl").write_text("".join(strict_json(row) + "\n" for row in rows))
        sdbench(*call).refuses(1, f"run/rows.jsonl, line {number}: a row of kind 'result' with a fault ({fault}", "take the line out")
        assert (tmp_path / "run/run.json").read_bytes() == record
    # What the message says to do is enough.
    del rows[number - 1]
    (tmp_path / "run/rows.jsonl").write_text("".join(strict_json(row) + "\n" for row in rows))
    assert strict(sdbench(*call, "--json").out)["rows"] == strict(whole)["rows"]


@pytest.mark.parametrize("width", [80, None])
def test_no_figure_is_cut(width, sdbench, timed_run, monkeypatch):
    """CASES 23: on a terminal of 80 columns, and piped."""
    rows = strict(sdbench(*TIMED, "--json").out)["rows"]
    out = io.StringIO()
    if width:
        monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stdout", out)
    assert sdbench(*TIMED).code == 0
    lines = Text.from_ansi(out.getvalue()).plain.splitlines()
    numbers = [number for number, line in enumerate(lines) if line.startswith(" 8x32 ")]
    printed_lines = lines[: numbers[-1] + 1]
    columns, formatted = table(rows)
    cells = [[part for cell in row[2:] for part in cell.split()] for row in formatted]
    printed: list[list[str]] = [[] for _ in cells]
    for index, number in enumerate(numbers):
        row, parts = index % len(cells), lines[number].split()[2:]
        # Every piece says which pattern and variant its figures belong to.
        keys = [part for cell in formatted[row][2:4] for part in cell.split()]
        assert parts[: len(keys)] == keys
        printed[row] += parts if index < len(cells) else parts[len(keys) :]
    assert printed == cells
    assert width is not None or len(numbers) == len(cells)
    assert width is None or max(map(len, printed_lines)) <= width
    assert all(word in " ".join(printed_lines) for column in columns for word in column.name.split())


def test_a_wrong_kernel_fails_the_run_and_is_in_the_table(sdbench, swap):
    """CASES 5: what is wrong is one NaN."""

    def launch(weight: Any, x: torch.Tensor, y: torch.Tensor, config: Any) -> torch.Tensor:
        return torch.full_like(y, float("nan"))

    swap("lane_row", launch)
    done = sdbench(*TWO)
    assert done.code == 3
    assert "incorrect" in done.out
    assert done.err.splitlines()[-1] == "sdbench: error: lane_row on 8x32 at 2:4: incorrect (relative error nan)"


def test_a_variant_that_does_not_compile_fails_the_run(sdbench, swap):
    """CASES 10: every config is bad; the error names the shape."""

    def launch(weight: Any, x: torch.Tensor, y: torch.Tensor, config: Any) -> torch.Tensor:
        raise triton.CompilationError(None, None, "no such instruction")

    swap("lane_row", launch)
    done = sdbench(*TWO, "--json")
    assert done.code == 1
    assert [row["outcome"] for row in of_kernels(strict(done.out)["rows"], "dense", "spmv")] == ["correct"] * 3 + ["compile_error"]
    last = done.err.splitlines()[-1]
    assert last.startswith("sdbench: error: lane_row on 8x32 at 2:4: compile_error") and "no such instruction" in last


def test_why_a_variant_was_left_out_stands_under_the_table(sdbench):
    done = sdbench(*TWO, "--pattern", "1:8")
    assert done.code == 0
    assert "lane_row at 1:8 takes 8, 16 or 24 values a mask word; pattern 1:8 has 4" in done.out.splitlines()


def test_nothing_that_could_run(sdbench):
    """The dense baselines alone say nothing about sparsity."""
    done = sdbench("kernels", "--shapes", "8x32", "--device", "cpu", "--variant", "lane_row", "--pattern", "1:8")
    done.refuses(5, "nothing to run: lane_row at 1:8 takes 8, 16 or 24 values a mask word")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pattern 5:4", "pattern 5:4: N:M keeps N of M"),
        ("--pattern 2:3", "the group size must be one of 4, 8, 16, 32"),
        ("--pattern 2:4 --pattern 24", "write it as N:M"),
        ("--shapes 8x40 --pattern 16:32", "layer 8x40: in_features 40 is not a multiple of M=32"),
        ("--shapes 8x2", "layer 8x2: in_features 2 is not a multiple of M=4 (pattern 2:4); "),
        ("--shapes 8x32,8", "--shapes: '8' in '8x32,8' is no shape; write OUTxIN"),
        ("--shapes 32X64", "--shapes: '32X64' is no shape; write 32x64"),
        ("--shapes=", "--shapes is empty: write OUTxIN, for example 4096x2560, or the name of a model: qwen3-0.6b, "),
        ("--shapes qwen3-4bb", "did you mean 'qwen3-4b'?"),
        ("--variant lanerow", "did you mean 'lane_row'?"),
        ("--dtype int8", "'int8' is not one of 'bf16', 'fp16', 'fp32'"),
        ("--shape 8x32", "--shapes"),
        ("--device gpu", "device 'gpu'"),
        ("--effort most", "'most' is not one of 'none', 'quick', 'full'"),
        ("--timeout 0", "'--timeout'"),
    ],
)
def test_usage(arguments, message, sdbench, tmp_path):
    sdbench("kernels", *arguments.split(), "--output", "run").refuses(2, message)
    assert not (tmp_path / "run").exists()  # a typo must not use the folder up


def test_an_output_that_cannot_be_written(sdbench, tmp_path):
    (tmp_path / "file").touch()
    sdbench(*SMALL, "--output", "file/run").refuses(1, "cannot write the run directory file/run")


@pytest.mark.parametrize(
    ("output", "kept"), [(["--output", "run"], "in run, and the same command"), ([], "without --output nothing is kept")]
)
def test_ctrl_c(output, kept, sdbench, swap):
    def launch(*others: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    swap("reference", launch)
    sdbench(*SMALL, *output).refuses(130, "interrupted", kept)


def test_batches(sdbench, tmp_path):
    """Each number of tokens has the variants that are for it, every one checked; cached names and audit tell them apart."""
    arguments = ("kernels", "--device", "cpu", "--shapes", "64x256", "--variant", "lane_row", "--variant", "tile", "--variant", "expand")
    done = sdbench(*arguments, "--output", "run", "--batch", 1, "--batch", 4, "--batch", 16, "--json")
    assert done.code == 0, done.err
    found = {(row["tokens"], row["kernel"], row["variant"]): row["outcome"] for row in json.loads(done.out)["rows"]}
    one = {(1, "dense", "gemv"), (1, "dense", "linear"), (1, "quantized", "fp8"), (1, "quantized", "int8")}
    one |= {(1, "spmv", "lane_row"), (1, "spmv_partial", "lane_row")}
    four = {(4, "dense", "gemm"), (4, "dense", "linear"), (4, "spmm", "expand"), (4, "spmm", "tile")}
    sixteen = {(16, "dense", "gemm"), (16, "dense", "linear"), (16, "spmm", "expand"), (16, "spmm", "tile")}
    assert {key for key, outcome in found.items() if outcome == "correct"} == one | four | sixteen
    assert {key for key in found if key[1] == "semi_structured"} == {(1, "semi_structured", "cusparselt")}
    assert " tokens " in sdbench("report", "run").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", 0), "--batch is 0; it must be at least 1"),
        (("--batch", 4, "--chain", 2), "--chain is about one token; add --batch 1"),
        (("--batch", 4, "--min-speedup", 1), "--min-speedup is about one token"),
    ],
)
def test_batches_that_cannot_be(sdbench, arguments, message):
    sdbench("kernels", "--device", "cpu", "--shapes", "64x256", *arguments).refuses(2, message)
