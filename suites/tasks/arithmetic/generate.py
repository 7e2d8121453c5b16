"""Generated arithmetic word problems with written-out steps; run as a module, it rewrites the bundled parts.

A problem is a story about one running total: an opening, then events, two to four operations in all. The answer works out one operation
a line and ends in `#### N`. Amounts stay between 1 and 999, multipliers and divisors between 2 and 9, and divisions are exact.
"""

import json
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from sdbench.suites.tasks.arithmetic import MANIFEST_FILE, TRAIN_FILE, VALIDATION_FILE
from sdbench.suites.tasks.arithmetic.stories import FAMILIES, NAMES

REVISION = "arithmetic-1"
"""Of the bundled parts; a change to any problem makes a new one."""
PARTS = {TRAIN_FILE: 400, VALIDATION_FILE: 200}
PART_SEED = 20261129
LARGEST = 999
"""The largest amount in any problem."""


@dataclass(frozen=True)
class Problem:
    """A question, its worked answer, and the operations it takes, in order."""

    question: str
    answer: str
    operations: str


def normalise(question: str) -> str:
    """The form in which two questions are the same: what `suites.data` compares, spared its Unicode work for these ASCII texts."""
    return " ".join(question.lower().split())


def _operand(op: str, total: int, rng: random.Random) -> int | None:
    """An operand for `total op n` that keeps to the ranges; None if there is none."""
    if op == "+":
        high = min(99, LARGEST - total)
        return rng.randint(2, high) if high >= 2 else None
    if op == "-":
        high = min(99, total - 1)
        return rng.randint(2, high) if high >= 2 else None
    factors = range(2, 10)
    fitting = [n for n in factors if total * n <= LARGEST] if op == "x" else [n for n in factors if total % n == 0]
    return rng.choice(fitting) if fitting else None


def _apply(op: str, left: int, right: int) -> int:
    return {"+": left + right, "-": left - right, "x": left * right, "/": left // right}[op]


def make_problem(rng: random.Random) -> Problem:
    """Draw one problem.

    Args:
        rng: The only source of chance: the same state gives the same problem.
    """
    family = FAMILIES[rng.choice(list(FAMILIES))]
    who, friend = rng.sample(NAMES, 2)
    names = {"who": who, "friend": friend, "item": rng.choice(family.items)}
    length = rng.randint(2, 4)
    sentences: list[str] = []
    steps: list[str] = []
    operations = ""

    def work_out(step: str, op: str, left: int, right: int) -> int:
        nonlocal operations
        operations += op
        result = _apply(op, left, right)
        steps.append(step.format(eq=f"{left} {op} {right} = {result}", **names))
        return result

    opening = rng.choice(("start", "groups", "second")) if length > 2 else rng.choice(("start", "groups"))
    if opening == "start":
        total = rng.randint(5, 99)
        sentences.append(rng.choice(family.start).format(a=total, **names))
    else:
        a, b = rng.randint(2, 9), rng.randint(3, 40)
        sentences.append(family.groups.format(a=a, b=b, **names))
        total = work_out(family.group_step, "x", a, b)
        if opening == "second":
            c, d = rng.randint(2, 9), rng.randint(3, 40)
            sentences.append(family.second.format(c=c, d=d, **names))
            total = work_out(family.second_steps[1], "+", total, work_out(family.second_steps[0], "x", c, d))

    last = None
    while len(operations) < length:
        op = rng.choice("+-x/")
        event = rng.choice([event for event in family.events if event.op == op])
        n = None if event is last else _operand(event.op, total, rng)
        if n is not None:
            sentences.append(event.text.format(n=n, **names))
            total = work_out(event.step, event.op, total, n)
            last = event

    sentences.append(rng.choice(family.questions).format(**names))
    return Problem(" ".join(sentences), "\n".join([*steps, f"#### {total}"]), operations)


def problems(seed: int, exclude: Collection[str] = frozenset()) -> Iterator[Problem]:
    """Draw problems without end.

    Args:
        seed: Of the stream.
        exclude: Normalised questions that must not appear.
    """
    rng = random.Random(seed)
    while True:
        problem = make_problem(rng)
        if normalise(problem.question) not in exclude:
            yield problem


def make_parts() -> dict[Path, list[dict[str, str]]]:
    """The bundled parts, by file: records with `id`, `question` and `answer`, and no question twice in either or both."""
    seen: set[str] = set()
    stream = problems(PART_SEED, exclude=seen)
    parts: dict[Path, list[dict[str, str]]] = {}
    for path, size in PARTS.items():
        parts[path] = []
        for number in range(1, size + 1):
            problem = next(stream)
            seen.add(normalise(problem.question))
            parts[path].append({"id": f"{path.stem}-{number:04d}", "question": problem.question, "answer": problem.answer})
    return parts


def reserved_questions() -> frozenset[str]:
    """The normalised questions of the bundled parts, which no training stream may contain."""
    return frozenset(normalise(record["question"]) for part in make_parts().values() for record in part)


def main() -> None:
    """Rewrite `train.jsonl`, `validation.jsonl` and the manifest that pins them."""
    # Here, so that training needs nothing installed but torch and transformers.
    from sdbench.suites.data import make_manifest

    for path, records in make_parts().items():
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    make_manifest(TRAIN_FILE, VALIDATION_FILE, revision=REVISION, seed=PART_SEED).write(MANIFEST_FILE)


if __name__ == "__main__":
    main()
