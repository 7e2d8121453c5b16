import math

import pytest
import torch

from sdbench.timing import relative_error, summarise, within


def test_no_sample_is_no_figure() -> None:
    """CASES 18: every sample discarded is invalid, not 0."""
    assert summarise([]) is None
    assert summarise([math.nan, math.inf, -1.0, 0.0]) is None


def test_percentiles() -> None:
    times = summarise([5.0, 1.0, 2.0, 4.0, 3.0, math.nan])
    assert times is not None
    assert (times.p20, times.p50, times.p80) == pytest.approx((1.8, 3.0, 4.2))


def test_one_nan_fails_the_check() -> None:
    """CASES 5: max(0.0, nan) is 0.0 and nan > tol is False; neither decides here."""
    want = torch.ones(4, dtype=torch.float64)
    got = torch.tensor([1.0, 1.0, math.nan, 1.0])
    error = relative_error(got, want)
    assert math.isnan(error)
    assert not within(error, 1e-2)
    assert not within(math.inf, 1e-2)
    assert within(relative_error(torch.ones(4), want), 0.0)


def test_relative_error_is_relative() -> None:
    """A small matrix with a large relative error is wrong, whatever an absolute tolerance would say."""
    want = torch.full((8,), 1e-6, dtype=torch.float64)
    assert relative_error(torch.full((8,), 2e-6), want) == pytest.approx(1.0, rel=1e-5)
