"""``sdbench report``: the tables of finished and unfinished runs."""

import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

import rich_click as click

from sdbench.cli.options import json_option
from sdbench.cli.printing import print_report
from sdbench.cli.profiles import is_given

if TYPE_CHECKING:
    from sdbench.suites.runs import Report

ONE_RUN = ("csv", "json")
"""Formats in which two runs would make a file that nothing reads; a sweep's folder makes one of all its runs."""


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "csv", "json"]),
    default="text",
    show_default=True,
    help="text as the command printed it; markdown for a job summary; csv with a line a result and all digits; json as the command's own.",
)
@json_option
@click.option("--output", type=click.Path(path_type=Path), help="Write to this file.  [default: standard output]")
@click.option("--force", is_flag=True, help="Replace the --output or --html file if it is there.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw the kernel run's time over bytes read; .png, .svg or .pdf.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write one self-contained page: tables, plots and what was run.")
def command(
    runs: tuple[Path, ...],
    form: Literal["text", "markdown", "csv", "json"],
    as_json: bool,
    output: Path | None,
    force: bool,
    plot: Path | None,
    html: Path | None,
) -> None:
    """Show runs again: tables, sums and notes from their run directories.

    RUN is a folder that --output of e2e, kernels, tune or decode wrote, or --run-directory of prune. Above each table stands what ran
    where, at which commit, and how it ended; a run that failed, was interrupted or is still going on is shown as far as it got, and says
    so. A sweep's folder gives the table of all its runs, and below it, but for csv and json, each complete one. Nothing is measured.

    \b
    sdbench report run
    sdbench report run another --format markdown >> summary.md
    sdbench report run --format csv --output rows.csv
    sdbench report results/local/sweep/grid --format csv
    sdbench report run --plot roofline.svg
    sdbench report run another --html report.html
    """
    from sdbench.errors import ExitCode, SdbenchError, UsageError
    from sdbench.suites.plots import check_plot, require_matplotlib, save_plot
    from sdbench.suites.reports import render
    from sdbench.suites.runs import read_run
    from sdbench.suites.sweep.record import runs_named, sweeps_named
    from sdbench.suites.sweep.report import report as sweep_report

    if as_json:
        if form != "json" and is_given("form"):
            raise UsageError(f"--json is --format json, and --format {form} is given; leave one out")
        form = "json"
    named, notes = runs_named(runs)
    sweeps = sweeps_named(runs)
    one_sweep = form in ONE_RUN and len(runs) == len(sweeps) == 1
    if len(named) > 1 and form in ONE_RUN and not one_sweep:
        raise UsageError(f"--format {form} holds one run, and {len(named)} are given; call it once for each")
    for note in notes if html or not one_sweep else ():
        print(note, file=sys.stderr)
    saved = [read_run(path) for path in named]
    reports = [render(run) for run in saved]
    tables = [sweep_report(record, folder) for folder, record in sweeps]
    shown = tables if one_sweep else [*tables, *reports]
    for option, file in (("--output", output), ("--html", html)):
        if file:
            _require_free(option, file, [*named, *(folder for folder, _ in sweeps)], force)
    if html:
        require_matplotlib("--html")
        if output and output.absolute() == html.absolute():
            raise UsageError(f"--html and --output name one file, {html}")
    if plot:
        check_plot(plot)
        kernels = [(run, report) for run, report in zip(saved, reports, strict=True) if run.record.command == "kernels"]
        if len(kernels) != 1:
            told = ", ".join(f"{run.path} is a run of 'sdbench {run.record.command}'" for run in saved)
            raise UsageError(f"--plot draws one run of 'sdbench kernels', and {told}; name one, or leave out --plot")
    if html:
        from sdbench.suites.html.page import page

        _write(html, page(list(zip(saved, reports, strict=True))))
        print(f"wrote {html}", file=sys.stderr)
    if output:
        _write(output, _text(shown, form))
    elif form == "text":
        _show(shown)
    else:
        sys.stdout.write(_text(shown, form))
    if plot:
        from sdbench.suites.kernels.plot import draw

        ((run, report),) = kernels
        if not save_plot(plot, draw(report.document["rows"], run.place)):
            raise SdbenchError(f"nothing to plot in {plot}: no row has a timing", ExitCode.NOTHING_SELECTED)


def _require_free(option: str, file: Path, runs: Sequence[Path], force: bool) -> None:
    """Refuses a file that is there, or is the run's own."""
    from sdbench.errors import UsageError
    from sdbench.suites.runs import RUN_FILES
    from sdbench.suites.sweep.record import SWEEP_FILE

    if any(file.absolute().parent == path.absolute() and file.name in (*RUN_FILES, SWEEP_FILE) for path in runs):
        raise UsageError(f"{option} {file} is a file of the run itself; name another")
    if file.exists() and not force:
        raise UsageError(f"{option} {file} is there already; --force replaces it")


def _write(file: Path, text: str) -> None:
    from sdbench.errors import SdbenchError
    from sdbench.results import write_atomic

    try:
        write_atomic(file, text)
    except OSError as error:
        raise SdbenchError(f"cannot write {file}: {error.strerror}") from error


def _text(reports: "list[Report]", form: str) -> str:
    from sdbench.results import strict_json

    if form == "markdown":
        return "\n".join(report.markdown() for report in reports)
    if form == "text":
        file = StringIO()
        _show(reports, file)
        return file.getvalue()
    (report,) = reports
    return report.csv() if form == "csv" else strict_json(report.document, indent=2) + "\n"


def _show(reports: "list[Report]", file: TextIO | None = None) -> None:
    for number, report in enumerate(reports):
        if number:
            print(file=file)
        print_report(report, file)
