"""``sdbench sweep``: a grid of end-to-end runs."""

import shlex
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from sdbench.cli.options import json_option
from sdbench.cli.printing import print_result
from sdbench.words import counted

if TYPE_CHECKING:
    from sdbench.suites.sweep.grid import Option

NOT_OF_A_RUN = {
    "output": "a sweep names its runs' folders itself, in its own --output",
    "json": "a sweep prints for its runs; give --json to 'sdbench sweep'",
    "plot": "one file cannot hold the plots of all runs; 'sdbench report FOLDER --html FILE' draws them",
    "min-speedup": "a slow run is no failed one; read 'x dense' in the sweep's table or its --json",
}
"""Options of e2e that a grid cannot set, since the sweep decides where a run goes, what is printed and what has failed -> what to do."""


@click.command("sweep")
@click.argument("grid", metavar="GRID.yaml", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Folder of the run directories.  [default: results/local/sweep/GRID]")
@click.option(
    "--executor", type=click.Choice(["local", "ray"]), default="local", show_default=True, help="Processes here, or tasks of a Ray cluster."
)
@click.option("--ray-address", help="Ray cluster, HOST:PORT or auto.  [default: one of this machine's own, for this sweep]")
@click.option("--jobs", type=click.IntRange(min=1), help="Runs at once.  [default: one a GPU, or one]")
@click.option("--retries", type=click.IntRange(min=0), default=1, show_default=True, help="Further attempts at a run that failed.")
@json_option
def command(grid: Path, output: Path | None, executor: str, ray_address: str | None, jobs: int | None, retries: int, as_json: bool) -> None:
    """Run a grid of end-to-end runs: models, patterns, calibrations, methods, seeds, tasks; one table at the end.

    GRID.yaml has "axes" (option of e2e: list of values; every combination is a run) and "options" (the same in all runs); "exclude" leaves
    combinations out, "include" adds runs. All values are checked before anything starts. Each run is a process of its own with a GPU of its
    own and a directory in --output: one that fails, is killed or runs out of memory costs itself alone, is tried again, and is recorded in
    sweep.json. The same command goes on where it was stopped; finished runs are kept.

    \b
    sdbench sweep grid.yaml
    sdbench sweep grid.yaml --output results/local/patterns --retries 2
    sdbench sweep grid.yaml --executor ray --ray-address 10.0.0.5:6379
    sdbench runs results/local/patterns
    sdbench report results/local/patterns --html report.html

    \b
    axes:
      pattern: [2:4, 16:32]
      calib: [decode, self]
      seed: [0, 1, 2]
    options:
      model: demo
      validation-examples: 200
    """
    from sdbench.errors import SdbenchError, UsageError
    from sdbench.progress import Progress
    from sdbench.suites.sweep.driver import Plan, check_runs, sweep
    from sdbench.suites.sweep.executors import LocalExecutor, RayExecutor
    from sdbench.suites.sweep.grid import expand, read_grid
    from sdbench.suites.sweep.report import report

    if ray_address and executor != "ray":
        raise UsageError("--ray-address is of --executor ray; give both")
    runs = expand(grid, read_grid(grid), run_options(), NOT_OF_A_RUN)
    folder = output or Path("results/local/sweep") / grid.stem
    place = RayExecutor(ray_address, jobs) if executor == "ray" else LocalExecutor(jobs)
    # Ray prints to stdout what becomes of its processes; each run's record says it, and stdout is for the results.
    with Progress() as progress, redirect_stdout(StringIO()):
        try:
            progress.note(f"{counted(len(runs), 'run')} in {folder}; checking them")
            began = time.monotonic()
            arguments = check_runs(grid, runs, place)
            done = sweep(Plan(grid, runs, arguments, folder, retries, time.monotonic() - began), place, progress)
        finally:
            place.stop()
    print_result(report(done, folder), as_json)
    # Of a run that is not complete there may be no directory, or none that can be read.
    if done.count("complete") and not as_json:
        print(f"each complete run with its notes: sdbench report {shlex.quote(str(folder))}")
    failed = [entry for entry in done.runs if entry.outcome == "failed"]
    if failed:
        first = f"{failed[0].run} ({failed[0].reason})"
        raise SdbenchError(
            f"{len(failed)} of {counted(len(runs), 'run')} failed, the first {first}; finished ones are kept in {folder}, and the same "
            "command tries the others again"
        )


def run_options() -> "dict[str, Option]":
    """Options of ``sdbench e2e`` that a grid may set, by name."""
    from sdbench.cli.e2e import command as e2e
    from sdbench.suites.sweep.grid import Option

    found = {}
    for parameter in e2e.params:
        if isinstance(parameter, click.Option):
            off = parameter.secondary_opts[0] if parameter.secondary_opts else None
            for on in parameter.opts:
                found[on.removeprefix("--")] = Option(on, off, parameter.is_flag, parameter.multiple)
    return {name: option for name, option in found.items() if name not in NOT_OF_A_RUN}
