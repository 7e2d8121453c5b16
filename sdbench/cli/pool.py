"""``sdbench pool``: several draws of one comparison as one table."""

import sys
from pathlib import Path
from typing import Literal

import rich_click as click

from sdbench.cli.options import json_option
from sdbench.cli.printing import print_result


@click.command("pool")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["text", "markdown", "csv"]), default="text", show_default=True, help="Form of the table."
)
@json_option
def command(runs: tuple[Path, ...], form: Literal["text", "markdown", "csv"], as_json: bool) -> None:
    """Pool several draws of e2e, runs or a sweep's folder: fidelity and answers over all, with intervals over questions.

    RUN is a folder that 'sdbench e2e' wrote, or that of a sweep, for all of its complete runs. Where runs have fidelity ('--fidelity',
    '--fidelity-only'), a table has KL and how many times as near as the control an arm is; where pruned arms answered, another has right
    answers and their points over the control. Runs may differ in --seed, which draws calibration and judged examples, and in --pattern,
    --method and --calib, which make lines of their own, each against its own control; nothing else. Nothing is measured.

    \b
    sdbench e2e --fidelity-only --seed 0 --output draw0
    sdbench e2e --fidelity-only --seed 1 --output draw1
    sdbench pool draw0 draw1
    sdbench pool draw* --format markdown
    sdbench pool results/local/sweep/grid
    """
    from sdbench.suites.pool import pool, report
    from sdbench.suites.runs import read_run
    from sdbench.suites.sweep.record import runs_named

    named, notes = runs_named(runs)
    for note in notes:
        print(note, file=sys.stderr)
    saved = [read_run(path) for path in named]
    found = report(pool(saved), saved)
    if as_json or form == "text":
        print_result(found, as_json)
    else:
        sys.stdout.write(found.markdown() if form == "markdown" else found.csv())
