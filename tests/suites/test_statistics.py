import math
import warnings
from typing import Any

import numpy as np
import pytest

from sdbench.results import with_status
from sdbench.suites.e2e.tables import ratio_cells
from sdbench.suites.statistics import difference_of_shares, kl_ratio, mcnemar, ratio_of_means, share_interval


def test_two_questions_by_hand() -> None:
    """Resampled means of 1 and 3 are 1, 2, 3 with probability 1/4, 1/2, 1/4."""
    found = ratio_of_means([1.0, 3.0], [1.0, 1.0])
    assert found is not None and (found.estimate, found.low, found.high) == (2.0, 1.0, 3.0)
    inner = ratio_of_means([1.0, 3.0], [1.0, 1.0], level=0.4)
    assert inner is not None and (inner.low, inner.high) == (2.0, 2.0)
    assert found.as_dict() == {"estimate": 2.0, "low": 1.0, "high": 3.0}


def test_it_is_a_ratio_of_means_and_not_a_mean_of_ratios() -> None:
    found = ratio_of_means([1.0, 9.0], [1.0, 3.0])
    assert found is not None and found.estimate == 2.5


def test_pairs_stay_together() -> None:
    """Twice the other arm on every question: no resampling can shake that, however much the questions differ."""
    base = np.random.default_rng(0).lognormal(sigma=2.0, size=30)
    found = ratio_of_means(2 * base, base)
    assert found is not None and found.low == pytest.approx(2.0) and found.high == pytest.approx(2.0)
    shuffled = ratio_of_means(2 * base, base[::-1])
    assert shuffled is not None and shuffled.low < 1 < 3 < shuffled.high


def test_the_seed_decides() -> None:
    generator = np.random.default_rng(1)
    one, other = generator.random(20), generator.random(20)
    assert ratio_of_means(one, other, seed=5) == ratio_of_means(one, other, seed=5) != ratio_of_means(one, other, seed=6)


def test_where_there_is_no_interval() -> None:
    assert ratio_of_means([1.0], [2.0]) is None
    assert ratio_of_means([1.0, 2.0], [0.0, 0.0]) is None
    with pytest.raises(ValueError, match="2 figures against 1"):
        ratio_of_means([1.0, 2.0], [1.0])


def test_share_by_hand() -> None:
    """Wilson: (k + z^2 / 2 -+ z sqrt(k (n - k) / n + z^2 / 4)) / (n + z^2), with z = 1.96."""
    found = share_interval(8, 10)
    assert (found.estimate, found.low, found.high) == (0.8, pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    # All right: the upper end is 1, the lower n / (n + z^2).
    assert share_interval(200, 200).high == 1.0 and share_interval(200, 200).low == pytest.approx(200 / 203.8415, abs=1e-5)


def test_a_ratio_of_kls_takes_two_that_are_more_than_rounding() -> None:
    """What counts is the mean over positions."""

    def rows(first: float, second: float) -> list[dict[str, Any]]:
        return [{"example": "x", "kl": first, "positions": 10}, {"example": "y", "kl": second, "positions": 30}]

    control, arm = rows(2.0, 1.0), rows(1.0, 0.5)
    assert kl_ratio(control, arm) == ratio_of_means([20.0, 30.0], [10.0, 15.0])
    # Of 40 positions, a mean of 1e-6 is a sum of 4e-5.
    for kl, judged in ((3.9e-6, False), (4.1e-6, True)):
        assert bool(kl_ratio(control, rows(kl, 0.0))) == bool(kl_ratio(rows(kl, 0.0), arm)) == judged
    assert kl_ratio([], []) is None


def test_draws_of_one_question_are_one_pair_of_kls() -> None:
    rows = [{"example": name, "kl": kl, "positions": 10} for name, kl in (("x", 1.0), ("y", 3.0), ("x", 3.0), ("y", 9.0))]
    assert kl_ratio(rows, [row | {"kl": 1.0} for row in rows]) == ratio_of_means([40.0, 120.0], [20.0, 20.0])


def test_where_no_question_differs_the_interval_is_the_exact_one() -> None:
    """A bootstrap only repeats what it saw. If more than about 3 in 50 questions differed, 50 without one would have p < 0.05."""
    found = difference_of_shares([(1, 1, 1)] * 30 + [(0, 0, 1)] * 20)
    bound = 1 - 0.05 ** (1 / 50)
    assert found is not None and (found.estimate, found.low, found.high) == (0.0, pytest.approx(-bound), pytest.approx(bound))
    assert bound == pytest.approx(3 / 50, rel=0.05)  # the rule of three
    # Four draws of a question are one piece of evidence.
    assert difference_of_shares([(4, 4, 4)] * 30 + [(2, 2, 4)] * 20) == found
    wider = difference_of_shares([(1, 1, 1)] * 50, level=0.99)
    assert wider is not None and wider.high == pytest.approx(1 - 0.01 ** (1 / 50))


def test_where_all_questions_differ_alike_the_rest_may_differ_the_other_way() -> None:
    """All of 50 were gained: at most a share ``bound`` of all questions is not, and those may be lost."""
    bound = 1 - 0.05 ** (1 / 50)
    found = difference_of_shares([(1, 0, 1)] * 50)
    assert found is not None and (found.estimate, found.low, found.high) == (1.0, pytest.approx(1 - 2 * bound), 1.0)
    half = difference_of_shares([(1, 2, 2)] * 50)
    assert half is not None and half.estimate == -0.5
    assert (half.low, half.high) == (pytest.approx(-0.5 - 0.5 * bound), pytest.approx(-0.5 + 1.5 * bound))


def test_mcnemar_by_hand() -> None:
    # Five questions, all in one direction: 2 / 2^5.
    assert mcnemar([True] * 6 + [False], [False] * 5 + [True, False]) == pytest.approx(0.0625)
    # One against three: 2 * (1 + 4) / 2^4.
    assert mcnemar([True, False, False, False], [False, True, True, True]) == pytest.approx(0.625)
    assert mcnemar([True, False], [False, True]) == 1.0
    assert mcnemar([True, False], [True, False]) == 1.0
    with pytest.raises(ValueError, match="zip"):
        mcnemar([True], [True, False])


def test_a_resample_with_nothing_below_is_infinite_without_a_warning() -> None:
    """An int8 arm of a small model repeats the dense one on most questions."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ratio_of_means([2.0, 0.0, 0.0, 2.0], [1.0, 0.0, 0.0, 0.0])
    assert found is not None
    assert (found.estimate, found.low, found.high) == (4.0, 1.0, math.inf)
    # As it was measured, and as a run directory's rows have it.
    for row in (found.as_dict(), with_status(found.as_dict())):
        assert ratio_cells(row) == ("4.00", "1.00 to inf")
