import json
import random
import re
import statistics
from itertools import islice

import pytest

from sdbench.suites.data import normalise_question, verify_manifest
from sdbench.suites.tasks.arithmetic import MANIFEST_FILE, TRAIN_FILE, VALIDATION_FILE
from sdbench.suites.tasks.arithmetic.generate import make_parts, make_problem, normalise, problems, reserved_questions
from sdbench.suites.tasks.arithmetic.stories import FAMILIES, NAMES

EQUATION = re.compile(r"(\d+) ([-+x/]) (\d+) = (\d+)")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def sample():
    return list(islice(problems(7), 3000))


def test_a_seed_decides_the_problem():
    problem = make_problem(random.Random(0))
    assert problem == make_problem(random.Random(0))
    assert problem != make_problem(random.Random(1))


def test_every_step_is_right_and_in_range(sample):
    for problem in sample:
        *steps, last = problem.answer.split("\n")
        assert len(steps) == len(problem.operations)
        for step, operation in zip(steps, problem.operations, strict=True):
            [(left, op, right, result)] = EQUATION.findall(step)
            left, right, result = int(left), int(right), int(result)
            assert op == operation
            if op == "/":
                assert left == result * right
            else:
                assert result == {"+": left + right, "-": left - right, "x": left * right}[op]
            assert 1 <= left <= 999 and 1 <= result <= 999 and 2 <= right <= 999
        assert last == f"#### {result}"


def test_operations_are_two_to_four_and_of_all_four_kinds(sample):
    assert {len(problem.operations) for problem in sample} == {2, 3, 4}
    shares = {op: sum(op in problem.operations for problem in sample) / len(sample) for op in "+-x/"}
    assert min(shares.values()) > 0.2, shares


def test_a_step_only_uses_numbers_that_are_given_or_worked_out(sample):
    for problem in sample:
        known = set(re.findall(r"\d+", problem.question))
        for left, _, right, result in EQUATION.findall(problem.answer):
            assert {left, right} <= known
            known.add(result)


def test_names_in_the_answer_are_in_the_question(sample):
    """Nothing in an answer has to be guessed."""
    for problem in sample:
        told = set(re.findall(r"[A-Z]\w+", problem.question))
        assert set(re.findall(r"[A-Z]\w+", problem.answer)) & set(NAMES) <= told


def test_eight_families_or_more_all_of_them_drawn(sample):
    assert len(FAMILIES) >= 8
    questions = " ".join(problem.question for problem in sample)
    for family in FAMILIES.values():
        assert any(question.split("{")[0] in questions for question in family.questions)
        assert {event.op for event in family.events} == set("+-x/")


def test_bundled_parts_are_what_the_generator_writes():
    parts = make_parts()
    assert read(TRAIN_FILE) == parts[TRAIN_FILE]
    assert read(VALIDATION_FILE) == parts[VALIDATION_FILE]


def test_bundled_parts_have_ids_in_order_and_no_shared_question():
    train, validation = read(TRAIN_FILE), read(VALIDATION_FILE)
    assert [record["id"] for record in train] == [f"train-{number:04d}" for number in range(1, 401)]
    assert [record["id"] for record in validation] == [f"validation-{number:04d}" for number in range(1, 201)]
    assert len({normalise_question(record["question"]) for record in train + validation}) == 600


def test_replies_are_long_enough_for_decode_calibration():
    words = [len(re.findall(r"\d|[^\s\d]+", record["answer"])) for record in read(VALIDATION_FILE)]
    assert statistics.median(words) >= 30


def test_manifest_pins_the_parts():
    assert verify_manifest(MANIFEST_FILE, TRAIN_FILE, VALIDATION_FILE).revision == "arithmetic-1"


def test_normalise_is_that_of_the_splits(sample):
    for problem in sample:
        question = problem.question.replace(" ", "\n ")
        assert question.isascii()
        assert normalise(question) == normalise_question(question)


def test_excluded_questions_are_skipped():
    first, second, third = islice(problems(3), 3)
    assert list(islice(problems(3, {normalise_question(second.question.upper())}), 2)) == [first, third]


def test_reserved_questions_are_those_of_the_files():
    assert reserved_questions() == {
        normalise_question(record["question"]) for path in (TRAIN_FILE, VALIDATION_FILE) for record in read(path)
    }
