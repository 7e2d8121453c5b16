"""What judges a reply, by task: its number, its class under unit tests, a judge model, or nothing."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sdbench.suites.data import Example
from sdbench.suites.grading import after_reasoning, extract_answer, is_match
from sdbench.suites.tasks.endpoint import KEY_VARIABLE, Judge
from sdbench.suites.tasks.registry import Task
from sdbench.suites.tasks.sandbox import Execution, Limits, execute

NOT_ALLOWED = "generated code is run with --allow-code-execution alone"
NO_JUDGE = f"no judge: give --judge-url and --judge-model (and a key in ${KEY_VARIABLE})"
NO_ANSWERS = "this task has no answers"

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Grade:
    """What was found of one reply.

    Attributes:
        extracted: The answer that the reply gives, as it was read without the reference.
        match: Whether it is right; None where that was not judged.
        reason: Why ``match`` is None.
        more: Further fields of the sample.
    """

    extracted: str | None
    match: bool | None
    reason: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Fields of a sample."""
        return {"extracted": self.extracted, "match": self.match} | ({"match_reason": self.reason} if self.reason else {}) | dict(self.more)


Grader = Callable[[str, Example], Grade]


def make_grader(task: Task, allow_code: bool = False, judge: Judge | None = None, limits: Limits | None = None) -> Grader:
    """What grades the replies of a task.

    Args:
        task: Which.
        allow_code: Run generated code.
        judge: Who scores texts; None leaves scores out.
        limits: Of generated code.
    """
    if task.grader == "number":
        return _by_number
    if task.grader == "unit-tests":
        return _ByTests(limits) if allow_code else lambda text, example: _tested(text, example, Execution("not_run", NOT_ALLOWED))
    if task.grader == "judge":
        return lambda text, example: _by_judge(text, example, judge)
    return lambda text, example: Grade(None, None, NO_ANSWERS)


def to_grade_again(sample: Mapping[str, Any]) -> bool:
    """Whether a sample of an earlier attempt lacks a score that its judge failed to give."""
    return sample.get("score", 0.0) is None and sample["score_reason"] != NO_JUDGE


def extract_class(text: str, name: str) -> str | None:
    """The code of a reply that defines a class.

    Args:
        text: The reply; of a reasoning model only what follows its thoughts is read.
        name: The class.

    Returns:
        The last code block that defines it, up to its end or that of the text; else the whole text if that does; else None.
    """
    reply = after_reasoning(text)
    defines = re.compile(rf"^[ \t]*class[ \t]+{re.escape(name)}\b", re.MULTILINE)
    blocks = [block for block in _FENCE.findall(reply) if defines.search(block)]
    if blocks:
        return str(blocks[-1])
    return reply if defines.search(reply) and "```" not in reply else None


def _by_number(text: str, example: Example) -> Grade:
    return Grade(extract_answer(text), is_match(text, example.answer or ""))


class _ByTests:
    """Runs a reply's class; a task whose own solution does not pass on this machine says nothing about a reply, and is not run."""

    def __init__(self, limits: Limits | None):
        self.limits = limits
        self.faults: dict[str, str | None] = {}

    def __call__(self, text: str, example: Example) -> Grade:
        if example.id not in self.faults:
            done = self._run(example.answer or "", example)
            self.faults[example.id] = None if done.outcome == "passed" else done.reason
        if fault := self.faults[example.id]:
            return _tested(text, example, Execution("not_run", f"the task's own solution does not pass here: {fault}"))
        return _tested(text, example, self._run(text, example))

    def _run(self, text: str, example: Example) -> Execution:
        job = example.grading
        code = extract_class(text, job["class_name"])
        if code is None:
            return Execution("error", f"the reply holds no code that defines class {job['class_name']}")
        return execute(code, job["class_name"], job["test"], job["test_classes"], "\n".join(job["import_statement"]), self.limits)


def _tested(text: str, example: Example, done: Execution) -> Grade:
    match = None if done.outcome == "not_run" else done.outcome == "passed"
    code = extract_class(text, example.grading["class_name"])
    return Grade(code, match, done.reason if match is None else None, {"execution": done.as_dict()})


def _by_judge(text: str, example: Example, judge: Judge | None) -> Grade:
    score, reason = judge.score(example.question, after_reasoning(text), example.grading["checklist"]) if judge else (None, NO_JUDGE)
    return Grade(None, None, NO_ANSWERS, {"score": score, "score_reason": reason})
