"""What ``sdbench report`` refuses, and what it says to do."""

from pathlib import Path

import pytest

from .test_pool_cli import ARGUMENTS
from .test_report_cli import ASKED, E2E, ROWS, SAMPLE, arm

RIGHT = {"q1": True, "q2": False}
ARMS = [arm(name, 100.0, examples=2, answer_match=1, matches=RIGHT) for name in ("dense", "teacher-forced", "decode")]
SAMPLES = [
    SAMPLE | {"arm": row["arm"], "example": name, "prompt_hash": name, "match": right} for row in ARMS for name, right in RIGHT.items()
]
TWO = {"report": ("run",), "pool": ("run",), "compare": ("run", "run")}
E2E_POOLED = E2E | ARGUMENTS | {"seed": 0}


@pytest.mark.parametrize("command", ["report", "pool"])
def test_a_complete_run_that_lost_some_of_its_rows(command, sdbench, saved_run):
    folder = saved_run("run", "kernels", ASKED, ROWS, recorded=len(ROWS))
    whole = (folder / "rows.jsonl").read_text()
    message = "run/run.json says complete with 6 rows, but run/rows.jsonl holds {}; restore it or run again"
    for kept in (3, 5):
        (folder / "rows.jsonl").write_text("".join(whole.splitlines(keepends=True)[:kept]))
        sdbench(command, "run").refuses(1, message.format(kept))
    (folder / "rows.jsonl").write_text(whole[:-20])  # the last row torn
    sdbench("report", "run").refuses(1, message.format(5))
    (folder / "rows.jsonl").write_text(whole)
    assert sdbench("report", "run").code == 0


@pytest.fixture
def replies(saved_run) -> Path:
    """A whole run with its replies, which its run.json does not count: a run of before they were."""
    path: Path = saved_run("run", "e2e", E2E_POOLED, ARMS, SAMPLES)
    return path


@pytest.mark.parametrize("command", TWO)
def test_a_run_that_lost_some_of_its_samples(command, sdbench, saved_run, caplog):
    folder = saved_run("run", "e2e", E2E_POOLED, ARMS, SAMPLES, replies=len(SAMPLES))
    assert sdbench(command, *TWO[command]).code == 0
    whole = (folder / "samples.jsonl").read_text()
    message = "run/run.json says complete with 6 samples, but run/samples.jsonl "
    for kept in (5, 1, 0):
        (folder / "samples.jsonl").write_text("".join(whole.splitlines(keepends=True)[:kept]))
        sdbench(command, *TWO[command]).refuses(1, f"{message}holds {kept}; restore it or run again")
    (folder / "samples.jsonl").write_text(whole[:-20])  # the last one torn
    sdbench(command, *TWO[command]).refuses(1, f"{message}holds 5; restore it or run again")
    assert "run/samples.jsonl: dropped a torn last line" in caplog.text
    (folder / "samples.jsonl").unlink()
    sdbench(command, *TWO[command]).refuses(
        1, f'{message}is missing; restore it, run again, or write "samples": null there to leave it out'
    )
    record = (folder / "run.json").read_text()
    (folder / "run.json").write_text(record.replace('"samples": 6', '"samples": null'))
    assert sdbench(command, *TWO[command]).code == 0


@pytest.mark.parametrize("command", TWO)
def test_a_run_of_before_samples_were_counted_that_lost_some(command, sdbench, replies):
    assert sdbench(command, *TWO[command]).code == 0
    lines = (replies / "samples.jsonl").read_text().splitlines(keepends=True)
    message = "run/rows.jsonl tells of 2 samples of arm {}, but run/samples.jsonl holds {}; restore it or run again"
    for kept, lost in ((lines[:5], ("decode", 1)), (lines[1:], ("dense", 1)), ([], ("dense", 0)), (lines[:4] + lines[3:5], ("decode", 1))):
        (replies / "samples.jsonl").write_text("".join(kept))
        sdbench(command, *TWO[command]).refuses(1, message.format(*lost))
    # Committed runs are without the file: it may have been left out.
    (replies / "samples.jsonl").unlink()
    assert sdbench(command, *TWO[command]).code == 0


def test_arms_that_are_not_judged_yet_have_what_samples_there_are(sdbench, saved_run):
    saved_run("live", "e2e", E2E_POOLED, ARMS[:1], SAMPLES[:3], replies=6, outcome="running")
    assert "teacher-forced: 1 answer, not judged yet" in sdbench("report", "live").out


def test_runs_that_need_not_have_all_rows(sdbench, saved_run):
    saved_run("older", "kernels", ASKED, ROWS[:3])  # of before rows were counted
    saved_run("live", "kernels", ASKED, ROWS[:3], recorded=6, outcome="running")
    saved_run("more", "kernels", ASKED, ROWS, recorded=3)
    assert sdbench("report", "older", "live", "more").code == 0


def test_a_plot_of_runs_that_have_none(sdbench, saved_run):
    saved_run("e2e", "e2e", E2E, [arm("dense", 100.0)])
    for name in "ab":
        saved_run(name, "kernels", ASKED, ROWS)
    one, kernels = "--plot draws one run of 'sdbench kernels', and ", "is a run of 'sdbench kernels'"
    sdbench("report", "e2e", "--plot", "plot.svg").refuses(2, f"{one}e2e is a run of 'sdbench e2e'; name one, or leave out --plot")
    sdbench("report", "a", "b", "--plot", "plot.svg").refuses(2, f"{one}a {kernels}, b {kernels}; name one")


def test_a_folder_of_runs(sdbench, saved_run, tmp_path):
    (tmp_path / "all/e2e").mkdir(parents=True)
    (tmp_path / "hidden").mkdir()
    saved_run("all/e2e/run", "kernels", ASKED, ROWS)
    saved_run("hidden/.run", "kernels", ASKED, ROWS)
    for command in ("report", "pool"):
        for folder in ("all", "all/e2e"):
            sdbench(command, folder).refuses(2, f"{folder} is no run directory", f"name one of those that 'sdbench runs {folder}' lists")
            assert sdbench("runs", folder).code == 0
    sdbench("report", "hidden").refuses(2, "name a folder of --output")
