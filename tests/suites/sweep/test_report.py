"""The table of all runs of a sweep, and the lines under it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sdbench.suites.sweep.driver import Plan
from sdbench.suites.sweep.executors import LocalExecutor
from sdbench.suites.sweep.grid import Grid, Option, expand
from sdbench.suites.sweep.record import Call
from sdbench.suites.sweep.report import report

from .conftest import KNOWN


def test_the_report_has_a_line_a_run_and_arm(plan, run):
    asked = replace(plan("ok", "fail", retries=0), checking_seconds=41.4)
    record, _ = run(asked, LocalExecutor(2))
    made = report(record, asked.folder)
    # What no arm has a figure of is left out: no speed-up, ceiling or peak.
    assert [column.name for column in made.columns] == ["task", "outcome", "arm", "match", "EOS", "cut off", "tok/s", "kernel calls"]
    assert made.cells == [["ok", "complete", "dense", "1/2", "2/2", "0", "10.0", "0"], ["fail", "failed", *["-"] * 6]]
    assert made.lines[0] == "fail_seed0: failed after 1 attempt: no luck"
    took = (
        r"call 1, of \d{4}-\d\d-\d\d \d\d:\d\d UTC: 2 attempts at runs, at most 2 at once, in (\d+) s, of which checking the grid took 41"
    )
    assert re.fullmatch(took, made.lines[1])
    assert 41 + max(entry.seconds for entry in record.runs) < record.calls[0].seconds < 41 + 60
    assert [len(entry["arms"]) for entry in made.document["runs"]] == [1, 0]


def test_the_reports_outcomes_are_left_out_where_all_are_complete(plan, run):
    asked = plan("ok", seeds=(0, 1))
    record, _ = run(asked)
    made = report(record, asked.folder)
    assert [column.name for column in made.columns][:2] == ["seed", "arm"] and made.title == "grid.yaml: 2 runs, 2 complete"
    assert [one["outcome"] for one in made.records] == ["complete", "complete"]


def test_the_report_shows_the_values_of_options_that_a_run_leaves_to_their_defaults(tmp_path, run):
    known = KNOWN | {"calib": Option("--calib", multiple=True), "fidelity-only": Option("--fidelity-only", switch=True)}
    grid = Grid.model_validate(
        {
            "axes": {"task": ["ok"]},
            "include": [{"task": "ok", "seed": "7"}, {"task": "ok", "calib": ["self", "decode"]}, {"task": "ok", "fidelity-only": "true"}],
        }
    )
    runs = expand(Path("grid.yaml"), grid, known)
    used = [
        {"task": "ok", "seed": 0, "calib": ["decode"], "fidelity": "no"},
        {"task": "ok", "seed": 7, "calib": ["decode"], "fidelity": "no"},
        {"task": "ok", "seed": 0, "calib": ["self", "decode"], "fidelity": "no"},
        {"task": "ok", "seed": 0, "calib": ["decode"], "fidelity": "only"},
    ]
    record, _ = run(Plan(Path("grid.yaml"), runs, used, tmp_path / "sweep", 0))
    made = report(record, tmp_path / "sweep")
    assert [column.name for column in made.columns][:3] == ["seed", "calib", "fidelity-only"]
    cells = {tuple(row[:3]) for row in made.cells}
    assert cells == {("0", "decode", "false"), ("7", "decode", "false"), ("0", "self+decode", "false"), ("0", "decode", "true")}
    assert record.runs[0].arguments == {"task": "ok"}


@pytest.mark.parametrize(
    ("outcome", "reason", "told"),
    [
        (None, None, ": 5 attempts at runs, at most 2 at once, in 83 s, of which checking the grid took 4"),  # of an older version
        ("complete", None, ": 5 attempts at runs, at most 2 at once, in 83 s, of which checking the grid took 4"),
        (
            "interrupted",
            "killed",
            ", cut off (killed): 5 attempts at runs, at most 2 at once, in 83 s or more, of which checking the grid took 4",
        ),
        ("interrupted", "Ctrl-C", ", cut off (Ctrl-C): 5 attempts at runs, at most 2 at once, in 83 s, of which checking the grid took 4"),
        (
            "running",
            None,
            ", going on or killed: 5 attempts at runs, at most 2 at once, in 83 s or more, of which checking the grid took 4",
        ),
    ],
)
def test_a_call_says_of_what_its_numbers_are_and_how_it_ended(outcome, reason, told, plan, run):
    record, _ = run(plan("ok"))
    started = "2026-11-29T10:12:59+00:00"
    call = Call(started=started, jobs=2, checking_seconds=4.2, seconds=83.4, attempts=5, outcome=outcome, reason=reason)
    record.calls[:] = [Call(started=started, jobs=2, checking_seconds=4.0, seconds=4.1, outcome="complete"), call]
    lines = report(record, Path("sweep")).lines
    # A call that found nothing to do has a number, and no line.
    assert [line for line in lines if line.startswith("call")] == [f"call 2, of 2026-11-29 10:12 UTC{told}"]


def test_a_run_of_a_sweep_that_is_going_on_or_was_killed(plan, run):
    record, _ = run(plan("ok"))
    record.runs[0].outcome = record.runs[0].attempts[-1].outcome = "running"
    assert report(record, Path("sweep")).lines[0] == "ok_seed0: going on or killed in attempt 1"
