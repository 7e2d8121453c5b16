"""Fields of an arm's row that come from its answers, from samples written by hand."""

from typing import Any

import pytest

from sdbench.suites.e2e.quality import quality, worth
from sdbench.suites.e2e.tables import behaviour_table


def sample(tokens: int, match: bool | None, **more: Any) -> dict[str, Any]:
    return {"example": str(tokens), "tokens": tokens, "ids": list(range(tokens)), "match": match, "eos": True, "truncated": False} | more


DENSE = [sample(41, True), sample(21, True), sample(31, False)]
LONGER = [sample(61, True), sample(42, False, ids=[5] * 42, eos=False, truncated=True), sample(83, True)]


def rated(found: dict[str, Any], rate: float | None, speedup: float | None, reason: str | None = None) -> dict[str, Any]:
    row = found | {"decode_rate": rate, "speedup": speedup, "speedup_reason": reason, "quality_reason": None}
    return row | worth(row, LONGER if found["reply_tokens"] == 61 else DENSE)


def test_dense() -> None:
    row = rated(quality(DENSE, None, []), 90.0, None, "this arm is the baseline")
    assert (row["examples"], row["graded"], row["answer_match"], row["eos"], row["truncated"]) == (3, 3, 2, 3, 0)
    assert (row["reply_tokens"], row["loops"], row["repeated_4grams"], row["answer_match_p"]) == (31, 0, 0, None)
    assert row["length_ratio"] is None and row["length_ratio_reason"] == row["net_speedup_reason"] == "this arm is the baseline"
    # 40 + 20 + 30 steps at 90 a second are one second, for two right answers.
    assert row["seconds_per_correct"] == pytest.approx(0.5) and row["seconds_per_correct_reason"] is None


def test_a_faster_arm_that_says_twice_as_much_gains_nothing() -> None:
    row = rated(quality(LONGER, [True, True, True], DENSE), 183.0, 2.0)
    assert row["length_ratio"] == 2 and row["net_speedup"] == 1
    assert (row["loops"], row["truncated"]) == (1, 1)
    assert row["repeated_4grams"] == pytest.approx((38 / 39) / 3)
    # 60 + 41 + 82 steps.
    assert row["seconds_per_correct"] == pytest.approx(183 / 183 / 2)
    assert row["answer_match_p"] == 1  # one question of three


def test_nothing_right_and_no_rate_have_reasons() -> None:
    wrong = quality([sample(5, False)] * 3, None, DENSE)
    assert rated(wrong, 10.0, 1.0)["seconds_per_correct_reason"] == "no right answer"
    row = rated(wrong, None, None, "no rate")
    assert (row["net_speedup"], row["net_speedup_reason"], row["seconds_per_correct_reason"]) == (None, "no rate", "no rate")


def test_what_was_not_judged_is_no_wrong_answer() -> None:
    reason = {"match_reason": "no leave"}
    samples = [sample(5, True), sample(5, None, **reason), sample(5, None, **reason)]
    found = quality(samples, None, DENSE)
    assert (found["examples"], found["graded"], found["answer_match"], found["answer_match_reason"]) == (3, 1, 1, "no leave (2)")
    none = quality(samples[1:], None, DENSE[1:])
    assert (none["graded"], none["answer_match"]) == (0, None)


def test_no_replies() -> None:
    found = quality([], None, DENSE)
    assert (found["examples"], found["answer_match"], found["loops"], found["reply_tokens"]) == (0, None, None, None)
    assert found["length_ratio_reason"] == "no replies"


def test_outcomes_and_scores() -> None:
    run = [sample(5, True, execution={"outcome": "passed"}), sample(5, False, execution={"outcome": "timeout"})]
    assert quality(run, None, [])["execution"] == {"passed": 1, "failed": 0, "error": 0, "timeout": 1, "not_run": 0}
    scored = [sample(5, None, score=score, score_reason=reason) for score, reason in ((4.0, None), (7.0, None), (None, "HTTP 500"))]
    found = quality(scored, None, [])
    assert (found["score"], found["scored"], found["score_reason"]) == (5.5, 2, "HTTP 500 (1)")
    assert "score" not in quality(DENSE, None, []) and "execution" not in quality(DENSE, None, [])


def test_the_table() -> None:
    arms = [
        {"arm": "dense", "pattern": None, **rated(quality(DENSE, None, []), 90.0, None, "the baseline")},
        {"arm": "decode", "pattern": "2:4", **rated(quality(LONGER, None, DENSE), 183.0, 2.0)},
    ]
    table = behaviour_table(arms)
    assert table and [list(row) for row in table.cells] == [
        ["dense", "31", "-", "0/3", "0.0%", "-", "0.5"],
        ["decode", "61", "2.00", "1/3", "32.5%", "1.00", "0.5"],
    ]
    assert not any("no s/right" in line for line in table.lines)
    wrong = [quality([sample(5, False)] * 3, None, DENSE)] * 2
    arms += [{"arm": f"wrong{n}", "pattern": "2:4", **rated(one, 10.0, 1.0)} for n, one in enumerate(wrong)]
    table = behaviour_table([*arms, {"arm": "slow", "pattern": "2:4", **rated(wrong[0], None, None, "no GPU")}])
    assert table and [line for line in table.lines if line.startswith("no s/right")] == [
        "no s/right: no right answer",  # once, of two arms
        "no s/right: no rate",
    ]
    assert behaviour_table(arms[:1]) is None and behaviour_table([{"arm": "dense", "pattern": None}]) is None
