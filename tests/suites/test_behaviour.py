"""Behaviour of replies, by hand."""

import pytest

from sdbench.suites.behaviour import Loop, find_loop, length_ratio, net_speedup, repeated_share, seconds_per_correct


@pytest.mark.parametrize(
    ("ids", "loop"),
    [
        ([], None),
        (list(range(200)), None),
        ([1, 2] * 20, Loop(0, 2, 40)),
        ([9, 8, 7] + [1, 2, 3] * 11 + [1, 2] + [5, 6], Loop(3, 3, 35)),  # eleven times and two thirds, then an end
        ([4] * 31, None),  # 31 tokens are too few
        ([4] * 32, Loop(0, 1, 32)),
        (list(range(20)) * 3, None),  # three times are too few
        (list(range(20)) * 4, Loop(0, 20, 80)),
        ([7] * 40 + list(range(100, 120)) * 5, Loop(40, 20, 100)),  # the longer of two
        (list(range(129)) * 4, None),  # longer than any n-gram that is looked for
    ],
)
def test_loops(ids: list[int], loop: Loop | None) -> None:
    assert find_loop(ids) == loop


def test_repeated_share() -> None:
    # 1234 2341 3412 4123 1234: one of five was there before.
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_share([1, 2, 3, 4, 5]) == 0
    assert repeated_share([3] * 13) == pytest.approx(9 / 10)
    assert repeated_share([1, 2, 3]) is None
    assert repeated_share([1, 1, 1], n=2) == pytest.approx(1 / 2)


def test_length_and_what_a_speedup_is_worth() -> None:
    assert length_ratio([30, 60], [40, 20]) == 1.5
    # 1.8 times the rate and 1.5 times the tokens: 1.2 times as soon done.
    assert net_speedup(1.8, 1.5) == pytest.approx(1.2)
    assert net_speedup(None, 1.5) is None and net_speedup(1.8, None) is None
    assert length_ratio([3], [0]) is None
    with pytest.raises(ValueError, match="2 replies against 1"):
        length_ratio([1, 2], [3])


def test_seconds_per_correct() -> None:
    # 50 + 100 + 1 decode steps at 50 tokens a second are 3.02 s, for two right answers.
    assert seconds_per_correct([51, 101, 2], 50.0, 2) == pytest.approx(1.51)
    assert seconds_per_correct([51], 50.0, 0) is None
    assert seconds_per_correct([51], None, 1) is None
    assert seconds_per_correct([51], 50.0, None) is None
