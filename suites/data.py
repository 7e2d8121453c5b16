"""Question-answer data: loading, a deterministic split without shared questions, and its check against the manifest."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sdbench.errors import CheckFailed, SdbenchError, UsageError, cannot_read
from sdbench.results import first_fault, strict_json
from sdbench.suites.manifest import NORMALISATION, Manifest, Part, Parts, Source, write_file
from sdbench.words import counted

FORMAT = 'each line is a JSON object with texts "question" and "answer"'
QUESTIONS = 'each line is a JSON object with a text "question"'


@dataclass(frozen=True)
class Example:
    """One question with its reference answer; the model sees the question alone, the rest reaches only the grader.

    Attributes:
        id: Its id.
        question: What the model is asked.
        answer: The reference; None where there is none.
        grading: What else the grader needs: unit tests, criteria.
    """

    id: str
    question: str
    answer: str | None
    grading: Mapping[str, Any] = field(default_factory=dict)


class Record(BaseModel):
    """A line of JSONL with a question."""

    # A number is taken as the text that stands in the file; ids and answers are texts from here on.
    model_config = ConfigDict(coerce_numbers_to_str=True)

    question: str
    answer: str | None = None
    id: str | None = None
    split: str | None = None
    grading: dict[str, Any] = {}


class _AnsweredRecord(Record):
    answer: str


AnyRecord = TypeVar("AnyRecord", bound=Record)


def load_examples(path: Path | str, answers: bool = True) -> list[Example]:
    """Reads examples from JSONL with ``question``, ``answer`` and optionally ``id`` (else ``<stem>-<line number>``) and ``grading``.

    Args:
        path: The file.
        answers: Whether every example must have an answer.

    Raises:
        SdbenchError: The file is missing, empty, not of that form (file, line and fault named), or repeats an id.
        UsageError: It is an official test split by its name or by a record's ``"split": "test"``.
    """
    file = Path(path)
    refuse_test_name(file)
    return list(_examples(_read(file), file, answers))


@lru_cache(maxsize=8)
def _examples(content: bytes, file: Path, answers: bool) -> tuple[Example, ...]:
    """Parsed once a content: a manifest's check and all runs of a grid read the same files."""
    model, form = (_AnsweredRecord, FORMAT) if answers else (Record, QUESTIONS)
    found = _records(content, file, model, form)
    return tuple(Example(name, record.question, record.answer, record.grading) for _, name, record in found)


def read_records(file: Path, model: type[AnyRecord], form: str) -> Iterator[tuple[str, str, AnyRecord]]:
    """File and line, id and record of each line of a JSONL file.

    Args:
        file: The file.
        model: What a line is.
        form: The same in words, for messages.

    Raises:
        SdbenchError: See `load_examples`.
        UsageError: See there.
    """
    refuse_test_name(file)
    yield from _records(_read(file), file, model, form)


def _records(content: bytes, file: Path, model: type[AnyRecord], form: str) -> Iterator[tuple[str, str, AnyRecord]]:
    names: set[str] = set()
    # Only b"\n" ends a line: str.splitlines would also break at U+2028 and U+0085 inside a text.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        record = _parse(line, f"{file}, line {number}", model, form)
        if record.split is not None and record.split.strip().casefold() == "test":
            raise UsageError(f"{file}, line {number}: marked as a test split, which sdbench never reads; pass the training split")
        name = record.id or f"{file.stem}-{number}"
        if name in names:
            raise SdbenchError(f"{file}, line {number}: id {name!r} occurs twice; give every example its own id or none")
        names.add(name)
        yield f"{file}, line {number}", name, record
    if not names:
        raise SdbenchError(f"{file} holds no examples; {form}")


def normalise_question(text: str) -> str:
    """A question as it is compared: Unicode NFKC, case folded, runs of whitespace as one space."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


def select(examples: Sequence[Example], n: int, seed: int, option: str = "n", file: Path | None = None) -> list[Example]:
    """Draws n examples: the same ones for the same seed on every machine, whatever the file's order; a larger n extends a smaller draw.

    Args:
        examples: What there is.
        n: How many.
        seed: Seed of the draw.
        option: What asked for n, as the message calls it.
        file: Where they come from, as the message calls it.

    Raises:
        UsageError: n is not between 1 and the number of examples.
    """
    if not 1 <= n <= len(examples):
        raise UsageError(f"{option} {n}: {file or 'the data'} has {len(examples)} to draw from; choose between 1 and {len(examples)}")
    return _shuffled(examples, "select", seed)[:n]


def split(
    source: Path | str,
    train_out: Path | str,
    validation_out: Path | str,
    manifest_out: Path | str,
    validation_size: int | float,
    seed: int,
    revision: str | None = None,
    force: bool = False,
    load: Callable[[Path], list[Example]] = load_examples,
) -> Manifest:
    """Splits one training file into two parts without shared questions and pins them in a manifest.

    Which part a question goes to depends on its text and the seed alone. Of questions that are equal after normalising the first is kept.

    Args:
        source: A file as ``load`` reads it.
        train_out: File for the training part, from which calibration examples are drawn.
        validation_out: File for the held-out part.
        manifest_out: File for the manifest.
        validation_size: A count (int) or a fraction between 0 and 1 (float) of the distinct questions.
        seed: Any whole number.
        revision: The dataset's revision; None takes the start of the source file's SHA-256.
        force: Replace files that are there.
        load: Reads the source; that of a task for a file in the task's own form.

    Raises:
        UsageError: A size that leaves a part empty, output names that collide or say "test", or files that are there without ``force``.
        SdbenchError: The source cannot be used, or an output cannot be written.
    """
    source, train_out, validation_out, manifest_out = Path(source), Path(train_out), Path(validation_out), Path(manifest_out)
    outputs = (train_out, validation_out, manifest_out)
    if len({path.resolve() for path in (source, *outputs)}) < 4:
        raise UsageError("source, train, validation and manifest must be four different files")
    for path in (source, train_out, validation_out):
        refuse_test_name(path)
    there = [str(path) for path in outputs if path.exists()]
    if there and not force:
        raise UsageError(f"already there: {', '.join(there)}; use --force to replace, or choose other names")

    source_hash = sha256_of(source)
    revision = f"sha256-{source_hash[:12]}" if revision is None else revision
    _require_revision(revision)

    examples = load(source)
    train, validation = hold_out(examples, validation_size, seed)
    kept = {normalise_question(example.question): normalise_question(example.answer or "") for example in (*train, *validation)}
    answers = [(kept[normalise_question(example.question)], normalise_question(example.answer or "")) for example in examples]
    write_file(train_out, _to_jsonl(train))
    write_file(validation_out, _to_jsonl(validation))
    manifest = make_manifest(
        train_out,
        validation_out,
        revision=revision,
        source=Source(file=source.name, sha256=source_hash),
        seed=seed,
        dropped_duplicates=len(examples) - len(train) - len(validation),
    )
    manifest.dropped_contradictions = sum(first != other for first, other in answers)
    manifest.write(manifest_out)
    return manifest


def hold_out(examples: Sequence[Example], size: int | float, seed: int) -> tuple[list[Example], list[Example]]:
    """Two parts without shared questions, each in the order of the examples; of equal questions the first is kept.

    Args:
        examples: All of them.
        size: Questions of the second part: a count (int) or a share of the distinct ones (float); neither part may be empty.
        seed: Another one holds out other questions.
    """
    distinct = list({normalise_question(example.question): example for example in reversed(examples)}.values())
    chosen = {example.id for example in _shuffled(distinct, "split", seed)[: _held_out(size, len(distinct))]}
    kept = {example.id for example in distinct}
    in_order = [example for example in examples if example.id in kept]
    return [example for example in in_order if example.id not in chosen], [example for example in in_order if example.id in chosen]


def make_manifest(
    train_path: Path | str,
    validation_path: Path | str,
    revision: str,
    source: Source | None = None,
    seed: int | None = None,
    dropped_duplicates: int = 0,
) -> Manifest:
    """Pins two existing parts.

    Args:
        train_path: The training part, JSONL.
        validation_path: The held-out part, JSONL.
        revision: The dataset's revision, not empty.
        source: The file they were split from, if there is one.
        seed: Seed of the split or of the generator, if there is one.
        dropped_duplicates: Examples left out because their question repeats an earlier one.

    Raises:
        UsageError: The revision is empty.
        CheckFailed: The parts share a question.
        SdbenchError: A part cannot be used.
    """
    _require_revision(revision)
    train, validation = (load_examples(path, answers=False) for path in (train_path, validation_path))
    _refuse_shared(train, validation)
    return Manifest(
        schema="sdbench.split/1",
        revision=revision,
        source=source,
        seed=seed,
        normalisation=NORMALISATION,
        dropped_duplicates=dropped_duplicates,
        shared_questions=0,
        parts=Parts(train=_part(Path(train_path), train), validation=_part(Path(validation_path), validation)),
    )


def verify_manifest(
    manifest_path: Path | str, train_path: Path | str, validation_path: Path | str | None, dataset_revision: str | None = None
) -> Manifest:
    """Checks the parts of a split against its manifest, before anything else runs.

    Args:
        manifest_path: What ``split`` or ``make_manifest`` wrote.
        train_path: The training part.
        validation_path: The held-out part; None where only the training part is read.
        dataset_revision: The revision that the caller expects; None takes the manifest's.

    Raises:
        CheckFailed: Another revision, a changed file, or a shared question (looked for again, not believed).
        SdbenchError: The manifest or a part cannot be read.
    """
    manifest = read_manifest(manifest_path)
    if dataset_revision is not None and dataset_revision != manifest.revision:
        raise CheckFailed(
            f"{manifest_path} pins dataset revision {manifest.revision!r}, not {dataset_revision!r}; split that revision anew"
        )
    for name, path, part in (("train", train_path, manifest.parts.train), ("validation", validation_path, manifest.parts.validation)):
        if path is None:
            continue
        actual = sha256_of(Path(path))
        if actual != part.sha256:
            raise CheckFailed(
                f"{path} is not the {name} part that {manifest_path} pins: SHA-256 {part.sha256[:12]} expected, {actual[:12]} found; "
                "restore the file or split anew"
            )
    if validation_path is not None:
        _refuse_shared(load_examples(train_path, answers=False), load_examples(validation_path, answers=False))
    return manifest


def read_manifest(path: Path | str) -> Manifest:
    """Reads a manifest without checking its parts.

    Raises:
        SdbenchError: The file is missing or no manifest.
    """
    try:
        return Manifest.model_validate_json(_read(Path(path)))
    except ValidationError as error:
        raise SdbenchError(f"{path} is no sdbench.split/1 manifest ({first_fault(error)}); make one with 'sdbench split'") from error


def refuse_test_name(path: Path) -> None:
    """Refuses a file that its name gives away as a test split.

    Raises:
        UsageError: The name, or that of the file that a link leads to, says test.
    """
    for name in dict.fromkeys((path.name, path.resolve().name)):
        if re.search(r"(?<![a-z])tests?(?![a-z])", Path(name).stem.casefold()):
            raise UsageError(f"{path}: the name {name!r} says test split, which sdbench never reads or writes; use the training split")


def _require_revision(revision: str) -> None:
    if not revision.strip():
        raise UsageError("the dataset revision is empty; give the commit or version that the file came from")


def _refuse_shared(train: Iterable[Example], validation: Iterable[Example]) -> None:
    seen = {normalise_question(example.question): example for example in train}
    shared = [example for example in validation if normalise_question(example.question) in seen]
    if shared:
        first, twin = shared[0], seen[normalise_question(shared[0].question)]
        raise CheckFailed(
            f"train and validation share {counted(len(shared), 'question')}, first {twin.id!r} and {first.id!r}: {first.question[:60]!r}; "
            "split the source anew with 'sdbench split'"
        )


def _parse(line: bytes, where: str, model: type[AnyRecord], form: str) -> AnyRecord:
    try:
        # utf-8-sig: a byte order mark before the first line is no part of its JSON.
        content = json.loads(line.decode("utf-8-sig"), parse_float=str)
        record = model.model_validate(content)
    except ValidationError as error:
        raise SdbenchError(f"{where}: {first_fault(error)}; {form}") from error
    except ValueError as error:
        raise SdbenchError(f"{where}: not JSON in UTF-8 ({error}); {form}") from error
    for name in ("question", "answer"):
        text = getattr(record, name)
        if text is not None and not text.strip():
            raise SdbenchError(f"{where}: {name} is empty; {form}")
    return record


def _held_out(size: int | float, distinct: int) -> int:
    if isinstance(size, float) and not 0 < size < 1:
        raise UsageError(f"validation size {size:g}: give a count such as 200, or a fraction between 0 and 1")
    count = max(1, round(size * distinct)) if isinstance(size, float) else size
    if not 1 <= count < distinct:
        raise UsageError(
            f"validation size {size}: the source has {counted(distinct, 'distinct question')}, and both parts need at least one"
        )
    return count


def _shuffled(examples: Iterable[Example], purpose: str, seed: int) -> list[Example]:
    # Ranked by hash, not by a random generator: nothing depends on file order, library version or platform.
    return sorted(
        examples, key=lambda example: hashlib.sha256(f"{purpose}\n{seed}\n{normalise_question(example.question)}".encode()).digest()
    )


def _to_jsonl(examples: Iterable[Example]) -> str:
    return "".join(strict_json({name: value for name, value in vars(example).items() if value}) + "\n" for example in examples)


def _part(path: Path, examples: Sequence[Example]) -> Part:
    return Part(file=path.name, sha256=sha256_of(path), examples=len(examples))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal.

    Raises:
        SdbenchError: The file cannot be read.
    """
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise cannot_read(path, error) from error
