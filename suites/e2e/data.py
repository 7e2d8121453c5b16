"""The questions of a run: verified against their manifest before anything loads, then drawn and tokenised."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from sdbench.errors import UsageError
from sdbench.models import LoadedModel
from sdbench.prompts import encode_question, encode_reference
from sdbench.suites.corpus import read_corpus, windows
from sdbench.suites.data import Example, hold_out, load_examples, select, verify_manifest
from sdbench.suites.e2e.options import CalibrationOptions, E2EOptions
from sdbench.suites.grading import require_number
from sdbench.suites.replies import RepliedExample, load_replies
from sdbench.suites.tasks.records import HOLDOUT_SEED, load_records
from sdbench.suites.tasks.registry import grading_of
from sdbench.suites.tasks.sandbox import require_sandbox


@dataclass(frozen=True)
class Question:
    """One tokenised example.

    Attributes:
        id: The example's id.
        prompt: Token ids that the model sees: the question alone.
        reference: Token ids of the reference answer, for fixed-text calibration; empty without one.
        example: What it was made of, for the grader; None where nothing can be graded.
        window: Token ids of a window of the calibration text; empty without one.
        reply: Token ids of the model's own reply, where a file gives it.
    """

    id: str
    prompt: tuple[int, ...]
    reference: tuple[int, ...]
    example: Example | None
    window: tuple[int, ...] = ()
    reply: tuple[int, ...] = ()

    @property
    def prompt_hash(self) -> str:
        """SHA-256 of the prompt's ids, shortened to 16 digits."""
        return hashlib.sha256(",".join(map(str, self.prompt)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Examples:
    """Drawn examples of both parts, before the model is there to tokenise them."""

    calibration: list[Example]
    validation: list[Example]


def load(options: E2EOptions) -> Examples | None:
    """Reads the task's data, verifies it where it is pinned, and draws both parts; None for a random model, which has nothing to answer.

    Raises:
        UsageError: More examples were asked for than there are.
        CheckFailed: A file or revision differs from the manifest.
        SdbenchError: A file cannot be read, or generated code is to run and cannot be locked away.
    """
    if options.spec.kind == "random":
        return None
    if options.allow_code_execution:
        require_sandbox()
    calibration, validation = _parts(options, options.validation)
    judged = select(validation.examples, options.validation_examples, options.seed, "--validation-examples", validation.file)
    for example in judged if options.task.grader == "number" else ():
        require_number(example.answer or "", f"example {example.id}: ")
    return Examples(_draw(options, calibration), judged)


def load_calibration(options: CalibrationOptions) -> list[Example] | None:
    """The calibration examples of a run that judges nothing.

    Raises:
        UsageError: More examples were asked for than there are.
        CheckFailed: A file or revision differs from the manifest.
        SdbenchError: A file cannot be read.
    """
    if options.spec.kind == "random":
        return None
    return _draw(options, _Part(load_replies(options.replies), options.replies) if options.replies else _parts(options, None)[0])


class _Part(NamedTuple):
    """Examples to draw from, and the file that they come from."""

    examples: Sequence[Example]
    file: Path | None


def _draw(options: CalibrationOptions, part: _Part) -> list[Example]:
    if options.choices.text:
        # A file that is no corpus is told before the model loads.
        read_corpus(options.choices.text, options.seed)
    return select(part.examples, options.calibration_examples, options.seed, "--calibration-examples", part.file)


def _parts(options: CalibrationOptions, validation: Path | None) -> tuple[_Part, _Part]:
    """Examples to calibrate on and to judge: of two files that a manifest pins, or of one, from which the second part is held out."""
    task, train, manifest = options.task, options.train, options.split_manifest
    if options.data:
        if options.dataset_revision is not None:
            raise UsageError("--dataset-revision is checked against a manifest; leave it out, or split --data with 'sdbench split'")
        train_part, held_out = hold_out(load_records(task, options.data), task.holdout, HOLDOUT_SEED)
        return _Part(train_part, options.data), _Part(held_out, options.data)
    if train is None and task.bundled:
        train, manifest = task.folder / task.bundled.train, task.folder / task.bundled.manifest
        validation = task.folder / task.bundled.validation
    assert train is not None and manifest is not None
    verify_manifest(manifest, train, validation, options.dataset_revision)
    answers = task.reference is not None
    examples = load_examples(validation, answers) if validation else []
    for example in examples:
        grading_of(task, example.grading, f"{validation}, {example.id}: grading")
    return _Part(load_examples(train, answers), train), _Part(examples, validation)


def calibration_questions(options: CalibrationOptions, examples: Sequence[Example] | None, loaded: LoadedModel) -> list[Question]:
    """The drawn examples as the model reads them, each with its window of the calibration text if there is one; random ids for a random
    model.

    Raises:
        UsageError: The chat template doesn't fit, or the calibration text is too short.
        SdbenchError: A reply that was given is none of this model.
    """
    if examples is None:
        reply = options.max_tokens
        return random_questions(options.calibration_examples, options.prompt_tokens, reply, loaded, "calibration", options.seed)
    questions = [
        replace(question, reply=question.example.reply.tokens(len(question.prompt), loaded, options.max_tokens))
        if isinstance(question.example, RepliedExample)
        else question
        for question in tokenise(examples, loaded)
    ]
    if not options.choices.text:
        return questions
    cut = windows(read_corpus(options.choices.text, options.seed), loaded.tokenizer, len(questions), options.choices.window)
    return [replace(question, window=window) for question, window in zip(questions, cut, strict=True)]


def tokenise(examples: Sequence[Example], loaded: LoadedModel) -> list[Question]:
    """Prompts by the chat template; the answer's ids are kept apart."""
    questions = []
    for example in examples:
        prompt = encode_question(loaded.tokenizer, example.question)
        full = encode_reference(loaded.tokenizer, example.question, example.answer) if example.answer is not None else prompt
        if full[: len(prompt)] != prompt:
            raise UsageError(f"example {example.id}: the chat template does not continue its own prompt; use another model or template")
        questions.append(Question(example.id, tuple(prompt), tuple(full[len(prompt) :]), example))
    return questions


def random_questions(count: int, prompt_tokens: int, reply_tokens: int, loaded: LoadedModel, prefix: str, seed: int) -> list[Question]:
    """Random ids in place of text: speed does not depend on what a random model reads."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    drawn = torch.randint(0, vocabulary, (count, prompt_tokens + reply_tokens), generator=generator).tolist()
    return [Question(f"{prefix}-{i + 1}", tuple(ids[:prompt_tokens]), tuple(ids[prompt_tokens:]), None) for i, ids in enumerate(drawn)]
