"""The questions of a run: verified against their manifest before anything loads, then drawn and tokenised."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sdbench.errors import UsageError
from sdbench.models import LoadedModel, encode_question, encode_reference
from sdbench.suites.data import Example, load_examples, select, verify_manifest
from sdbench.suites.e2e.options import E2EOptions
from sdbench.suites.tasks import arithmetic


@dataclass(frozen=True)
class Question:
    """One tokenised example.

    Attributes:
        id: The example's id.
        prompt: Token ids that the model sees: the question alone.
        reference: Token ids of the reference answer, for fixed-text calibration.
        gold: The reference answer, for the grader; None where nothing can be graded.
    """

    id: str
    prompt: tuple[int, ...]
    reference: tuple[int, ...]
    gold: str | None

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
    """
    if options.spec.kind == "random":
        return None
    train = options.train or arithmetic.TRAIN_FILE
    validation = options.validation or arithmetic.VALIDATION_FILE
    manifest = options.split_manifest or arithmetic.MANIFEST_FILE
    verify_manifest(manifest, train, validation, options.dataset_revision)
    return Examples(
        select(load_examples(train), options.calibration_examples, options.seed),
        select(load_examples(validation), options.validation_examples, options.seed),
    )


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


def random_questions(count: int, prompt_tokens: int, reply_tokens: int, vocabulary: int, prefix: str, seed: int) -> list[Question]:
    """Random ids in place of text: speed does not depend on what a random model reads."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, vocabulary, (count, prompt_tokens + reply_tokens), generator=generator).tolist()
    return [Question(f"{prefix}-{i + 1}", tuple(ids[:prompt_tokens]), tuple(ids[prompt_tokens:]), None) for i, ids in enumerate(drawn)]
