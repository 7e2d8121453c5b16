"""``sdbench runs`` as a user calls it."""

import json
from pathlib import Path

import pytest

from .test_report_cli import ASKED, E2E, ROWS, arm, strict, table_line

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def shelf(saved_run, tmp_path) -> Path:
    """Runs of every condition."""
    saved_run("good", "kernels", ASKED, ROWS)
    audit = [{"attempt": number, "started": "2026-12-01T00:00:00+00:00", "outcome": "interrupted"} for number in (1, 2, 3)]
    saved_run(
        "stopped",
        "e2e",
        E2E | {"model": "[b]m[/b] :x: <&>"},
        [arm("dense", 1.0)],
        [],
        outcome="failed",
        outcome_reason="no luck",
        audit=audit,
    )
    saved_run("live", "decode", {"model": "demo", "pattern": ["2:4", "1:4"]}, outcome="running")
    (saved_run("torn", "e2e", E2E, [arm("dense", 1.0)]) / "rows.jsonl").open("a").write('{"record": "a')
    (saved_run("spoilt", "e2e", E2E) / "rows.jsonl").write_text("no json\n{}\n")
    (saved_run("cut", "e2e", E2E) / "run.json").write_text('{"schema": "sdbench.run/1", "comm')
    (saved_run("alone", "e2e", E2E, [arm("dense", 1.0)]) / "run.json").unlink()
    (saved_run("lost", "e2e", E2E) / "rows.jsonl").unlink()
    saved_run("emptied", "e2e", E2E)
    saved_run("halved", "e2e", E2E, [arm("dense", 1.0)], recorded=2)
    (saved_run(".hidden", "e2e", E2E))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/run.json").write_text('{"name": "of another tool"}')
    return tmp_path


def test_the_table(shelf, sdbench, caplog):
    done = sdbench("runs")
    assert done.code == 0 and "torn/rows.jsonl: dropped a torn last line" in caplog.text
    title, *_ = done.out.splitlines()
    assert title == "11 runs in ., times in UTC"
    assert table_line(done.out, "good", "complete") == ["good", "kernels", "complete", "6", "1", "2026-12-01", "00:00", "o,down"]
    assert table_line(done.out, "stopped", "failed") == [
        *("stopped", "e2e", "failed", "1", "3", "2026-12-01", "00:00"),
        *("[b]m[/b]", ":x:", "<&>"),
    ]
    assert table_line(done.out, "torn", "complete")[:5] == ["torn", "e2e", "complete", "1", "1"]
    lines = done.out.splitlines()
    assert "stopped: no luck" in lines and "live: going on, or killed" in lines
    for name, reason in (
        ("spoilt", "spoilt/rows.jsonl, line 1: not a JSON object"),
        ("cut", "cut/run.json is no sdbench.run/1 record (Invalid JSON"),
        ("alone", "alone is no run directory: its run.json cannot be read (No such file or directory)"),
        ("lost", "lost/run.json says complete, but lost/rows.jsonl is missing"),
        ("emptied", "emptied/run.json says complete, but emptied/rows.jsonl holds no row; restore it or run again"),
        ("halved", "halved/run.json says complete with 2 rows, but halved/rows.jsonl holds 1; restore it or run again"),
        ("other", "other/run.json is no sdbench.run/1 record (schema: Field required)"),
    ):
        assert table_line(done.out, name, "damaged")[:4] == [name, "-", "damaged", "-"]
        assert any(line.startswith(f"{name}: {reason}") for line in lines), name


def test_json(shelf, sdbench):
    document = strict(sdbench("runs", shelf, "--json").out)
    assert document["schema"] == "sdbench.runs/1"
    runs = {Path(run["run"]).name: run for run in document["runs"]}
    assert list(runs) == sorted(runs) and len(runs) == 11
    assert runs["live"] == {
        "run": str(shelf / "live"), "suite": "decode", "model": "demo", "pattern": ["2:4", "1:4"], "outcome": "running",
        "when": "2026-12-01T00:00:00+00:00", "rows": 0, "samples": 0, "attempts": 1, "reason": "going on, or killed",
    }  # fmt: skip
    assert runs["good"]["reason"] is None and runs["cut"]["suite"] is None and runs["cut"]["rows"] is None


def test_committed_runs(sdbench):
    runs = {run["run"]: run for run in json.loads(sdbench("runs", RESULTS, "--json").out)["runs"]}
    for file in RESULTS.glob("*/*/*/run.json"):
        assert runs[str(file.parent)]["rows"] == (file.parent / "rows.jsonl").read_bytes().count(b"\n")
        assert runs[str(file.parent)]["suite"] == file.parts[-3]


def test_no_column_is_cut_on_80_columns(shelf, sdbench, monkeypatch):
    """CASES 23."""
    import io
    import sys

    wide = sdbench("runs").out
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", out)
    assert sdbench("runs").code == 0
    from rich.text import Text

    table = [line for line in Text.from_ansi(out.getvalue()).plain.splitlines() if line.startswith(" ")]
    assert max(map(len, table)) <= 80
    shown = {word for line in table for word in line.split()}
    assert {word for line in wide.splitlines() if line.startswith(" ") for word in line.split()} <= shown


def test_a_folder_that_cannot_be_read_is_listed(shelf, sdbench, monkeypatch):
    import os

    walk = os.walk

    def refused(folder, onerror):
        onerror(PermissionError(13, "Permission denied", str(shelf / "secret")))
        yield from walk(folder)

    monkeypatch.setattr(os, "walk", refused)
    assert "secret: cannot be read (Permission denied)" in sdbench("runs", shelf).out.splitlines()


def test_bad_input(sdbench, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    sdbench("runs", "empty").refuses(5, "no run directory in empty: no folder there holds run.json or rows.jsonl")
    sdbench("runs", "empty", "--json").refuses(5, "no run directory in empty")
    for name in ("nowhere", "file"):
        sdbench("runs", name).refuses(2, f"{name} is no folder; name one that holds run directories")


def test_it_needs_no_torch(shelf, heavy_imports):
    done = heavy_imports(shelf, "runs")
    assert done.returncode == 0 and done.stderr.endswith("[]\n")
