"""The run directories below a folder: what each is of and how it ended, or what is wrong with it."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sdbench.errors import ExitCode, SdbenchError, UsageError
from sdbench.suites.runs import Report, SavedRun, read_run
from sdbench.tables import Column
from sdbench.words import counted

SCHEMA = "sdbench.runs/1"
Row = dict[str, Any]

MARKS = ("run.json", "rows.jsonl")
"""Files that make a folder a run directory, whole or not."""

COLUMNS = (
    Column("run", key=True),
    Column("suite"),
    Column("outcome"),
    Column("rows", figure=True),
    Column("attempts", figure=True),
    Column("when", figure=True),
    Column("model"),
)


def find(folder: Path) -> list[Row]:
    """One record a folder that holds ``MARKS``, in the order of their paths; a damaged one has the problem for a reason.

    Args:
        folder: Where to look, at any depth; hidden folders and links to folders are left out.

    Raises:
        UsageError: It is no folder.
        SdbenchError: No run is in it (exit code 5).
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name one that holds run directories")
    found = sorted(_records(folder), key=lambda row: Path(row["run"]).parts)
    if not found:
        raise SdbenchError(f"no run directory in {folder}: no folder there holds {' or '.join(MARKS)}", ExitCode.NOTHING_SELECTED)
    return found


def report(folder: Path, rows: Sequence[Row]) -> Report:
    """What ``sdbench runs`` shows."""
    cells = [
        [
            str(Path(row["run"]).relative_to(folder)),
            row["suite"] or "-",
            row["outcome"],
            *("-" if row[name] is None else str(row[name]) for name in ("rows", "attempts")),
            row["when"][:16].replace("T", " ") if row["when"] else "-",
            row["model"] or "-",
        ]
        for row in rows
    ]
    count = counted(len(rows), "run")
    lines = [f"{cell[0]}: {row['reason']}" for cell, row in zip(cells, rows, strict=True) if row["reason"]]
    return Report(f"{count} in {folder}, times in UTC", COLUMNS, cells, lines, {"schema": SCHEMA, "runs": list(rows)}, rows)


def _records(folder: Path) -> Iterator[Row]:
    problems: list[OSError] = []
    for place, folders, files in os.walk(folder, onerror=problems.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(name in MARKS for name in files):
            yield _record(Path(place))
    yield from (_damaged(Path(error.filename), f"cannot be read ({error.strerror})") for error in problems)


def _record(path: Path) -> Row:
    try:
        run = read_run(path)
    except SdbenchError as error:
        return _damaged(path, str(error))
    record, arguments = run.record, run.record.arguments
    pattern = arguments.get("pattern") or []
    return {
        "run": str(path),
        "suite": record.command,
        "model": arguments.get("model") or arguments.get("shapes"),
        "pattern": [pattern] if isinstance(pattern, str) else pattern,
        "outcome": record.outcome,
        "when": record.created,
        "rows": len(run.rows),
        "samples": len(run.samples),
        "attempts": len(record.audit),
        "reason": _reason(run),
    }


def _reason(run: SavedRun) -> str | None:
    return run.record.outcome_reason or ("going on, or killed" if run.record.outcome == "running" else None)


def _damaged(path: Path, reason: str) -> Row:
    nothing = dict.fromkeys(("suite", "model", "when", "rows", "samples", "attempts"))
    return {"run": str(path), **nothing, "pattern": [], "outcome": "damaged", "reason": reason}
