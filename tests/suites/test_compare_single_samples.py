"""Times of one sample each, which have no spread to judge a difference by."""

from typing import Any

import pytest

from .made_runs import arm, product
from .test_compare import e2e, kernels


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (10.0, 20.0, "slower, not judged: one sample alone, and so no spread, in BASE and NEW"),
        (20.0, 10.0, "faster, not judged: one sample alone, and so no spread, in BASE and NEW"),
        ((9.9, 10.0, 10.1), 20.0, "slower, not judged: one sample alone, and so no spread, in NEW"),
        (10.0, (19.0, 20.0, 21.0), "slower, not judged: one sample alone, and so no spread, in BASE"),
    ],
)
def test_single_samples_differ_and_nothing_is_concluded(before: Any, after: Any, told: str) -> None:
    """One repeat has no spread: its percentiles are the sample itself, and two samples always differ."""

    def rates(times: Any) -> tuple[float, ...]:
        return tuple(1 / time for time in reversed(times)) if isinstance(times, tuple) else (1 / times,) * 3

    comparison = e2e(arm("decode", rates(before)), arm("decode", rates(after)))
    (found,) = comparison.findings
    ratio = (before[1] if isinstance(before, tuple) else before) / (after[1] if isinstance(after, tuple) else after)
    assert (found.verdict, found.ratio, found.reason) == ("not judged", pytest.approx(ratio), told)
    assert not comparison.regressions and comparison.lines() == ["1 not judged"]
    shown = {spread for spread in (found.base_spread, found.new_spread) if spread}
    assert len(shown) == 2 - told.count("BASE") - told.count("NEW") and all(low < high for low, high in shown)


def test_single_samples_within_the_threshold_are_the_same() -> None:
    found = kernels(product((10.0, 10.0, 10.0)), product((10.3, 10.3, 10.3)))
    assert (found.verdict, found.reason) == ("same", "slower within noise: up to 5%")
    assert kernels(product((10.0, 10.0, 10.0)), product((10.0, 10.0, 10.0))).reason is None


def test_a_time_whose_spread_was_not_kept_is_not_judged() -> None:
    assert kernels(product({"p50": 10.0}), product({"p50": 11.0, "p20": None})).verdict == "not judged"
