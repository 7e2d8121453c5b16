"""Figures of a run: CASES rows 3 and 4."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdbench.suites.metrics import Quantiles, Trimmed, decode_rate, quantiles, speedup, trim_reply

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A shared machine is slow at times; these tests are about values."""


def test_cases_4_prefill_and_its_token_are_left_out() -> None:
    """100 tokens in 5 s, 1 s of it prefill."""
    assert decode_rate(100, 5.0 - 1.0) == 24.75


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 0.5), (1, 0.0), (0, 1.0), (100, 0.0), (100, -1.0), (100, math.nan), (100, math.inf)])
def test_cases_4_no_rate_is_none(tokens: int, seconds: float) -> None:
    assert decode_rate(tokens, seconds) is None


def test_speedup_between_equal_lengths() -> None:
    assert speedup(30.0, 20.0, 128, 128) == (1.5, None)


@pytest.mark.parametrize(
    ("rate", "baseline", "tokens", "baseline_tokens", "reason"),
    [
        (30.0, 20.0, 128, 64, "lengths differ: 128 tokens against the baseline's 64"),
        (None, 20.0, 128, 128, "no rate"),
        (30.0, None, 128, 128, "no baseline rate"),
        (30.0, 0.0, 128, 128, "the baseline rate is 0"),
        (30.0, math.nan, 128, 128, "the baseline rate is nan"),
        (30.0, math.inf, 128, 128, "the baseline rate is inf"),
        (math.nan, 20.0, 128, 128, "the rate is nan"),
    ],
)
def test_no_speedup_has_a_reason(rate: float | None, baseline: float | None, tokens: int, baseline_tokens: int, reason: str) -> None:
    assert speedup(rate, baseline, tokens, baseline_tokens) == (None, reason)


def test_cases_3_nothing_after_the_first_eos_counts() -> None:
    assert trim_reply([10, 1, 5, 3, 2, 2], {2}, 512) == Trimmed((10, 1, 5, 3, 2), eos=True, truncated=False)


def test_cases_3_a_short_reply_has_its_own_length() -> None:
    """39 of 512 tokens; the rest of the buffer is padding."""
    reply = trim_reply([7] * 38 + [2] + [0] * 473, {2}, 512)
    assert (len(reply.ids), reply.eos, reply.truncated) == (39, True, False)


def test_cases_2_every_eos_id_ends_a_reply() -> None:
    assert trim_reply([26194, 13, 151643, 33975], {151645, 151643}, 8).ids == (26194, 13, 151643)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 3, 2], Trimmed((1, 3, 2), eos=True, truncated=False)),
        ([1, 3, 4], Trimmed((1, 3, 4), eos=False, truncated=True)),
        ([1, 3, 4, 2], Trimmed((1, 3, 4), eos=False, truncated=True)),
        ([1, 3], Trimmed((1, 3), eos=False, truncated=False)),
        ([], Trimmed((), eos=False, truncated=False)),
    ],
)
def test_eos_and_truncation_at_three_tokens(ids: list[int], expected: Trimmed) -> None:
    assert trim_reply(ids, {2}, 3) == expected


def test_quantiles() -> None:
    assert quantiles([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == (Quantiles(2.0, 3.5, 5.0), None)


@pytest.mark.parametrize(
    ("values", "reason"),
    [([], "no samples"), ([1.0, math.nan], "1 of 2 samples are not finite"), ([math.inf], "1 of 1 samples are not finite")],
)
def test_cases_18_no_samples_is_invalid_not_zero(values: list[float], reason: str) -> None:
    assert quantiles(values) == (None, reason)


@UNHURRIED
@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_quantiles_are_ordered_and_inside_the_samples(values: list[float]) -> None:
    found, _ = quantiles(values)
    assert found is not None
    assert min(values) <= found.p20 <= found.p50 <= found.p80 <= max(values)
