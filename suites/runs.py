"""A run directory read back, and a run in the form in which commands show it. Nothing here needs torch."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sdbench.errors import SdbenchError, UsageError
from sdbench.results import RUN_SCHEMA, RunRecord, csv_text, read_jsonl, rows_to_frame, strict_json
from sdbench.tables import Column, to_markdown

Row = dict[str, Any]

RUN_FILES = ("run.json", "rows.jsonl", "samples.jsonl")
"""What a run directory is made of: the run itself, and nothing that can be written again from it."""

SPREADS = ("us", "speedup", "decode_rate_spread")
"""Fields that may hold several figures."""


@dataclass(frozen=True)
class SavedRun:
    """What a run directory holds.

    Attributes:
        path: The folder.
        record: Its ``run.json``.
        rows: Its ``rows.jsonl``.
        samples: Its ``samples.jsonl``.
    """

    path: Path
    record: RunRecord
    rows: list[Row]
    samples: list[Row]

    def latest(self, kind: str, *key: str) -> list[Row]:
        """Rows of one kind, in the order in which they first came; of several with the same key the last, as a resumed run left it.

        Args:
            kind: The rows' ``record``.
            key: Fields that tell rows apart.
        """
        return last_of([row for row in self.rows if row.get("record") == kind], *key)

    def now(self, name: str) -> Any:
        """``environment``, ``versions`` or ``git`` as the last attempt found it."""
        audit = self.record.audit
        return audit[-1].changed.get(name, getattr(self.record, name)) if audit else getattr(self.record, name)

    @property
    def place(self) -> str:
        """Where it ran: the GPU's name, or "CPU"."""
        gpu = self.now("environment").get("gpu")
        return "CPU" if gpu is None or self.record.arguments.get("device") == "cpu" else str(gpu["name"])


def last_of(records: Sequence[Row], *key: str) -> list[Row]:
    """Of several records with the same key the last, at the place of the first."""
    return list({strict_json([record.get(name) for name in key]): record for record in records}.values())


def measured(row: Row) -> Row:
    """A row without what the run directory added to it."""
    return {name: value for name, value in row.items() if name not in ("record", "attempt")}


def read_run(path: Path) -> SavedRun:
    """Reads a run directory, finished or not; a torn last line is dropped with a warning.

    Raises:
        UsageError: The path is none.
        SdbenchError: One of its files is damaged.
    """
    try:
        content = (path / "run.json").read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} is no run directory: its run.json cannot be read ({error.strerror}); name a folder of --output"
        ) from error
    try:
        record = RunRecord.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise SdbenchError(f"{path / 'run.json'} is no {RUN_SCHEMA} record ({problem}); restore it or run again") from error
    if record.outcome == "complete" and not (path / "rows.jsonl").exists():
        raise SdbenchError(f"{path / 'run.json'} says complete, but {path / 'rows.jsonl'} is missing; restore it or run again")
    rows, samples = (read_jsonl(file) if file.exists() else [] for file in (path / "rows.jsonl", path / "samples.jsonl"))
    return SavedRun(path, record, rows, samples)


@dataclass(frozen=True)
class Table:
    """A further table of a run.

    Attributes:
        title: Its heading.
        columns: Its columns.
        cells: Its formatted cells.
        lines: What stands under it.
    """

    title: str
    columns: Sequence[Column]
    cells: Sequence[Sequence[str]]
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """A run as commands show it.

    Attributes:
        title: Heading of the table.
        columns: Its columns.
        cells: Its formatted cells, a row a result.
        lines: What stands under it: sums first, then notes.
        document: The JSON document.
        records: The results with all their digits, for CSV.
        header: What stands above it where the run is one of the past: what it was, and how it ended.
        more: Further tables, which stand below.
    """

    title: str
    columns: Sequence[Column]
    cells: Sequence[Sequence[str]]
    lines: Sequence[str]
    document: dict[str, Any]
    records: Sequence[Row]
    header: Sequence[str] = ()
    more: Sequence[Table] = ()

    def markdown(self) -> str:
        """The report for a job summary or a pull request."""
        parts = [f"### {_text(self.title)}", *(_text(line) for line in self.header)]
        if self.cells:
            parts.append(to_markdown(self.columns, self.cells).rstrip("\n"))
        if self.lines:
            parts.append("\n".join(f"- {_text(line)}" for line in self.lines))
        for table in self.more:
            parts += [f"#### {_text(table.title)}", to_markdown(table.columns, table.cells).rstrip("\n")]
            parts += ["\n".join(f"- {_text(line)}" for line in table.lines)] if table.lines else []
        return "\n\n".join(parts) + "\n"

    def csv(self) -> str:
        """The results as CSV, a line each; the figures of a spread, and each speed-up, have columns of their own."""
        nested = [name for name in SPREADS if any(isinstance(record.get(name), dict) for record in self.records)]
        return csv_text(rows_to_frame([_flat(record, nested) for record in self.records]))


def _flat(record: Row, nested: Sequence[str]) -> Row:
    flat = {name: value for name, value in record.items() if name not in nested}
    for name in nested:
        flat |= {f"{name}.{part}": figure for part, figure in (record.get(name) or {}).items()}
    return flat


def _text(line: str) -> str:
    """One line of Markdown that shows the text as it is: a message may hold a tag, or a line break."""
    return html.escape(" ".join(line.split()), quote=False).replace("*", "\\*")
