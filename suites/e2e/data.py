"""The questions of a run: verified against their manifest before anything loads, then drawn and tokenised."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sdbench.errors import UsageError
from sdbench.models import LoadedModel, encode_question, encode_reference
from sdbench.suites.corpus import read_corpus, windows
from sdbench.suites.data import Example, load_examples, select, verify_manifest
from sdbench.suites.e2e.options import CalibrationOptions, E2EOptions
from sdbench.suites.tasks import arithmetic


@dataclass(frozen=True)
class Question:
    """One tokenised example.

    Attributes:
        id: The example's id.
        prompt: Token ids that the model sees: the question alone.
        reference: Token ids of the reference answer, for fixed-text calibration.
        gold: The reference answer, for the grader; None where nothing can be graded.
        window: Token ids of a window of the calibration text; empty without one.
    """

    id: str
    prompt: tuple[int, ...]
    reference: tuple[int, ...]
    gold: str | None
    window: tuple[int, ...] = ()

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
    """Verifies the manifest and draws both parts; None for a random model, which has nothing to answer.

    Raises:
        UsageError: More examples were asked for than there are.
        CheckFailed: A file or revision differs from the manifest.
        SdbenchError: A file cannot be read.
    """
    validation = options.validation or arithmetic.VALIDATION_FILE
    calibration = load_calibration(options, validation)
    if calibration is None:
        return None
    return Examples(calibration, select(load_examples(validation), options.validation_examples, options.seed))


def load_calibration(options: CalibrationOptions, validation: Path | None = None) -> list[Example] | None:
    """Verifies the manifest, draws the calibration examples and looks at the calibration text; None for a random model.

    Args:
        options: The run.
        validation: The part that is judged, where there is one: it is verified too.

    Raises:
        UsageError: More examples were asked for than there are.
        CheckFailed: A file or revision differs from the manifest.
        SdbenchError: A file cannot be read.
    """
    if options.spec.kind == "random":
        return None
    train = options.train or arithmetic.TRAIN_FILE
    if options.choices.text:
        # A file that is no corpus is told before the model loads.
        read_corpus(options.choices.text, options.seed)
    verify_manifest(options.split_manifest or arithmetic.MANIFEST_FILE, train, validation, options.dataset_revision)
    return select(load_examples(train), options.calibration_examples, options.seed)


def calibration_questions(options: CalibrationOptions, examples: Sequence[Example] | None, loaded: LoadedModel) -> list[Question]:
    """The drawn examples as the model reads them, each with its window of the calibration text if there is one; random ids for a random
    model.

    Raises:
        UsageError: The chat template doesn't fit, or the calibration text is too short.
    """
    if examples is None:
        reply = options.max_tokens
        return random_questions(options.calibration_examples, options.prompt_tokens, reply, loaded, "calibration", options.seed)
    questions = tokenise(examples, loaded)
    if not options.choices.text:
        return questions
    cut = windows(read_corpus(options.choices.text, options.seed), loaded.tokenizer, len(questions), options.choices.window)
    return [replace(question, window=window) for question, window in zip(questions, cut, strict=True)]


def tokenise(examples: Sequence[Example], loaded: LoadedModel) -> list[Question]:
    """Prompts by the chat template; the answer's ids are kept apart."""
    questions = []
    for example in examples:
        prompt = encode_question(loaded.tokenizer, example.question)
        full = encode_reference(loaded.tokenizer, example.question, example.answer)
        if full[: len(prompt)] != prompt:
            raise UsageError(f"example {example.id}: the chat template does not continue its own prompt; use another model or template")
        questions.append(Question(example.id, tuple(prompt), tuple(full[len(prompt) :]), example.answer))
    return questions


def random_questions(count: int, prompt_tokens: int, reply_tokens: int, loaded: LoadedModel, prefix: str, seed: int) -> list[Question]:
    """Random ids in place of text: speed does not depend on what a random model reads."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    drawn = torch.randint(0, vocabulary, (count, prompt_tokens + reply_tokens), generator=generator).tolist()
    return [Question(f"{prefix}-{i + 1}", tuple(ids[:prompt_tokens]), tuple(ids[prompt_tokens:]), None) for i, ids in enumerate(drawn)]
