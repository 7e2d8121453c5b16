"""Figures of a run: CASES row 4."""

import math

import pytest

from sdbench.suites.metrics import crossover, decode_rate, speedup


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


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ([(1, 1.5), (4, 1.0), (8, 0.9)], "stops paying at batch 8"),
        ([(1, 1.5), (4, 1.2)], "pays up to batch 4, the largest that was timed"),
        ([(1, 0.5), (4, 0.2)], "pays at no batch that was timed"),
        ([(1, 0.9), (4, 1.2), (8, 0.7)], "pays at batch 4 alone"),
        ([(1, 1.1), (4, 0.9), (8, 1.2)], "pays at batch 1, 8 alone"),
    ],
)
def test_up_to_where_it_pays(gains: list[tuple[int, float]], said: str) -> None:
    assert crossover(gains, "batch") == said
