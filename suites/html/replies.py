"""Some replies of an end-to-end run, side by side: questions on which the arms disagree first."""

from collections.abc import Sequence
from dataclasses import dataclass

from sdbench.suites.runs import Row, SavedRun, last_of

SHOWN = 6
"""Questions on the page; ``samples.jsonl`` has all."""


@dataclass(frozen=True)
class Question:
    """One question's replies.

    Attributes:
        example: Its id.
        samples: One reply an arm.
        of: How many questions the run has.
    """

    example: str
    samples: Sequence[Row]
    of: int


def replies(run: SavedRun) -> list[Question]:
    """The first few questions with every arm's reply; empty for a run without replies."""
    groups: dict[str, list[Row]] = {}
    for sample in last_of(run.samples, "arm", "example"):
        groups.setdefault(str(sample.get("example")), []).append(sample)
    # Sorting keeps the order of questions that are alike.
    disagreed_first = sorted(groups, key=lambda example: len({sample.get("match") for sample in groups[example]}) < 2)
    return [Question(example, groups[example], len(groups)) for example in disagreed_first[:SHOWN]]
