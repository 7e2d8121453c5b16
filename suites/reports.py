"""Every command's report from its run directory: what the command printed, and what run it was."""

from collections.abc import Callable
from dataclasses import replace

from sdbench.errors import SdbenchError, UsageError
from sdbench.suites import pruned
from sdbench.suites.decode import report as decode
from sdbench.suites.e2e import report as e2e
from sdbench.suites.kernels import report as kernels
from sdbench.suites.runs import Report, SavedRun
from sdbench.words import counted

REPORTS: dict[str, Callable[[SavedRun], Report]] = {
    "kernels": kernels.of_run,
    "tune": kernels.of_tune_run,
    "e2e": e2e.of_run,
    "decode": decode.of_run,
    "prune": pruned.of_run,
}
"""Command -> the report of one of its run directories."""


def render(run: SavedRun) -> Report:
    """The table, lines and JSON document that the run's command gave, under a header that says what run it was and how it ended.

    Raises:
        UsageError: The run is of a command without a report.
        SdbenchError: Its rows lack a field.
    """
    command = run.record.command
    if command not in REPORTS:
        raise UsageError(f"{run.path} holds a run of 'sdbench {command}', which has no report; those that do: {', '.join(REPORTS)}")
    try:
        report = REPORTS[command](run)
    except (KeyError, TypeError) as error:
        version = run.now("versions").get("sdbench")
        raise SdbenchError(f"{run.path}: rows of sdbench {version} that this one cannot read ({type(error).__name__}: {error})") from error
    return replace(report, header=header(run))


def header(run: SavedRun) -> list[str]:
    """What ran where and how it ended, in one line; more lines where it did not end well, or not in one go."""
    record, arguments = run.record, run.record.arguments
    pattern = arguments.get("pattern", [])
    asked = [
        str(arguments.get("model") or arguments.get("shapes")),
        *([pattern] if isinstance(pattern, str) else pattern),
        str(arguments.get("dtype")),
    ]
    count, origins = len(record.audit), run.origins()
    where = "several machines or versions" if origins else run.where(run.last_measured)
    lines = [f"{run.path}: sdbench {record.command} of {', '.join(asked)} on {where}, {record.outcome} in {counted(count, 'attempt')}"]
    if record.outcome != "complete":
        reason = record.outcome_reason or "it is going on, or was killed"
        lines.append(f"NOT A COMPLETE RUN ({reason}): what follows, sums included, is over what is there")
    return lines + origins
