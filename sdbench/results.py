"""Results on disk: strict JSON, append-only JSONL, CSV, and the run directory that an interrupted run resumes from."""

import csv
import fcntl
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from sdbench.errors import ExitCode, SdbenchError, UsageError
from sdbench.records import RUN_SCHEMA, Attempt, Outcome, RunRecord, differences
from sdbench.versions import NO_COMMIT, git_state, versions

if TYPE_CHECKING:
    import pandas as pd

Fault = Callable[[Mapping[str, Any]], str | None]
"""What is wrong with a record, in a few words; None for a good one."""

log = logging.getLogger("sdbench")


def to_plain(value: Any) -> Any:
    """Turns numpy and torch values, paths, dataclasses and pydantic models into what strict JSON can hold; NaN and Inf become None.

    Args:
        value: Anything made of those and of Python's own types; a tensor or array becomes nested lists.

    Raises:
        TypeError: A value of another kind.
    """
    return _without_nan(_to_builtin(value))


def strict_json(obj: Any, indent: int | None = None) -> str:
    """Serialises to strict JSON: NaN and Inf become null, and the text is ASCII, so U+2028 or U+0085 never split a line."""
    return json.dumps(to_plain(obj), indent=indent, allow_nan=False, ensure_ascii=True)


def with_status(record: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces every figure ``x`` that is NaN or infinite by None and adds ``x_status``: "nan", "inf" or "-inf"."""
    return _without_nan(_to_builtin(record), status=True)


def _to_builtin(value: Any) -> Any:
    return to_jsonable_python(value, by_alias=True, fallback=_from_array)


def _from_array(value: Any) -> Any:
    if isinstance(value, type) or not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")
    return value.tolist()


def _without_nan(value: Any, status: bool = False) -> Any:
    if isinstance(value, list):
        return [_without_nan(item, status) for item in value]
    if isinstance(value, dict):
        plain = {name: _without_nan(item, status) for name, item in value.items()}
        for name, item in value.items() if status else ():
            if _is_non_finite(item):
                plain.setdefault(f"{name}_status", str(item))
        return plain
    return None if _is_non_finite(value) else value


def first_fault(error: ValidationError) -> str:
    """The first thing that pydantic found wrong, and where, in one line."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where}: {fault['msg']}" if where else fault["msg"]


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def write_atomic(path: Path | str, text: str) -> None:
    """Replaces a file as a whole, so that a reader or a kill never meets half of it.

    Raises:
        OSError: The folder or the file cannot be written.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def append_jsonl(path: Path | str, *records: Mapping[str, Any]) -> None:
    """Appends records, a line each, in one write, and waits until they are on disk; a torn line left by a kill is removed first.

    Raises:
        OSError: The file cannot be written.
    """
    lines = "".join(strict_json(record) + "\n" for record in records).encode()
    with Path(path).open("a+b") as file:
        _mend_tail(file, path)
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def read_jsonl(path: Path | str, fault: Fault | None = None) -> list[dict[str, Any]]:
    """Reads the records of a JSONL file that sdbench wrote; a torn last line is dropped with a warning.

    Args:
        path: The file.
        fault: Says what is wrong with a record; None to take any.

    Raises:
        SdbenchError: The file cannot be read, or a complete line is not a JSON object, or a wrong one.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise SdbenchError(f"cannot read {path}: {error.strerror}") from error
    # Only b"\n" ends a record: str.splitlines would also break at U+2028 and U+0085 inside a text.
    *complete, tail = content.split(b"\n")
    records = []
    for number, line in enumerate(complete, start=1):
        if not line.strip():
            continue
        record = _parse_object(line)
        what = "not a JSON object" if record is None else fault(record) if fault else None
        if record is None or what:
            raise SdbenchError(
                f"{path}, line {number}: {what}; take the line out, and the run's command with this --output measures it again"
            )
        records.append(record)
    if tail.strip():
        last = _parse_object(tail)
        if last is None:
            log.warning("%s: dropped a torn last line (%d bytes)", path, len(tail))
        elif fault and (what := fault(last)):
            raise SdbenchError(f"{path}, last line: {what}; take the line out, and the run's command with this --output measures it again")
        else:
            records.append(last)
    return records


def _mend_tail(file: Any, path: Path | str) -> None:
    if file.seek(0, os.SEEK_END) == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    content = file.read()
    start = content.rfind(b"\n") + 1
    if _parse_object(content[start:]) is not None:
        file.write(b"\n")
        return
    log.warning("%s: removed a torn last line (%d bytes)", path, len(content) - start)
    file.truncate(start)


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode())
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def rows_to_frame(rows: Iterable[Mapping[str, Any]]) -> "pd.DataFrame":
    """Rows as a data frame of Python objects: no guessing of types, so id ``"007"`` and answer ``"NA"`` stay texts."""
    import pandas as pd  # half a second that reading and writing JSON does not need

    frame = pd.DataFrame(list(rows), dtype=object)
    return frame.where(frame.notna(), None)


def csv_text(frame: "pd.DataFrame") -> str:
    """A frame as CSV: texts quoted, lists and dicts as JSON, None empty."""
    import pandas as pd

    cells = [[strict_json(cell) if isinstance(cell, list | dict) else cell for cell in row] for row in frame.itertuples(index=False)]
    # Without dtype=object pandas would turn the integers of a column with a gap into floats.
    texts = pd.DataFrame(cells, columns=frame.columns, dtype=object)
    return texts.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")


def read_csv(path: Path | str) -> "pd.DataFrame":
    """Reads a CSV file with every cell as the text that stands there: ``007``, ``None`` and ``NA`` unchanged, a missing one empty."""
    import pandas as pd

    # Not pandas' own parser: before version 3 it ended a text at a NUL byte.
    csv.field_size_limit(sys.maxsize)  # the default, 128 KiB, is less than the ids of a long reply
    with Path(path).open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        return pd.DataFrame(list(reader), columns=list(reader.fieldnames or ()), dtype=object)


class RunDirectory:
    """A folder with ``run.json``, ``rows.jsonl`` and ``samples.jsonl``; a context manager that records how the run ended.

    Exceptions pass through it: Ctrl-C is recorded as interrupted, any other as failed. A process that was killed leaves its attempt
    "running"; the next one to open the directory marks it interrupted. A first attempt that one line to the user ends before anything is
    measured leaves no directory: the line says it all.
    """

    def __init__(self, path: Path, record: RunRecord, lock: int, faults: Mapping[str, Fault], made: Sequence[Path]):
        self.path = path
        self.record = record
        self.rows: list[dict[str, Any]] = _read_if_there(path / "rows.jsonl", faults.get("rows.jsonl"))
        self.samples: list[dict[str, Any]] = _read_if_there(path / "samples.jsonl", faults.get("samples.jsonl"))
        self._lock, self._made = lock, made
        self._was_complete = record.outcome == "complete"

    @classmethod
    def open(
        cls,
        path: Path | str,
        command: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, Any],
        faults: Mapping[str, Fault] | None = None,
    ) -> "RunDirectory":
        """Creates a run directory, or resumes the one that is there.

        Args:
            path: The folder (``--output``); parents are created.
            command: The sdbench command, for example "e2e".
            arguments: Every option that changes a result; leave out those that do not, such as the folder itself.
            environment: The machine, as the command line reports it.
            faults: File name -> what is wrong with a line of it that an earlier attempt left; the run stays as it was if one is.

        Raises:
            UsageError: The folder holds a run of another command or with other arguments.
            SdbenchError: It cannot be written, is in use, holds something else, or a wrong line.
        """
        directory = Path(path)
        try:
            made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
            directory.mkdir(parents=True, exist_ok=True)
            lock = lock_directory(directory)
            try:
                for draft in directory.glob(".*.tmp"):
                    draft.unlink()  # of a process that was killed as it wrote
                git = git_state()
                fresh = RunRecord(
                    schema=RUN_SCHEMA,
                    command=command,
                    arguments=to_plain(dict(arguments)),
                    environment=to_plain(dict(environment)),
                    versions=versions(),
                    git=git,
                    git_reason=None if git else NO_COMMIT,
                    created=_now(),
                )
                run = cls(directory, _earlier(directory, fresh) or fresh, lock, faults or {}, made)
                run._start(fresh)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise SdbenchError(f"cannot write the run directory {directory}: {error.strerror}; choose another --output") from error
        return run

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Appends one measurement to ``rows.jsonl``; a NaN or Inf becomes null with a ``..._status`` beside it."""
        self.add_rows([row])

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends measurements that only count together, so that a kill leaves all of them or none."""
        self.rows += self._append("rows.jsonl", rows)

    def add_sample(self, sample: Mapping[str, Any]) -> None:
        """Appends one example of one arm to ``samples.jsonl``, the same way."""
        self.samples += self._append("samples.jsonl", [sample])

    def finish(self, outcome: Outcome, reason: str | None = None) -> None:
        """Records the outcome of this attempt and lets go of the directory."""
        attempt = self.record.audit[-1]
        attempt.ended, attempt.outcome, attempt.reason = _now(), outcome, reason
        if outcome == "complete":
            self.record.rows, self.record.samples = len(self.rows), len(self.samples)
        if self._was_complete and not any(line.get("attempt") == attempt.attempt for line in (*self.rows, *self.samples)):
            # An attempt that measured nothing takes nothing from a complete run.
            outcome, reason = "complete", None
        self.record.outcome, self.record.outcome_reason = outcome, reason
        self._save()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish("complete")
        elif isinstance(error, SdbenchError) and error.exit_code != ExitCode.CHECK_FAILED and self._holds_nothing():
            self._remove()
        elif isinstance(error, KeyboardInterrupt):
            self.finish("interrupted", "Ctrl-C")
        else:
            text = " ".join(str(error).split())
            self.finish("failed", text if isinstance(error, SdbenchError) else f"{type(error).__name__}: {text}")

    def _holds_nothing(self) -> bool:
        # Other files are of a stage that takes its time, such as pruned layers.
        return len(self.record.audit) == 1 and not self.rows and not self.samples and [*self.path.iterdir()] == [self.path / "run.json"]

    def _remove(self) -> None:
        (self.path / "run.json").unlink()
        with suppress(OSError):  # a folder above it may hold something else by now
            for folder in self._made:
                folder.rmdir()
        os.close(self._lock)

    def _start(self, fresh: RunRecord) -> None:
        record = self.record
        for attempt in record.audit:
            if attempt.outcome == "running":
                attempt.outcome, attempt.reason = "interrupted", "killed"
        names = ("environment", "versions", "git")
        changed = {name: getattr(fresh, name) for name in names if getattr(fresh, name) != getattr(record, name)}
        earlier = [record.facts(number) for number in sorted({line.get("attempt", 1) for line in (*self.rows, *self.samples)})]
        if differing := differences([*earlier, fresh.facts(1)]):
            told = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in differing.items())
            log.warning("%s: kept rows are not of this machine and code (%s, the last one now); reports tell them apart", self.path, told)
        for name, held, counted in (("rows", self.rows, record.rows), ("samples", self.samples, record.samples)):
            if counted and len(held) < counted:
                log.warning("%s/%s.jsonl holds %d of %d %s: what is gone is measured again", self.path, name, len(held), counted, name)
        record.outcome, record.outcome_reason = "running", None
        number = len(record.audit) + 1
        record.audit.append(Attempt(attempt=number, started=_now(), resumed_rows=len(self.rows), changed=changed))
        self._save()

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        stored = [with_status({**record, "attempt": len(self.record.audit)}) for record in records]
        append_jsonl(self.path / name, *stored)
        return stored

    def _save(self) -> None:
        write_atomic(self.path / "run.json", strict_json(self.record, indent=2) + "\n")


def _earlier(directory: Path, fresh: RunRecord) -> RunRecord | None:
    file = directory / "run.json"
    if not file.exists():
        if (directory / "rows.jsonl").exists() or (directory / "samples.jsonl").exists():
            raise SdbenchError(f"{directory} holds rows but no run.json, so they cannot be resumed; choose another --output")
        return None
    try:
        record = RunRecord.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise SdbenchError(f"{file} is no {RUN_SCHEMA} record ({first_fault(error)}); choose another --output") from error
    if record.command != fresh.command:
        raise UsageError(f"{directory} holds a run of 'sdbench {record.command}'; choose another --output for 'sdbench {fresh.command}'")
    names = sorted(record.arguments.keys() | fresh.arguments.keys())
    pairs = [(name, record.arguments.get(name), fresh.arguments.get(name)) for name in names]
    differing = [f"{name} ({strict_json(old)} there, {strict_json(new)} now)" for name, old, new in pairs if old != new]
    if differing and not any(_read_if_there(directory / name) for name in ("rows.jsonl", "samples.jsonl")):
        # Nothing was measured yet, so that a corrected command may take the directory; the audit keeps the failed attempt.
        return record.model_copy(update={"arguments": fresh.arguments})
    if differing:
        raise UsageError(f"{directory} holds a run with other arguments: {', '.join(differing)}; choose another --output")
    return record


def lock_directory(directory: Path) -> int:
    """Keeps other sdbench processes out of a folder until the descriptor that comes back is closed, or this process ends.

    Raises:
        SdbenchError: Another one is in it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise SdbenchError(f"{directory} is in use by another sdbench process; wait for it or choose another --output") from error
    except OSError:
        log.debug("%s: this file system has no locks", directory)
    return descriptor


def _read_if_there(path: Path, fault: Fault | None = None) -> list[dict[str, Any]]:
    return read_jsonl(path, fault) if path.exists() else []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
