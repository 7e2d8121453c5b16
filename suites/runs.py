"""A run directory read back, and a run in the form in which commands show it. Nothing here needs torch."""

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sdbench.csv_files import csv_text, rows_to_frame
from sdbench.errors import SdbenchError, UsageError
from sdbench.records import RUN_SCHEMA, RunRecord, differences, flatten
from sdbench.results import RunDirectory, first_fault, read_jsonl, strict_json
from sdbench.suites.saved import KEYS, faults_of
from sdbench.tables import Column, to_markdown
from sdbench.words import counted

Row = dict[str, Any]

RUN_FILES = ("run.json", "rows.jsonl", "samples.jsonl")
"""What a run directory is made of: the run itself, and nothing that can be written again from it."""

TEXTS = ("config", "outcomes", "layers", "products", "matches")
"""Fields of a CSV file that stay one text each, since their own fields are other ones in every row; figures get columns of their own."""


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

    @cached_property
    def _held(self) -> list[Row]:
        """Rows and samples that no later one replaces."""
        rows = [row for kind, key in KEYS.items() for row in self.latest(kind, *key)]
        return rows + last_of(self.samples, "arm", "example")

    @property
    def last_measured(self) -> int:
        """The last attempt that measured anything that holds."""
        return max(map(_attempt, self._held), default=1)

    def now(self, name: str) -> Any:
        """``environment``, ``versions`` or ``git`` as the last attempt that measured anything found it."""
        return self.record.found(self.last_measured)[name]

    @property
    def place(self) -> str:
        """Where that was: the GPU's name, or "CPU"."""
        return self._place(self.now("environment"))

    def where(self, attempt: int) -> str:
        """Machine and code of an attempt, for one line."""
        environment, git = self.record.found(attempt)["environment"], self.record.found(attempt)["git"]
        commit = f"commit {git['commit'][:7]}{' with changes' if git['dirty'] else ''}" if git else "no git commit recorded"
        return f"{self._place(environment)}, torch {environment.get('torch')}, Triton {environment.get('triton')}, {commit}"

    def _place(self, environment: Mapping[str, Any]) -> str:
        gpu = environment.get("gpu")
        return "CPU" if gpu is None or self.record.arguments.get("device") == "cpu" else str(gpu["name"])

    def origins(self) -> list[str]:
        """Which attempt measured what, a line each; none where all of it comes from one machine and one code."""
        counts = sorted(Counter(map(_attempt, self._held)).items())
        differing = differences([self.record.facts(number) for number, _ in counts])
        if not differing:
            return []
        names = dict.fromkeys(name.partition(".")[0] for name in differing)
        lines = [f"ROWS OF {len(counts)} ATTEMPTS that differ in {', '.join(names)}: speed-ups and sums across them compare these too"]
        lines += [
            f"attempt {number} measured {count} of the rows and samples ({self._labels(number)}) on {self.where(number)}"
            for number, count in counts
        ]
        return lines

    def _labels(self, attempt: int) -> str:
        named = (str(line.get("layer") or line.get("arm") or "chains") for line in self._held if _attempt(line) == attempt)
        return ", ".join(dict.fromkeys(named))


def origins(directory: RunDirectory | None) -> list[str]:
    """:meth:`SavedRun.origins` of a run that is going on; none without a directory."""
    return SavedRun(directory.path, directory.record, directory.rows, directory.samples).origins() if directory else []


def require_same_gpu(directory: RunDirectory) -> None:
    """Refuses to go on in a run directory whose rows come from another GPU.

    Raises:
        SdbenchError: They do; names both.
    """
    record = directory.record
    present = _gpu(record.found(len(record.audit))["environment"])
    for number in {row.get("attempt", 1) for row in directory.rows}:
        earlier = _gpu(record.found(number)["environment"])
        if earlier != present:
            raise SdbenchError(f"{directory.path} holds rows of {earlier}, and this is {present}; choose another --output")


def _gpu(environment: dict[str, Any]) -> str:
    gpu = environment.get("gpu")
    return f"{gpu['name']} ({gpu['capability']})" if gpu else "no GPU"


def last_of(records: Sequence[Row], *key: str) -> list[Row]:
    """Of several records with the same key the last, at the place of the first."""
    return list({strict_json([record.get(name) for name in key]): record for record in records}.values())


def _attempt(line: Row) -> int:
    attempt = line.get("attempt")
    return attempt if isinstance(attempt, int) else 1


def measured(row: Row) -> Row:
    """A row without what the run directory added to it."""
    return {name: value for name, value in row.items() if name not in ("record", "attempt")}


def read_run(path: Path) -> SavedRun:
    """Reads a run directory, finished or not; a torn last line is dropped with a warning.

    Args:
        path: The folder.

    Raises:
        UsageError: The path is none.
        SdbenchError: One of its files is damaged, or a line lacks what reports, comparisons and resumed runs read.
    """
    try:
        content = (path / "run.json").read_bytes()
    except OSError as error:
        hint = f"one of those that 'sdbench runs {path}' lists" if _holds_runs(path) else "a folder of --output"
        raise UsageError(f"{path} is no run directory: its run.json cannot be read ({error.strerror}); name {hint}") from error
    try:
        record = RunRecord.model_validate_json(content)
    except ValidationError as error:
        raise SdbenchError(f"{path / 'run.json'} is no {RUN_SCHEMA} record ({first_fault(error)}); restore it or run again") from error
    if record.outcome == "complete" and not (path / "rows.jsonl").exists():
        raise SdbenchError(f"{path / 'run.json'} says complete, but {path / 'rows.jsonl'} is missing; restore it or run again")
    rows, samples = (read_jsonl(path / name, fault) if (path / name).exists() else [] for name, fault in faults_of(record.command).items())
    if record.outcome == "complete" and not rows:
        raise SdbenchError(f"{path / 'run.json'} says complete, but {path / 'rows.jsonl'} holds no row; restore it or run again")
    _require_all(path, record, rows, samples)
    return SavedRun(path, record, rows, samples)


def _require_all(path: Path, record: RunRecord, rows: Sequence[Row], samples: Sequence[Row]) -> None:
    """Refuses files that hold less than ``run.json`` counted, and fewer samples than an arm's row, written after them, tells of."""
    for one, held, promised in (("row", rows, record.rows), ("sample", samples, record.samples)):
        if record.outcome == "complete" and promised and len(held) < promised:
            name = f"{one}s"
            file, what = path / f"{name}.jsonl", f"{path / 'run.json'} says complete with {counted(promised, one)}"
            if file.exists():
                raise SdbenchError(f"{what}, but {file} holds {len(held)}; restore it or run again")
            raise SdbenchError(f'{what}, but {file} is missing; restore it, run again, or write "{name}": null there to leave it out')
    answered = Counter(sample["arm"] for sample in last_of(samples, "arm", "example"))
    for arm in last_of([row for row in rows if row["record"] == "arm"], "arm") if (path / "samples.jsonl").exists() else ():
        if answered[arm["arm"]] < arm["examples"]:
            what = f"{path / 'rows.jsonl'} tells of {counted(arm['examples'], 'sample')} of arm {arm['arm']}"
            raise SdbenchError(f"{what}, but {path / 'samples.jsonl'} holds {answered[arm['arm']]}; restore it or run again")


def _holds_runs(folder: Path) -> bool:
    """Whether a run lies up to three folders down, as deep as those of ``results``: a whole disk is not searched for a hint."""
    found = (file.relative_to(folder) for depth in (1, 2, 3) for file in folder.glob("/".join(["*"] * depth + ["run.json"])))
    return any(not any(part.startswith(".") for part in file.parts) for file in found)


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
        """The results as CSV, a line each; what holds several figures has a column for each of them, ``us.p50``."""
        nested = {name for record in self.records for name, value in record.items() if isinstance(value, Mapping)} - {*TEXTS}
        return csv_text(rows_to_frame([_flat(record, nested) for record in self.records]))


def _flat(record: Row, nested: set[str]) -> Row:
    # A null where other records hold several figures has no column of its own.
    flat: Row = {}
    for name, value in record.items():
        if name not in nested:
            flat[name] = value
        elif value is not None:
            flat |= flatten({name: value})
    return flat


def _text(line: str) -> str:
    """One line of Markdown that shows the text as it is: a message may hold a tag, or a line break."""
    return html.escape(" ".join(line.split()), quote=False).replace("*", "\\*")
