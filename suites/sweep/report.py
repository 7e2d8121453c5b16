"""All runs of a sweep in one table: a line a run and arm, with the options that vary."""

from datetime import UTC, datetime
from itertools import compress
from pathlib import Path

from sdbench.errors import SdbenchError
from sdbench.results import with_status
from sdbench.suites.e2e.report import COLUMNS, table_rows
from sdbench.suites.e2e.tables import fidelity_table
from sdbench.suites.runs import Report, Row, Table, measured, read_run
from sdbench.suites.sweep.grid import shown
from sdbench.suites.sweep.record import Call, SweepRecord
from sdbench.tables import Column
from sdbench.words import counted


def report(record: SweepRecord, folder: Path) -> Report:
    """The table of all runs that ``sdbench sweep`` and ``sdbench report`` of its folder show.

    A run without arms has one line with its outcome. Columns that say nothing are left out: outcomes where all are ``complete``, and
    figures that no arm has.

    Args:
        record: The sweep's.
        folder: Where its runs are; an unreadable one is shown without arms.
    """
    axes = [Column(name, key=True) for name in record.varying]
    arms = [_arms(folder / entry.run) for entry in record.runs]
    cells, fidelity = [], []
    table: Table | None = None
    places = [[shown(entry.arguments.get(name, entry.defaults.get(name))) for name in record.varying] for entry in record.runs]
    for entry, place, found in zip(record.runs, places, arms, strict=True):
        rows = table_rows(found) or [["-"] * len(COLUMNS)]
        cells += [[*place, entry.outcome, *row] for row in rows]
        if one := fidelity_table(found):
            table = one
            fidelity += [[*place, *row] for row in one.cells]
    more = [Table(table.title, [*axes, *table.columns], fidelity, table.lines)] if table else []
    document = record.model_dump(by_alias=True) | {"folder": str(folder)}
    for entry, found in zip(document["runs"], arms, strict=True):
        entry["arms"] = [with_status(arm) for arm in found]
    columns = [*axes, Column("outcome"), *COLUMNS]
    said = [not column.figure or any(row[number] != "-" for row in cells) for number, column in enumerate(columns)]
    said[len(axes)] = record.count("complete") < len(record.runs)
    columns, cells = list(compress(columns, said)), [list(compress(row, said)) for row in cells]
    records = [
        {"run": entry.run, "outcome": entry.outcome, "axes": dict(zip(record.varying, place, strict=True)), **arm}
        for entry, place, found in zip(record.runs, places, arms, strict=True)
        for arm in found or [{}]
    ]
    return Report(f"{record.grid}: {_counted(record)}", columns, cells, _lines(record), document, records, more=more)


def _arms(path: Path) -> list[Row]:
    try:
        return [measured(arm) for arm in read_run(path).latest("arm", "arm")]
    except SdbenchError:
        return []


def _counted(record: SweepRecord) -> str:
    counts = {entry.outcome: record.count(entry.outcome) for entry in record.runs}
    return f"{counted(len(record.runs), 'run')}, " + ", ".join(f"{n} {name}" for name, n in counts.items())


def _lines(record: SweepRecord) -> list[str]:
    lines = []
    runs = record.runs
    for entry in runs:
        tries = len(entry.attempts)
        if entry.outcome == "running":
            lines.append(f"{entry.run}: going on or killed in attempt {tries}")
        elif entry.outcome in ("failed", "interrupted"):
            lines.append(f"{entry.run}: {entry.outcome} after {counted(tries, 'attempt')}: {entry.reason}")
        elif entry.outcome == "complete" and tries > 1:
            before = "; ".join(dict.fromkeys(str(attempt.reason) for attempt in entry.attempts if attempt.reason))
            lines.append(f"{entry.run}: complete in attempt {tries}" + (f", after: {before}" if before else ""))
    kept = sum(entry.kept for entry in runs)
    if kept:
        lines.append(f"finished before the last call, and kept: {kept}")
    return lines + [f"call {number}, of {_how_long(call)}" for number, call in enumerate(record.calls, start=1) if call.attempts]


def _how_long(call: Call) -> str:
    started = datetime.fromisoformat(call.started).astimezone(UTC)
    end = {"interrupted": f", cut off ({call.reason})", "running": ", going on or killed"}.get(call.outcome or "", "")
    # Of a call that could not say when it ended, the last attempt's begin or end is known.
    more = " or more" if call.outcome == "running" or call.reason == "killed" else ""
    attempts = f"{counted(call.attempts, 'attempt')} at runs, at most {min(call.jobs, call.attempts)} at once"
    took = f"in {call.seconds:.0f} s{more}, of which checking the grid took {call.checking_seconds:.0f}"
    return f"{started:%Y-%m-%d %H:%M} UTC{end}: {attempts}, {took}"
