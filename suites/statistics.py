"""Whether two arms of the same questions differ: paired bootstraps of a ratio and of a difference, and McNemar's exact test."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import scipy  # loads its stats, a second, when they are asked for

KL_ROUNDING = 1e-6
"""Nats a position: as much as a KL of equal distributions may come to in float32."""


@dataclass(frozen=True)
class Interval:
    """A figure and its bootstrap interval.

    Attributes:
        estimate: From the sample itself.
        low: Lower end.
        high: Upper end.
    """

    estimate: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """The three figures by name."""
        return asdict(self)


def over_positions(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A figure of each row times the row's ``positions``: what a question weighs."""
    return [row[name] * row["positions"] for row in rows]


def mean_over_positions(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of a figure over all positions of the rows, of which there is at least one."""
    return sum(over_positions(rows, name)) / sum(row["positions"] for row in rows)


def ratio_of_means(
    numerator: Sequence[float], denominator: Sequence[float], *, seed: int = 0, resamples: int = 10_000, level: float = 0.95
) -> Interval | None:
    """``mean(numerator) / mean(denominator)`` with a percentile interval over resampled pairs.

    Args:
        numerator: One figure a question, of one arm.
        denominator: Those of the other arm, of the same questions in the same order; none negative.
        seed: Seed of the resampling.
        resamples: Bootstrap samples.
        level: Share of them that lies inside.

    Returns:
        None where there is no such interval: fewer than two questions, or a denominator of zeros.

    Raises:
        ValueError: The arms have different numbers of questions.
    """
    if len(numerator) != len(denominator):
        raise ValueError(f"{len(numerator)} figures against {len(denominator)}: a paired bootstrap needs the same questions in both arms")
    above, below = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    if len(above) < 2 or not below.any():
        return None
    return _paired_bootstrap(above, below, _ratio, seed, resamples, level)


def kl_ratio(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], *, seed: int = 0) -> Interval | None:
    """The mean KL of one arm over that of another, with an interval over resampled questions, each with all of its rows.

    Args:
        first: Rows with ``example``, ``kl`` in nats a position, and ``positions``, by which a question weighs.
        second: Those of the other arm, of the same replies in the same order.
        seed: Seed of the resampling.

    Returns:
        None where there is no such interval: fewer than two questions, or a mean KL that is not above ``KL_ROUNDING``.

    Raises:
        ValueError: The arms have different numbers of rows.
    """
    if not first or min(mean_over_positions(rows, "kl") for rows in (first, second)) <= KL_ROUNDING:
        return None
    sums: dict[str, tuple[float, float]] = {}
    pairs = zip(over_positions(first, "kl"), over_positions(second, "kl"), strict=True)
    for row, (one, other) in zip(first, pairs, strict=True):
        above, below = sums.get(row["example"], (0.0, 0.0))
        sums[row["example"]] = above + one, below + other
    return ratio_of_means([above for above, _ in sums.values()], [below for _, below in sums.values()], seed=seed)


def _ratio(above: np.ndarray, below: np.ndarray, axis: int) -> Any:
    """Of means, infinite over nothing; where both are nothing there is no difference."""
    first, second = above.mean(axis=axis), below.mean(axis=axis)
    return np.where((first == 0) & (second == 0), 1.0, first / second)


def difference_of_shares(
    pairs: Sequence[tuple[int, int, int]], *, seed: int = 0, resamples: int = 10_000, level: float = 0.95
) -> Interval | None:
    """How much larger one share of yes-or-no outcomes is than another, with a percentile interval over resampled clusters of pairs.

    Where all clusters say the same, such as that nothing differs, resampling repeats that and nothing else. The interval is then what the
    exact binomial bound allows: none of ``n`` clusters says otherwise, so that at most a share ``1 - (1 - level) ** (1 / n)`` of all may
    (the "rule of three", 3 / n), one way or the other.

    Args:
        pairs: A cluster each (a question with all of its draws): how many outcomes are yes in the first arm, how many in the other one,
            and how many there are in each.
        seed: Seed of the resampling.
        resamples: Bootstrap samples.
        level: Share of them that lies inside.

    Returns:
        None with fewer than two clusters.
    """
    if len(pairs) < 2:
        return None
    first, second, total = np.asarray(pairs, dtype=float).T
    gained = first - second
    each = gained / total
    if (each == each[0]).all():
        alike, others = float(each[0]), float(scipy.stats.binomtest(0, len(pairs), alternative="less").proportion_ci(level).high)
        return Interval(alike, alike - others * (1 + alike), alike + others * (1 - alike))
    return _paired_bootstrap(gained, total, lambda more, of, axis: more.sum(axis=axis) / of.sum(axis=axis), seed, resamples, level)


def _paired_bootstrap(
    first: np.ndarray, second: np.ndarray, statistic: Callable[..., Any], seed: int, resamples: int, level: float
) -> Interval:
    """A statistic of pairs, ``statistic(first, second, axis)``, and its percentile interval over resampled pairs."""
    # A resample may have nothing below, and so an infinite ratio, of which scipy also takes a deviation that is not used.
    with np.errstate(divide="ignore", invalid="ignore"):
        found = scipy.stats.bootstrap(
            (first, second),
            statistic,
            paired=True,
            n_resamples=resamples,
            confidence_level=level,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    return Interval(float(statistic(first, second, 0)), float(found.confidence_interval.low), float(found.confidence_interval.high))


def share_interval(count: int, total: int, *, level: float = 0.95) -> Interval:
    """A share of yes-or-no outcomes and its Wilson interval, which also holds for a share of 0 or 1.

    Args:
        count: How many are yes.
        total: How many there are, at least one.
        level: Of the interval.
    """
    found = scipy.stats.binomtest(count, total).proportion_ci(confidence_level=level, method="wilson")
    return Interval(count / total, float(found.low), float(found.high))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Two-sided exact p of McNemar's test: how likely so lopsided a disagreement is when both arms are equally good.

    Only the questions count that one arm got right and the other wrong; under the null each is a fair coin.

    Args:
        first: Right or wrong, a question each.
        second: The other arm's, of the same questions in the same order.

    Raises:
        ValueError: The arms have different numbers of questions.
    """
    pairs = list(zip(first, second, strict=True))
    only_first, only_second = pairs.count((True, False)), pairs.count((False, True))
    if not only_first + only_second:
        return 1.0
    return float(scipy.stats.binomtest(only_first, only_first + only_second).pvalue)
