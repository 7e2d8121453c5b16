"""What ``sdbench report`` refuses, and what it says to do."""

import pytest

from .test_report_cli import ASKED, E2E, ROWS, arm


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
