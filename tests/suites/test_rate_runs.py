"""Rate runs: what is timed and what is not."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sdbench.engine.greedy import Reply
from sdbench.progress import Progress
from sdbench.suites.e2e.judge import Contender, Journal, rate_runs


class Slow:
    """A decoder whose first reply takes 10 s a step, and every other one 1 s."""

    pruned_products, calls, variants = 0, 0, ()

    def __init__(self) -> None:
        self.asked: list[int] = []

    def reply(self, prompt: Sequence[int], *, max_new_tokens: int, **others: Any) -> Reply:
        seconds = 1.0 if self.asked else 10.0
        self.asked.append(max_new_tokens)
        return Reply(tuple(range(max_new_tokens)), False, False, max_new_tokens - 1, 0.5, seconds * (max_new_tokens - 1))


def test_a_slow_first_call_is_warm_up() -> None:
    """CASES 18: 1 s a step, not 10 and not a mean of both."""
    decoder: Any = Slow()
    loaded: Any = SimpleNamespace(eos_ids=())
    with Progress() as progress, progress.task("rate", 3) as task:
        contender = Contender("dense", loaded, decoder, "eager")
        rows = rate_runs(contender, [1], equal_tokens=5, warmup_tokens=2, repeats=3, journal=Journal(None), task=task)
    assert decoder.asked == [2, 5, 5, 5]
    assert [row["decode_rate"] for row in rows] == [1.0, 1.0, 1.0]
