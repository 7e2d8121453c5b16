"""``sdbench report`` and ``sdbench compare`` on every committed run."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from sdbench.results import read_jsonl
from sdbench.suites.reports import render
from sdbench.suites.runs import read_run

RESULTS = Path(__file__).parents[2] / "results"
COMMITTED = sorted(file.parent for file in RESULTS.glob("*/*/*/run.json") if file.parts[-4] != "local")
KERNELS = RESULTS / "nvidia-h200/kernels/five-patterns"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_every_one_renders_in_every_format(path, sdbench):
    for form in ("text", "markdown", "csv", "json"):
        done = sdbench("report", path, "--format", form)
        assert (done.code, done.err) == (0, "") and done.out


def test_sums_of_the_kernels(sdbench):
    """Recomputed here from the rows, whatever the newest figures are."""
    rows = [one for one in read_jsonl(KERNELS / "rows.jsonl") if one["record"] == "result" and one["us"]]

    def total(kernel: str, **wanted: Any) -> float:
        of_kind = [one for one in rows if one["kernel"] == kernel and wanted.items() <= one.items()]
        return sum(min(one["us"]["p50"] for one in of_kind if one["layer"] == layer) for layer in ("qkv", "o", "gate_up", "down"))

    out = sdbench("report", KERNELS).out
    linear, dense = total("dense", variant="linear"), total("dense")
    for pattern in {one["pattern"] for one in rows if one["kernel"] == "spmv"}:
        sparse = total("spmv", pattern=pattern)
        against = f"{linear / sparse:.2f}x over F.linear, {dense / sparse:.2f}x over the fastest dense"
        assert f"{pattern}: sum of 4 shapes {sparse:.1f} us, {against}" in out
    for one in rows:
        assert f" {one['us']['p50']:.2f} " in out and f" {one['us']['p20']:.2f}-{one['us']['p80']:.2f} " in out


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_no_figure_is_cut_on_80_columns(path, sdbench, monkeypatch):
    """CASES 23."""
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    wide = sdbench("report", path).out.splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", out)
    assert sdbench("report", path).code == 0
    lines = Text.from_ansi(out.getvalue()).plain.splitlines()
    table = [line for line in lines if line.startswith(" ")]
    assert max(map(len, table)) <= 80
    words = {word for line in table for word in line.split()}
    assert {word for line in wide if line.startswith(" ") for word in line.split()} <= words


@pytest.mark.parametrize("path", [path for path in COMMITTED if path.parent.name == "decode"], ids=lambda path: path.name)
def test_no_table_of_a_decode_run_is_divided_on_80_columns(path, sdbench, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", out)
    assert sdbench("report", path).code == 0
    report = render(read_run(path))
    rules = [line for line in Text.from_ansi(out.getvalue()).plain.splitlines() if line.startswith("───")]
    assert len(rules) == 1 + len(report.more)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
@pytest.mark.parametrize("columns", [None, "40"])
def test_no_figure_is_cut_in_a_log(path, columns, tmp_path):
    """CASES 23: no terminal, as in CI: each row stands on one line, whole; where COLUMNS asks for less, its words do on several."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | ({"COLUMNS": columns} if columns else {})
    command = [sys.executable, "-m", "sdbench", "report", str(path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", env=environment, check=True)
    report = render(read_run(path))
    rows = [" ".join(row) for table in (report, *report.more) for row in table.cells]
    if columns:
        assert rows and {word for row in rows for word in row.split()} <= set(done.stdout.split())
    else:
        assert rows and {" ".join(row.split()) for row in rows} <= {" ".join(line.split()) for line in done.stdout.splitlines()}


@pytest.mark.parametrize("path", [path for path in COMMITTED if path.parent.name != "prune"], ids=lambda path: path.name)
def test_a_committed_run_is_no_worse_than_itself(path, sdbench):
    done = sdbench("compare", path, path, "--json")
    assert (done.code, done.err) == (0, "")
    whole = json.loads(done.out)
    # Answers are compared by their samples, which a run that is only about fidelity may have been committed without.
    rows = [one for one in whole["rows"] if (path / "samples.jsonl").exists() or one["figure"] not in ("answer match", "EOS")]
    assert rows and {one["verdict"] for one in rows} == {"same"}
    timed = [one["ratio"] for one in rows if one["figure"] in ("us", "tok/s")]
    assert set(timed) == {1.0} or (not timed and "KL" in {one["figure"] for one in rows})
