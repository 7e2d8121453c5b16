"""Reports on a terminal, in a pipe or in a file."""

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from sdbench.suites.runs import Report

NOTHING = "nothing is measured yet"


def print_result(report: "Report", as_json: bool) -> None:
    """Prints what a command found: its JSON document and nothing else, or the report."""
    from sdbench.results import strict_json

    if as_json:
        sys.stdout.write(strict_json(report.document, indent=2) + "\n")
    else:
        print_report(report)


def print_report(report: "Report", file: TextIO | None = None) -> None:
    """Prints header, table and lines.

    Args:
        report: What to print.
        file: Where to, as wide as the table; None for standard output, as wide as its terminal or as $COLUMNS asks.
    """
    from rich.console import Console

    from sdbench.tables import PIPE_WIDTH, render_table

    console = Console(file=file, width=PIPE_WIDTH) if file else None
    for line in report.header:
        print(line, file=file)
    if report.cells:
        render_table(report.columns, report.cells, title=report.title, console=console)
    else:
        print(f"{report.title}: {NOTHING}", file=file)
    for line in report.lines:
        print(line, file=file)
    for more in report.more:
        print(file=file)
        render_table(more.columns, more.cells, title=more.title, console=console)
        for line in more.lines:
            print(line, file=file)
