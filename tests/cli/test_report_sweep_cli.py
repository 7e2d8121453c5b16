"""``sdbench report`` of a sweep's folder: all runs in one table, as the sweep's end printed it, then each complete run."""

import json

import pytest

from sdbench.csv_files import read_csv

from .test_report_cli import E2E, arm

TITLE = "grid.yaml: 4 runs, 2 complete, 1 failed, 1 waiting"


@pytest.fixture
def folder(saved_run, tmp_path):
    """Two complete runs, one that failed after its first arm, and one that never began."""
    (tmp_path / "out").mkdir()
    for seed, outcome in enumerate(("complete", "complete", "failed")):
        arms = [arm("dense", 100.0), arm("teacher-forced", 125.0)]
        saved_run(f"out/seed{seed}", "e2e", E2E | {"seed": seed}, arms[: 2 if outcome == "complete" else 1], outcome=outcome)
    outcomes = ("complete", "complete", "failed", "waiting")
    runs = [
        {"run": f"seed{seed}", "arguments": {"seed": str(seed), "model": "tiny"}, "outcome": outcome}
        for seed, outcome in enumerate(outcomes)
    ]
    runs[2] |= {"reason": "no luck", "attempts": [{"started": "2026-12-01T00:00:00+00:00", "outcome": "failed", "reason": "no luck"}]}
    record = {"schema": "sdbench.sweep/1", "grid": "grid.yaml", "executor": "local", "varying": ["seed", "model"], "runs": runs}
    (tmp_path / "out/sweep.json").write_text(json.dumps(record))
    return tmp_path / "out"


def own(out):
    """The sweep's part of what was printed."""
    return out[: out.index("\nout/seed0: sdbench e2e of")]


def test_text(folder, sdbench):
    done = sdbench("report", "out")
    assert done.err == "out: left out as not complete: seed2 (failed), seed3 (waiting)\n"
    title, *lines = own(done.out).splitlines()
    assert title == TITLE
    assert [line.split()[:5] for line in lines[3:9]] == [
        ["0", "tiny", "complete", "dense", "3/4"],
        ["0", "tiny", "complete", "teacher-forced", "3/4"],
        ["1", "tiny", "complete", "dense", "3/4"],
        ["1", "tiny", "complete", "teacher-forced", "3/4"],
        ["2", "tiny", "failed", "dense", "3/4"],
        ["3", "tiny", "waiting", "-", "-"],
    ]
    assert lines[9:] == ["seed2: failed after 1 attempt: no luck"]
    assert done.out == own(done.out) + "\n" + sdbench("report", "out/seed0", "out/seed1").out
    sdbench("report", "out", "--output", "all.txt")
    assert (folder.parent / "all.txt").read_text() == done.out


def test_markdown(folder, sdbench):
    out = sdbench("report", "out", "--format", "markdown").out
    assert out.startswith(f"### {TITLE}\n\n| seed | model | outcome | arm | match |")
    assert out.endswith(
        "\n\n- seed2: failed after 1 attempt: no luck\n\n" + sdbench("report", "out/seed0", "out/seed1", "--format", "markdown").out
    )


def test_csv_and_json_are_of_all_runs(folder, sdbench):
    done = sdbench("report", "out", "--format", "csv")
    assert done.err == ""
    sdbench("report", "out", "--format", "csv", "--output", "all.csv")
    records = read_csv(folder.parent / "all.csv").to_dict("records")
    assert [(one["run"], one["outcome"], one["axes.seed"], one["arm"], one["decode_rate"]) for one in records] == [
        ("seed0", "complete", "0", "dense", "100.0"),
        ("seed0", "complete", "0", "teacher-forced", "125.0"),
        ("seed1", "complete", "1", "dense", "100.0"),
        ("seed1", "complete", "1", "teacher-forced", "125.0"),
        ("seed2", "failed", "2", "dense", "100.0"),
        ("seed3", "waiting", "3", "", ""),
    ]
    done = sdbench("report", "out", "--json")
    document = json.loads(done.out)
    assert done.err == "" and document["schema"] == "sdbench.sweep/1"
    assert [len(run["arms"]) for run in document["runs"]] == [2, 2, 1, 0]
    assert sdbench("report", "out", "--format", "json").out == done.out
    sdbench("report", "out", "out/seed0", "--json").refuses(2, "--format json holds one run, and 3 are given")


@pytest.mark.parametrize("columns", [60, 80])
def test_a_pipe_gets_it_whole_or_divided_as_asked(columns, folder, sdbench, monkeypatch):
    whole = own(sdbench("report", "out").out)
    monkeypatch.setenv("COLUMNS", str(columns))
    divided = own(sdbench("report", "out").out)
    assert max(map(len, divided.splitlines())) <= columns < max(map(len, whole.splitlines()))
    words = [" ".join(text.split()).split() for text in (whole, divided)]
    assert {word for word in words[0] if not word.startswith("─")} == {word for word in words[1] if not word.startswith("─")}


def test_its_record_is_not_replaced(folder, sdbench):
    before = (folder / "sweep.json").read_bytes()
    sdbench("report", "out", "--output", "out/sweep.json", "--force").refuses(2, "out/sweep.json is a file of the run itself")
    assert (folder / "sweep.json").read_bytes() == before


def test_it_needs_no_torch(folder, heavy_imports):
    done = heavy_imports(folder.parent, "report", "out")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]")
