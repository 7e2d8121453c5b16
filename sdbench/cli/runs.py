"""``sdbench runs``: the run directories below a folder."""

from pathlib import Path

import rich_click as click

from sdbench.cli.options import json_option
from sdbench.cli.printing import print_result


@click.command("runs")
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@json_option
def command(folder: Path, as_json: bool) -> None:
    """List the run directories below a folder: of what, how they ended, when, with how many rows and attempts.

    FOLDER is the current one if none is named. A directory that cannot be read, or lacks a file, is listed with the reason.

    \b
    sdbench runs
    sdbench runs results/local
    sdbench runs results --json
    """
    from sdbench.suites.listing import find, report

    print_result(report(folder, find(folder)), as_json)
