"""Judging one arm: answer runs, graded, and rate runs of equal length, timed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdbench.engine.decoders import Decoder
from sdbench.engine.greedy import Reply
from sdbench.models import LoadedModel
from sdbench.progress import Task
from sdbench.results import RunDirectory
from sdbench.suites.e2e.data import Question
from sdbench.suites.metrics import decode_rate
from sdbench.suites.tasks.graders import Grade, Grader, to_grade_again

THINK = "<think>"


class Journal:
    """Finished records of a run, in its directory where there is one.

    Args:
        directory: The run directory, or None to keep records in memory alone.

    Attributes:
        path: The run directory's folder, or None.
    """

    def __init__(self, directory: RunDirectory | None):
        self._directory = directory
        self.path = directory.path if directory else None
        self.rows: list[dict[str, Any]] = directory.rows if directory else []
        self.samples: list[dict[str, Any]] = directory.samples if directory else []

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Records one measurement."""
        if self._directory:
            self._directory.add_row(row)
        else:
            self.rows.append(dict(row))

    def add_sample(self, sample: Mapping[str, Any]) -> None:
        """Records one example of one arm."""
        if self._directory:
            self._directory.add_sample(sample)
        else:
            self.samples.append(dict(sample))


@dataclass(frozen=True)
class Calls:
    """Rows of one reply's decode steps that came through packed weights, counted and expected; not launches, which several may share."""

    counted: int
    expected: int


@dataclass(frozen=True)
class Contender:
    """One arm, ready to decode.

    Attributes:
        arm: Its name.
        loaded: The model, packed linears in place.
        decoder: What decodes.
        path: Name of that, for the row.
    """

    arm: str
    loaded: LoadedModel
    decoder: Decoder
    path: str

    def reply(self, prompt: Sequence[int], max_new_tokens: int, *, ignore_eos: bool) -> tuple[Reply, Calls]:
        """One greedy reply at batch 1, with the rows that came through packed weights beside those that must: products x decode steps."""
        before = self.decoder.calls
        reply = self.decoder.reply(prompt, max_new_tokens=max_new_tokens, eos_ids=self.loaded.eos_ids, ignore_eos=ignore_eos)
        return reply, Calls(self.decoder.calls - before, self.decoder.pruned_products * reply.decode_steps)


def answer_runs(
    contender: Contender, questions: Sequence[Question], max_tokens: int, grader: Grader, journal: Journal, task: Task
) -> list[dict[str, Any]]:
    """Answers and grades each question, EOS honoured; questions that the journal holds already are not asked again.

    Returns:
        The arm's samples, in the order of the questions.
    """
    arm, loaded = contender.arm, contender.loaded
    done = {sample["example"]: sample for sample in journal.samples if sample["arm"] == arm}
    for question in questions:
        kept = done.get(question.id)
        if kept is None:
            done[question.id] = _answer(contender, question, max_tokens, grader)
            journal.add_sample(done[question.id])
        elif question.example and to_grade_again(kept):
            done[question.id] = {**kept, **grader(_spoken(loaded, question, kept["text"]), question.example).as_dict()}
            journal.add_sample(done[question.id])
        task.advance()
    return [done[question.id] for question in questions]


def _answer(contender: Contender, question: Question, max_tokens: int, grader: Grader) -> dict[str, Any]:
    reply, calls = contender.reply(question.prompt, max_tokens, ignore_eos=False)
    text = contender.loaded.tokenizer.decode(reply.ids, skip_special_tokens=True)
    grade = grader(_spoken(contender.loaded, question, text), question.example) if question.example else Grade(None, None)
    return {
        "arm": contender.arm,
        "example": question.id,
        "prompt_hash": question.prompt_hash,
        "prompt_tokens": len(question.prompt),
        "ids": list(reply.ids),
        "text": text,
        **grade.as_dict(),
        "eos": reply.eos,
        "truncated": reply.truncated,
        "tokens": len(reply.ids),
        "prefill_seconds": reply.prefill_seconds,
        "decode_seconds": reply.decode_seconds,
        "kernel_calls": calls.counted,
        "expected_kernel_calls": calls.expected,
    }


def _spoken(loaded: LoadedModel, question: Question, text: str) -> str:
    """A reply with the start of its thoughts, which the chat templates of some reasoning models put into the prompt."""
    opened = loaded.tokenizer.decode(question.prompt[-4:]).rstrip().endswith(THINK)
    return THINK + text if opened else text


def rate_runs(
    contender: Contender, prompt: Sequence[int], *, equal_tokens: int, warmup_tokens: int, repeats: int, journal: Journal, task: Task
) -> list[dict[str, Any]]:
    """Decodes exactly ``equal_tokens`` several times, EOS ignored; the warm-up before is not timed.

    Returns:
        One row a repeat, with its decode rate in tokens a second.
    """
    if warmup_tokens:
        contender.reply(prompt, warmup_tokens, ignore_eos=True)
    rows = []
    for repeat in range(repeats):
        reply, calls = contender.reply(prompt, equal_tokens, ignore_eos=True)
        row = {
            "record": "rate",
            "arm": contender.arm,
            "path": contender.path,
            "repeat": repeat,
            "tokens": len(reply.ids),
            "prefill_seconds": reply.prefill_seconds,
            "decode_seconds": reply.decode_seconds,
            "decode_rate": decode_rate(len(reply.ids), reply.decode_seconds),
            "kernel_calls": calls.counted,
            "expected_kernel_calls": calls.expected,
        }
        journal.add_row(row)
        rows.append(row)
        task.advance()
    return rows
