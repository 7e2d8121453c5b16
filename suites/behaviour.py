"""How replies behave beside being right: loops, repeated n-grams, length against dense, and what a speed-up is worth at that length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LONGEST_PERIOD = 128
"""Tokens of the longest n-gram that is looked for as a loop."""
LEAST_TIMES, LEAST_TOKENS = 4, 32
"""A loop says one n-gram at least so many times in a row, over at least so many tokens: a table's rule or a row of digits is none."""
NGRAM = 4
"""Length of the n-grams whose repetition is counted."""


@dataclass(frozen=True)
class Loop:
    """One n-gram, again and again.

    Attributes:
        start: Position of its first token.
        period: Tokens of the n-gram.
        tokens: Tokens of the whole loop.
    """

    start: int
    period: int
    tokens: int


def find_loop(ids: Sequence[int]) -> Loop | None:
    """The longest stretch of a reply that says one n-gram over and over; None where there is none.

    Args:
        ids: The reply's token ids.

    Returns:
        Of equally long loops the one with the shortest n-gram; an n-gram that is begun once more at the end counts as far as it goes.
    """
    reply = np.asarray(ids)
    best: Loop | None = None
    for period in range(1, min(LONGEST_PERIOD, len(reply) // LEAST_TIMES) + 1):
        # Every token of a loop but the n-gram's first saying is the one a period before.
        same = np.concatenate(([False], reply[period:] == reply[:-period], [False]))
        starts, ends = np.flatnonzero(same[1:] & ~same[:-1]), np.flatnonzero(~same[1:] & same[:-1])
        if not len(starts):
            continue
        longest = int(np.argmax(ends - starts))
        tokens = int(ends[longest] - starts[longest]) + period
        if tokens >= max(LEAST_TOKENS, LEAST_TIMES * period) and (best is None or tokens > best.tokens):
            best = Loop(int(starts[longest]), period, tokens)
    return best


def repeated_share(ids: Sequence[int], n: int = NGRAM) -> float | None:
    """Share of a reply's n-grams that it has said before: 0 where none repeats; None for a reply shorter than ``n`` tokens.

    Args:
        ids: The reply's token ids.
        n: Tokens of an n-gram.
    """
    grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def length_ratio(tokens: Sequence[int], dense_tokens: Sequence[int]) -> float | None:
    """Tokens that an arm takes over those of dense on the same questions, all together: above 1 it says more.

    Args:
        tokens: Tokens of each of the arm's replies.
        dense_tokens: Those of the dense arm, of the same questions.

    Raises:
        ValueError: The arms have different numbers of replies.
    """
    if len(tokens) != len(dense_tokens):
        raise ValueError(f"{len(tokens)} replies against {len(dense_tokens)}: lengths are compared on the same questions")
    return sum(tokens) / sum(dense_tokens) if sum(dense_tokens) else None


def net_speedup(speedup: float | None, length: float | None) -> float | None:
    """Speed-up at equal length over length inflation: how many times as soon a reply is done.

    Args:
        speedup: Of the rates.
        length: From :func:`length_ratio`.
    """
    return speedup / length if speedup is not None and length else None


def seconds_per_correct(tokens: Sequence[int], rate: float | None, correct: int | None) -> float | None:
    """Decode seconds that an arm spends for each right answer, wrong ones paid for: decode steps of all replies / rate / right answers.

    The prefill gives the first token of a reply, and is not counted; the rate is the rate runs', which nothing disturbs.

    Args:
        tokens: Tokens of each reply.
        rate: Decode rate, tokens a second.
        correct: Right answers among the replies.
    """
    return sum(count - 1 for count in tokens) / rate / correct if rate and correct else None
