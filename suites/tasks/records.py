"""A task's data: where it lies, and its records as examples."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sdbench.errors import SdbenchError, UsageError, cannot_read
from sdbench.results import strict_json, write_atomic
from sdbench.suites.data import Example, refuse_test_name
from sdbench.suites.tasks.registry import GRADING, Hub, Task, grading_of, template_fields

DATA_VARIABLE = "SDBENCH_DATA"
HOLDOUT_SEED = 0
"""What is held out does not follow ``--seed``, so that runs of several seeds judge questions of one part."""


def locate(task: Task, data: Path | None, tell: Callable[[str], None]) -> Path | None:
    """The file of a task's data: the given one, else that under ``$SDBENCH_DATA``, else what the hub has, which is kept.

    Args:
        task: Which.
        data: A file that was named, or None.
        tell: Told in one line what takes time.

    Returns:
        None for a bundled task.

    Raises:
        UsageError: A file for a bundled task, or no way to find the data.
        SdbenchError: ``$SDBENCH_DATA`` does not hold the file, or the download failed.
    """
    if task.bundled:
        if data:
            raise UsageError(f"task {task.name} comes with its data; leave out --data, or leave out --task for a file of your own")
        return None
    if data:
        return data
    folder = os.environ.get(DATA_VARIABLE)
    if folder and task.file:
        path = Path(folder) / task.name / task.file
        if not path.is_file():
            raise SdbenchError(f"task {task.name}: {DATA_VARIABLE}={folder} holds no {task.name}/{task.file}; put it there, or use --data")
        return path
    if task.hub is None:
        there = f"put it at ${DATA_VARIABLE}/{task.name}/{task.file}, or " if task.file else ""
        raise UsageError(f"task {task.name} needs its data: {there}give --data FILE (it comes from {task.source})")
    return _download(task, task.hub, tell)


def load_records(task: Task, path: Path) -> list[Example]:
    """Reads a task's data in the form in which it is published.

    JSON lines or a JSON array (``.json``, ``.jsonl``, ``.ndjson``), else plain text with a prompt a line, for a task that needs no more.

    Raises:
        SdbenchError: The file cannot be read, is empty, or a record lacks what the task's templates name (file, record and field named).
        UsageError: It is a test split by its name.
    """
    refuse_test_name(path)
    examples: dict[str, Example] = {}
    for where, number, record in _records(task, path):
        if str(record.get("split", "")).strip().casefold() == "test":
            raise UsageError(f"{where}: marked as a test split, which sdbench never reads; pass the training split")
        question = _fill(task, task.prompt, record, where)
        answer = _fill(task, task.reference, record, where) if task.reference else None
        name = _fill(task, task.id, record, where) if task.id else str(record.get("id") or f"{path.stem}-{number}")
        if name in examples:
            raise SdbenchError(f"{where}: id {name!r} occurs twice")
        examples[name] = Example(name, question, answer, grading_of(task, record, where))
    if not examples:
        raise SdbenchError(f"{path} holds no records")
    return list(examples.values())


def _records(task: Task, path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise cannot_read(path, error) from error
    except UnicodeDecodeError as error:
        raise SdbenchError(f"{path} is not UTF-8 text (byte {error.start}); convert it") from error
    if path.suffix.casefold() not in (".json", ".jsonl", ".ndjson"):
        fields = template_fields(task.prompt)
        if len(fields) > 1 or task.reference or task.grader in GRADING:
            raise UsageError(f"{path}: task {task.name} needs records with several fields; give JSON lines or a JSON array")
        yield from ((f"{path}, line {n}", n, {fields[0]: line}) for n, line in enumerate(content.split("\n"), 1) if line.strip())
        return
    if content.lstrip().startswith("["):
        for number, record in enumerate(_parse(content, str(path)), start=1):
            yield f"{path}, record {number}", number, _object(record, f"{path}, record {number}")
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, number, _object(_parse(line, where), where)


def _parse(text: str, where: str) -> Any:
    try:
        # A number is taken as the text that stands in the file.
        return json.loads(text, parse_float=str)
    except ValueError as error:
        raise SdbenchError(f"{where}: not JSON ({error})") from error


def _object(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise SdbenchError(f"{where}: not a JSON object")
    return record


def _fill(task: Task, template: str, record: dict[str, Any], where: str) -> str:
    values = {}
    for name in template_fields(template):
        names = task.fields.get(name, (name,))
        value = next((record[other] for other in names if record.get(other) is not None), None)
        if not isinstance(value, str | int) or not str(value).strip():
            raise SdbenchError(f"{where}: no text {' or '.join(map(repr, names))}, which task {task.name} needs")
        values[name] = value
    return template.format_map(values)


def _download(task: Task, hub: Hub, tell: Callable[[str], None]) -> Path:
    """The hub's records as JSON lines in the cache, fetched once a revision."""
    path = _cache_folder() / f"{task.name}-{hub.revision}.jsonl"
    if path.is_file():
        return path
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"task {task.name}: to fetch {hub.id} from the hub, pip install 'sdbench[hub]'; or get {task.file} from {task.source} and "
            f"give it as --data, or as ${DATA_VARIABLE}/{task.name}/{task.file}"
        ) from error
    tell(f"fetching {hub.id} (revision {hub.revision}) from the hub")
    try:
        # A file that is named comes as split "train", whatever the dataset calls it.
        datasets.disable_progress_bars()
        records = datasets.load_dataset(hub.id, hub.config, data_files=hub.file, split=hub.split, revision=hub.revision)
        lines = "".join(strict_json(dict(record)) + "\n" for record in records)
    except Exception as error:  # the library raises whatever its own libraries do
        raise SdbenchError(f"task {task.name}: {hub.id} cannot be fetched from the hub: {' '.join(str(error).split())[:200]}") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, lines)
    except OSError as error:
        raise SdbenchError(f"cannot keep {path}: {error.strerror}; set SDBENCH_CACHE") from error
    return path


def _cache_folder() -> Path:
    chosen = os.environ.get("SDBENCH_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdbench"
    return base / "tasks"
