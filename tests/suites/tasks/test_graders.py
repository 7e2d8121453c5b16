"""What each task's grader says of a reply."""

from typing import Any

import pytest

from sdbench.suites.data import Example
from sdbench.suites.tasks import graders
from sdbench.suites.tasks.endpoint import Judge
from sdbench.suites.tasks.graders import NO_JUDGE, NOT_ALLOWED, extract_class, make_grader, to_grade_again
from sdbench.suites.tasks.registry import find_task
from sdbench.suites.tasks.sandbox import Limits, why_not

SUM = Example("s", "1 + 1?", "1 + 1 = 2\n#### 2")
GRADING: dict[str, Any] = {
    "class_name": "Plum",
    "import_statement": ["import math"],
    "test": "import unittest\nclass T(unittest.TestCase):\n    def test_one(self): self.assertEqual(Plum().eat(), 1)",
    "test_classes": ["T"],
}
PLUM = Example("p", "Write Plum.", "```python\nclass Plum:\n    def eat(self): return 1\n```", GRADING)
BROKEN = Example("b", "Write Plum.", "```python\nclass Plum:\n    def eat(self): return 2\n```", GRADING)
TALK = Example("t", "Write.", None, {"checklist": [{"name": "length"}]})

locked = pytest.mark.skipif(why_not() is not None, reason=f"no code can be locked away here: {why_not()}")


def test_numbers() -> None:
    grade = make_grader(find_task("gsm8k"))
    assert grade("<think>3</think>It is 2.", SUM).as_dict() == {"extracted": "2", "match": True}
    assert grade("It is 3.", SUM).as_dict() == {"extracted": "3", "match": False}
    assert grade("<think>It is 2", SUM).as_dict() == {"extracted": None, "match": False}


def test_without_answers_nothing_is_right_or_wrong() -> None:
    found = make_grader(find_task("fidelity"))("2", Example("f", "a", None)).as_dict()
    assert found == {"extracted": None, "match": None, "match_reason": "this task has no answers"}


class TestClasses:
    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ("Here:\n```python\nclass Plum: ...\n```\nDone.", "class Plum: ...\n"),
            ("```\nx = 1\n```\n```py\nclass Plum: ...\n```\n```\nPlum()\n```", "class Plum: ...\n"),
            ("```python\nclass Plum: a\n```\nBetter:\n```python\nclass Plum(object): b\n```", "class Plum(object): b\n"),
            ("```python\nclass Plum:\n    def eat(self):", "class Plum:\n    def eat(self):"),  # cut off
            ("class Plum: ...", "class Plum: ..."),
            ("<think>```python\nclass Plum: a\n```</think>```python\nclass Plum: b\n```", "class Plum: b\n"),
            ("<think>```python\nclass Plum: a\n```", None),
            ("```python\nclass Plums: ...\n```", None),
            ("I would call the class Plum.", None),
            ("", None),
        ],
    )
    def test_the_last_block_that_defines_the_class(self, text: str, code: str | None) -> None:
        assert extract_class(text, "Plum") == code

    def test_without_leave_nothing_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graders, "execute", None)
        found = make_grader(find_task("classeval"))(PLUM.answer or "", PLUM).as_dict()
        assert (found["match"], found["match_reason"], found["execution"]["outcome"]) == (None, NOT_ALLOWED, "not_run")

    @locked
    @pytest.mark.parametrize(
        ("text", "match", "outcome"),
        [
            ("```python\nclass Plum:\n    def eat(self): return math.ceil(0.5)\n```", True, "passed"),
            ("```python\nclass Plum:\n    def eat(self): return 3\n```", False, "failed"),
            ("```python\nclass Plum\n```", False, "error"),
            ("I cannot.", False, "error"),
            ("```python\nclass Plum:\n    def eat(self):\n        while True: pass\n```", False, "timeout"),
        ],
    )
    def test_outcomes(self, text: str, match: bool, outcome: str) -> None:
        found = make_grader(find_task("classeval"), allow_code=True, limits=Limits(seconds=4))(text, PLUM).as_dict()
        assert (found["match"], found["execution"]["outcome"]) == (match, outcome)

    @locked
    def test_a_task_whose_own_solution_fails_here_says_nothing(self) -> None:
        """Its reply would pass: it is not run all the same, since the task's figures are not to be trusted on this machine."""
        found = make_grader(find_task("classeval"), allow_code=True)(PLUM.answer or "", BROKEN).as_dict()
        assert (found["match"], found["execution"]["outcome"]) == (None, "not_run")
        assert found["match_reason"] == "the task's own solution does not pass here: T.test_one: AssertionError: 2 != 1"


class TestTexts:
    def test_without_a_judge(self) -> None:
        found = make_grader(find_task("writingbench"))("Plums.", TALK).as_dict()
        assert (found["match"], found["score"], found["score_reason"]) == (None, None, NO_JUDGE)
        assert not to_grade_again(found)

    def test_the_judge_reads_no_thoughts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []
        monkeypatch.setattr(Judge, "score", lambda self, *what: asked.append(what) or (7.5, None))
        found = make_grader(find_task("writingbench"), judge=Judge("http://a", "m"))("<think>Hm.</think>Plums.", TALK).as_dict()
        assert asked == [("Write.", "Plums.", [{"name": "length"}])]
        assert (found["score"], found["score_reason"], to_grade_again(found)) == (7.5, None, False)
        monkeypatch.setattr(Judge, "score", lambda self, *what: (None, "HTTP 500"))
        assert to_grade_again(make_grader(find_task("writingbench"), judge=Judge("http://a", "m"))("Plums.", TALK).as_dict())

    def test_samples_of_other_tasks_are_never_graded_again(self) -> None:
        assert not to_grade_again({"match": False})
