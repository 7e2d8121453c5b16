"""``sweep.json``: what the grid's runs are, each attempt at them, and how they ended."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from sdbench.errors import ExitCode, SdbenchError
from sdbench.results import strict_json, write_atomic

SWEEP_FILE = "sweep.json"
SCHEMA: Literal["sdbench.sweep/1"] = "sdbench.sweep/1"

Outcome = Literal["waiting", "running", "complete", "failed", "interrupted"]


class Attempt(BaseModel):
    """One start of a run; ``code`` is its exit code, negative for a signal, null where the worker was lost."""

    started: str
    outcome: Outcome = "running"
    code: int | None = None
    reason: str | None = None
    seconds: float | None = None
    worker: str | None = None
    device: str | None = None


class Entry(BaseModel):
    """A run: its directory, its options as the grid has them, and its end; ``kept`` if it was finished before this sweep began.

    ``defaults`` has the values, as a line shows them, of options that it leaves out and other runs of the grid do not.
    """

    run: str
    arguments: dict[str, Any]
    defaults: dict[str, str] = {}
    outcome: Outcome = "waiting"
    kept: bool = False
    reason: str | None = None
    seconds: float | None = None
    worker: str | None = None
    device: str | None = None
    attempts: list[Attempt] = []

    def end(self, outcome: Outcome, reason: str | None = None) -> None:
        """Ends the run and its last attempt, whose figures become the run's."""
        last = self.attempts[-1]
        last.outcome, last.reason = outcome, reason
        self.outcome, self.reason = outcome, reason
        self.seconds, self.worker, self.device = last.seconds, last.worker, last.device


class Call(BaseModel):
    """One call of the command: runs at once, attempts that it began, and seconds, those in which the grid was checked among them.

    The seconds of a call that was killed are those up to its last attempt's begin or end. ``outcome`` is ``complete`` where the call came
    to its end, whatever its runs did; ``running`` also where it was killed and no later call has seen that; null in older records, whose
    ``attempts`` are those that ended.
    """

    started: str
    jobs: int
    checking_seconds: float
    seconds: float
    attempts: int = 0
    outcome: Outcome | None = None
    reason: str | None = None


class SweepRecord(BaseModel):
    """The contents of ``sweep.json``."""

    schema_: Literal["sdbench.sweep/1"] = Field(alias="schema")
    grid: str
    executor: str
    varying: list[str]
    runs: list[Entry]
    calls: list[Call] = []

    def save(self, folder: Path) -> None:
        """Replaces the file.

        Raises:
            SdbenchError: It cannot be written.
        """
        try:
            write_atomic(folder / SWEEP_FILE, strict_json(self, indent=2) + "\n")
        except OSError as error:
            raise SdbenchError(f"cannot write {folder / SWEEP_FILE}: {error.strerror}; finished runs are kept in {folder}") from error

    def count(self, outcome: Outcome) -> int:
        """Runs with that outcome."""
        return sum(entry.outcome == outcome for entry in self.runs)


def read_record(folder: Path) -> SweepRecord | None:
    """The folder's record; None where there is none, or none that can be read: the run directories say what is finished."""
    try:
        return SweepRecord.model_validate_json((folder / SWEEP_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def sweeps_named(paths: Sequence[Path]) -> list[tuple[Path, SweepRecord]]:
    """The sweeps whose folders a command line names.

    Args:
        paths: Run directories and folders of sweeps.

    Raises:
        SdbenchError: A sweep's record is damaged.
    """
    return [(path, _record_of(path)) for path in paths if _is_sweep(path)]


def runs_named(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Run directories that a command line names, where a sweep's folder stands for its complete runs.

    A ``sweep.json`` beside other paths, as in ``FOLDER/*``, is passed over: the others are its runs.

    Args:
        paths: Run directories and folders of sweeps.

    Returns:
        The directories, and a line for each sweep some of whose runs are left out.

    Raises:
        SdbenchError: A sweep's record is damaged, or none of its runs is complete (exit code 5).
    """
    found: list[Path] = []
    notes = []
    for path in paths:
        if path.name == SWEEP_FILE and len(paths) > 1:
            continue
        if not _is_sweep(path):
            found.append(path)
            continue
        record = _record_of(path)
        complete = [entry for entry in record.runs if entry.outcome == "complete"]
        others = [f"{entry.run} ({entry.outcome})" for entry in record.runs if entry.outcome != "complete"]
        if not complete:
            raise SdbenchError(f"no run of the sweep in {path} is complete; the sweep's own command goes on", ExitCode.NOTHING_SELECTED)
        found += [path / entry.run for entry in complete]
        if others:
            notes.append(f"{path}: left out as not complete: {', '.join(others)}")
    return found, notes


def _is_sweep(path: Path) -> bool:
    return (path / SWEEP_FILE).is_file() and not (path / "run.json").is_file()


def _record_of(path: Path) -> SweepRecord:
    record = read_record(path)
    if record is None:
        raise SdbenchError(f"{path / SWEEP_FILE} is no {SCHEMA} record; the sweep's own command writes it again, or name its runs")
    return record
