"""What counts as a regression between two runs."""

from typing import Any

import pytest

from sdbench.errors import SdbenchError, UsageError
from sdbench.suites.compare import Comparison, Finding, _shown, compare

from .made_runs import answers, arm, around, fidelity, product, saved

NAN = float("nan")


def kernels(before: dict[str, Any], after: dict[str, Any], fail_over: float = 0.05) -> Finding:
    (found,) = compare(saved("base", "kernels", [before]), saved("new", "kernels", [after]), fail_over).findings
    return found


def e2e(before: Any, after: Any, **samples: Any) -> Comparison:
    base, new = samples.get("base", ()), samples.get("new", ())
    return compare(saved("base", "e2e", [before], base), saved("new", "e2e", [after], new), 0.05)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "ratio"),
    [
        ((9.9, 10.0, 10.1), (10.8, 11.0, 11.2), "slower", 10 / 11),
        ((9.9, 10.0, 10.1), (10.8, 12.5, 99.0), "slower", 0.8),
        (10.0, 10.625, "slower", 10 / 10.625),
        (10.0, 10.5, "same", 10 / 10.5),  # 5% and not more
        ((9.9, 10.0, 10.1), (10.0, 11.0, 11.2), "same", 10 / 11),  # the spreads overlap
        ((9.9, 10.0, 10.8), (10.8, 11.0, 11.2), "same", 10 / 11),  # they touch
        ((9.9, 10.0, 10.1), (10.2, 10.4, 10.5), "same", 10 / 10.4),  # apart, but by less than 5%
        ((10.8, 11.0, 11.2), (9.9, 10.0, 10.1), "faster", 1.1),
        ((10.0, 11.0, 11.2), (9.9, 10.0, 10.1), "same", 1.1),
        (10.0, 10.0, "same", 1.0),
    ],
)
def test_slower_is_beyond_the_threshold_and_beyond_both_spreads(before: Any, after: Any, verdict: str, ratio: float) -> None:
    found = kernels(product(before), product(after))
    assert (found.verdict, found.figure, found.ratio) == (verdict, "us", pytest.approx(ratio))
    # A rate is the same time the other way round: tokens in a second.
    rates = [tuple(1 / time for time in reversed(times)) if isinstance(times, tuple) else 1 / times for times in (before, after)]
    (found,) = e2e(arm("decode", rates[0]), arm("decode", rates[1])).findings
    assert (found.verdict, found.figure, found.ratio) == (verdict, "tok/s", pytest.approx(ratio))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ((9.9, 10.0, 10.1), (10.0, 11.0, 11.2), "slower within noise: the spreads overlap"),
        ((10.0, 11.0, 11.2), (9.9, 10.0, 10.1), "faster within noise: the spreads overlap"),
        ((9.9, 10.0, 10.1), (10.2, 10.4, 10.5), "slower within noise: up to 5%"),
        ((9.9, 10.0, 10.1), (9.9, 10.0, 10.1), None),
        ((9.9, 10.0, 10.1), (10.8, 11.0, 11.2), None),
    ],
)
def test_a_difference_within_noise_is_called_so(before: Any, after: Any, reason: str | None) -> None:
    assert kernels(product(before), product(after)).reason == reason


def test_the_threshold_is_the_callers() -> None:
    assert [kernels(product(10.0), product(10.3), share).verdict for share in (0.0, 0.02, 0.03, 0.05)] == [
        "slower",
        "slower",
        "same",
        "same",
    ]


BAD_TIMES = [
    (None, "no figure in {}"),
    ({"p20": 0.0, "p50": 0.0, "p80": 0.0}, "{} has 0"),
    ({"p50": -1.5}, "{} has -1.5"),
    ({}, "no figure in {}"),
    ({"p20": None, "p50": None}, "no figure in {}"),
    ({"p50": NAN}, "no figure in {}"),
    ({"p50": "fast"}, "no figure in {}"),
    ([1.0], "no figure in {}"),
]


@pytest.mark.parametrize(("times", "reason"), BAD_TIMES)
def test_cases_20_a_figure_that_is_none_gives_a_null_ratio_and_its_reason(times: Any, reason: str) -> None:
    for before, after, name in ((times, 4.0, "BASE"), (4.0, times, "NEW")):
        found = kernels(product(before), product(after))
        assert (found.verdict, found.ratio, found.reason) == ("no ratio", None, reason.format(name))
    without = product(4.0)
    del without["us"]
    assert kernels(without, product(4.0)).reason == "no figure in BASE"
    assert kernels(without, without).verdict == "no ratio"


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (0.0, 5.0, "BASE has 0"),
        (5.0, None, "no figure in NEW"),
        (NAN, 5.0, "no figure in BASE"),
    ],
)
def test_cases_20_rates(before: Any, after: Any, reason: str) -> None:
    (found,) = e2e(arm("decode", before), arm("decode", after)).findings
    assert (found.verdict, found.ratio, found.reason) == ("no ratio", None, reason)


def test_a_figure_that_the_new_run_lost_fails() -> None:
    comparison = compare(saved("base", "kernels", [product(10.0)]), saved("new", "kernels", [product(None)]), 0.05)
    assert [(found.verdict, found.reason) for found in comparison.regressions] == [("no ratio", "no figure in NEW")]
    gained = compare(saved("base", "kernels", [product(None)]), saved("new", "kernels", [product(10.0)]), 0.05)
    assert [found.verdict for found in gained.findings] == ["no ratio"] and not gained.regressions


def test_ways_to_decode_are_told_apart_by_path_and_context() -> None:
    def row(context: int, rates: tuple[float, ...], **changes: Any) -> dict[str, Any]:
        spread = dict(zip(("p20", "p50", "p80"), rates, strict=True))
        return {"record": "decode", "arm": "2:4", "path": "fused step", "context": context, "tokens": 9, "outcome": "correct"} | {
            "decode_rate": spread, **changes
        }  # fmt: skip

    base = [row(128, (99.0, 100.0, 101.0)), row(2048, (99.0, 100.0, 101.0)), row(8192, (9.0, 10.0, 11.0))]
    new = [row(128, (79.0, 80.0, 81.0)), row(2048, (99.0, 100.0, 101.0), tokens=8), row(8192, (9.0, 10.0, 11.0))]
    findings = compare(saved("base", "decode", base), saved("new", "decode", new), 0.05).findings
    assert [(found.verdict, found.key["context"], found.ratio and round(found.ratio, 6)) for found in findings] == [
        ("slower", 128, 0.8), ("no ratio", 2048, None), ("same", 8192, 1.0),
    ]  # fmt: skip


def test_several_prompts_and_prompts_in_turn_are_compared() -> None:
    """A rate of several prompts by their number, a prompt by its ratio to the dense one."""

    def rows(rate: float, ratio: float) -> list[dict[str, Any]]:
        def spread(value: float) -> dict[str, float]:
            return {"p20": value * 0.99, "p50": value, "p80": value * 1.01}

        batch = {"record": "batch", "arm": "2:4", "path": "fused step", "context": 4, "batch": 8, "tokens": 9, "outcome": "correct"}
        prompt = {"record": "prompt", "arm": "2:4", "context": 4, "pairs": 3, "outcome": "correct", "reason": None}
        return [batch | {"decode_rate": spread(rate)}, prompt | {"ratio": spread(ratio), "pruned_seconds": spread(1 / ratio)}]

    found = compare(saved("base", "decode", rows(100.0, 0.9)), saved("new", "decode", rows(50.0, 0.6)), 0.05).findings
    assert [(one.label, one.figure, one.verdict, one.ratio) for one in found] == [
        ("2:4 fused step 4 8 prompts", "tok/s", "slower", pytest.approx(0.5)),
        ("2:4 4", "prompt, x dense", "slower", pytest.approx(2 / 3)),
    ]


def test_rates_of_other_lengths_have_no_ratio() -> None:
    (found,) = e2e(arm("decode", 10.0), arm("decode", 5.0, equal_tokens=64)).findings
    assert (found.verdict, found.ratio, found.reason) == ("no ratio", None, "lengths differ: 128 tokens in BASE, 64 in NEW")


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ("correct", "incorrect", "broken"),
        ("correct", "timeout", "broken"),
        ("correct", "constraint", "broken"),
        ("correct", None, "broken"),
        ("incorrect", "correct", "better"),
        ("timeout", "out_of_resources", "no ratio"),
        ("constraint", "constraint", "same"),
    ],
)
def test_correct_before_and_not_now_is_a_regression(before: str, after: str | None, verdict: str) -> None:
    found = kernels(product(10.0, before), product(1.0, after))
    assert (found.verdict, found.figure, found.base, found.new, found.ratio) == (verdict, "outcome", before, str(after), None)
    assert found.reason == "why not"


def test_launches_that_do_not_add_up_are_a_regression_however_fast() -> None:
    comparison = e2e(arm("decode", 10.0), arm("decode", 99.0, kernel_calls=0))
    assert [(found.verdict, found.new) for found in comparison.findings] == [("broken", "wrong kernel calls")]


def test_rows_are_matched_by_what_they_measured() -> None:
    """Each differs from the first in one part of its key; a row without one part of it is another row too."""
    parts: list[dict[str, Any]] = [{"kernel": "spmv_partial"}, {"variant": "portable"}, {"pattern": None}, {"layer": "down"}]
    parts += [{"of_shape": [32, 32]}, {"dtype": "fp16"}]
    others = [product(99.0, **part) for part in parts]
    chain = {"record": "chain", "kernel": "chain", "variant": "spmv", "pattern": "2:4", "layers": 36, "outcome": "correct"}
    base = saved("base", "kernels", [product(10.0), chain | {"us": around(100.0)}])
    new = saved("new", "kernels", [*others, product(5.0), product(10.0), chain | {"us": around(200.0)}, chain | {"layers": 2, "us": {}}])
    findings = compare(base, new, 0.05).findings
    assert [found.verdict for found in findings] == ["slower", *["only in NEW"] * 7, "same"]  # of two rows with one key the last holds
    assert findings[0].label == "chain spmv 2:4 36"
    assert findings[-1].label == "spmv lane_row 2:4 o 16x32 bf16"
    assert {found.label for found in compare(new, base, 0.05).findings if found.verdict == "only in BASE"} == {
        found.label for found in findings if found.verdict == "only in NEW"
    }


def test_numbers_of_tokens_are_told_apart_and_one_is_what_older_rows_have() -> None:
    wrong = product(8.0) | {"tokens": 4, "outcome": "incorrect", "us": None}
    base = saved("base", "kernels", [product(10.0), product(8.0) | {"tokens": 4}])
    found = compare(base, saved("new", "kernels", [product(10.0) | {"tokens": 1}, wrong, product(30.0) | {"tokens": 16}]), 0.05).findings
    assert [(one.verdict, one.key.get("tokens")) for one in found] == [("broken", 4), ("only in NEW", 16), ("same", None)]
    assert found[0].label.endswith("4 tokens")


def test_findings_are_sorted_by_severity_then_by_ratio() -> None:
    def rows(*times: Any) -> list[dict[str, Any]]:
        outcomes = ["correct", "correct", "correct", times[3], "correct", "correct"]
        return [product(time, outcome, variant=name) for name, time, outcome in zip("abcdef", times, outcomes, strict=True)]

    base = saved("base", "kernels", [*rows(10.0, 10.0, 10.0, "correct", 10.0, 0.0), product(1.0, variant="lost")])
    new = saved("new", "kernels", [product(1.0, variant="added"), *rows(10.1, 12.0, 20.0, "crash", 5.0, 5.0)])
    comparison = compare(base, new, 0.05)
    assert [(found.verdict, found.key["variant"]) for found in comparison.findings] == [
        ("broken", "d"), ("slower", "c"), ("slower", "b"), ("only in BASE", "lost"), ("no ratio", "f"), ("only in NEW", "added"),
        ("faster", "e"), ("same", "a"),
    ]  # fmt: skip
    assert [found.key["variant"] for found in comparison.regressions] == ["d", "c", "b"]
    assert comparison.lines() == ["1 broken, 2 slower, 1 only in BASE, 1 no ratio, 1 only in NEW, 1 faster, 1 same"]


@pytest.mark.parametrize(
    ("before", "after", "verdict", "reason"),
    [
        ("1111111", "0000001", "worse", "6 lost, 0 gained, exact McNemar p = 0.031"),
        ("1111111", "0000011", "same", "5 lost, 0 gained, exact McNemar p = 0.062, within noise"),
        ("0000001", "1111111", "better", "0 lost, 6 gained, exact McNemar p = 0.031"),
        ("1111111000", "0000001111", "same", "6 lost, 3 gained, exact McNemar p = 0.51, within noise"),
    ],
)
def test_answers_are_worse_beyond_what_chance_gives(before: str, after: str, verdict: str, reason: str) -> None:
    counts = [{"answer_match": right.count("1"), "eos": 0, "examples": len(right)} for right in (before, after)]
    comparison = e2e(
        arm("decode", 10.0, **counts[0]), arm("decode", 10.0, **counts[1]), base=answers("decode", before), new=answers("decode", after)
    )
    found = {finding.figure: finding for finding in comparison.findings}
    match = found["answer match"]
    assert (match.verdict, match.reason) == (verdict, reason)
    assert (match.base, match.new) == (f"{before.count('1')}/{len(before)}", f"{after.count('1')}/{len(after)}")
    assert (found["EOS"].verdict, found["tok/s"].verdict) == ("same", "same")
    assert bool(comparison.regressions) == (verdict == "worse")


def test_only_examples_that_both_runs_judged_are_compared() -> None:
    before, after = answers("decode", "11111111"), answers("decode", "00000011")
    counts = {"answer_match": 8, "eos": 0}

    def match(base: Any, new: Any) -> Finding:
        comparison = e2e(arm("decode", 1.0, **counts), arm("decode", 1.0, **counts), base=base, new=new)
        return next(finding for finding in comparison.findings if finding.figure == "answer match")

    assert match(before, after).verdict == "worse"
    other_prompt = [sample | {"prompt_hash": "other"} for sample in after]
    without = match(before, [])
    assert (without.verdict, without.reason) == ("no ratio", "no replies (samples.jsonl) in NEW: not tested")
    for none in (other_prompt, answers("dense", "11111111"), answers("decode", "00000011", match=None)):
        assert (match(before, none).verdict, match(before, none).reason) == ("no ratio", "no example in common: not tested")
    half = match(before, [*other_prompt[:4], *after[4:]])
    assert (half.base, half.new, half.verdict) == ("4/4", "2/4", "same")
    asked_again = [*after, *answers("decode", "11111111")]
    assert match(before, asked_again).verdict == "same"  # the last of one key holds


def test_rows_say_what_was_right_where_the_replies_are_not_kept() -> None:
    """The committed grids are without samples.jsonl."""

    def judged(right: str) -> Any:
        matches = {f"validation-{number}": one == "1" for number, one in enumerate(right)}
        return arm("decode", 1.0, answer_match=right.count("1"), matches=matches)

    def match(base: Any, new: Any) -> Finding:
        return next(found for found in e2e(base, new).findings if found.figure == "answer match")

    found = match(judged("1111111"), judged("0000001"))
    assert (found.verdict, found.base, found.new) == ("worse", "7/7", "1/7")
    assert match(judged("1111111"), judged("1111111")).verdict == "same"


@pytest.mark.parametrize(("value", "text"), [(3.3e-05, "3.3e-05"), (0.0773, "0.0773"), (0.0, "0.00"), (24.75, "24.75"), (None, "-")])
def test_small_figures_are_no_zeros(value: float | None, text: str) -> None:
    assert _shown(value) == text


def test_runs_of_other_questions_and_no_rate_are_not_equal() -> None:
    """A job whose task was changed does not go on passing."""
    before, after = arm("decode", 10.0), arm("decode", 10.0) | {"equal_tokens": 64}
    old, other = answers("decode", "1111"), answers("decode", "0000", example="other")
    with pytest.raises(SdbenchError, match="judged other questions, and no rate of theirs compares") as refused:
        e2e(before, after, base=old, new=other)
    assert refused.value.exit_code == 5
    # A rate, or one question in common, is something.
    assert e2e(before, arm("decode", 10.0), base=old, new=other).findings
    assert e2e(before, after, base=old, new=[*other, old[0]]).findings


def test_without_answers_nothing_is_said_about_them() -> None:
    assert [found.figure for found in e2e(arm("decode", 1.0), arm("decode", 1.0)).findings] == ["tok/s"]


def test_a_run_that_did_not_complete_is_a_regression_over_one_that_did() -> None:
    whole, broken = (
        saved(outcome, "kernels", [product(1.0)], outcome=outcome, outcome_reason="no luck") for outcome in ("complete", "failed")
    )
    (first, _), warnings = compare(whole, broken, 0.05).findings, compare(whole, broken, 0.05).warnings
    assert (first.verdict, first.label, first.base, first.new, first.reason) == ("broken", "the whole run", "complete", "failed", "no luck")
    assert warnings == ["NEW is not a complete run: failed (no luck)"]
    assert compare(broken, whole, 0.05).regressions == compare(broken, broken, 0.05).regressions == []


def test_what_makes_two_runs_hard_to_compare() -> None:
    base = saved("base", "kernels", [product(1.0)], arguments={"seed": 0, "chain": 36})
    other = {"environment": {"gpu": {"name": "A100"}}, "arguments": {"seed": 1}, "versions": {"torch": "2.13.0"}}
    assert compare(base, saved("new", "kernels", [product(1.0)], **other), 0.05).warnings == [
        "BASE ran on NVIDIA H200 and NEW on A100: times say more about these than about the code",
        "arguments differ: seed 0 in BASE, 1 in NEW",
        "versions differ: torch 2.11.0 in BASE, 2.13.0 in NEW",
    ]
    assert compare(base, base, 0.05).warnings == []


def test_how_much_is_the_machine() -> None:
    linear = [product(time, kernel="dense", variant="linear", pattern=None, layer=layer) for layer, time in (("o", 10.0), ("down", 20.0))]
    slower = [row | {"us": {"p50": row["us"]["p50"] * 1.25}} for row in linear]
    lines = compare(saved("base", "kernels", linear), saved("new", "kernels", slower), 0.05).lines()
    assert lines[1] == "F.linear, which is not sdbench's, runs at 0.800x its speed in BASE: so much is the machine or torch"


@pytest.mark.parametrize(("after", "verdict"), [((2e-8, 4e-8), "same"), ((2e-5, 4e-5), "worse")])
def test_kls_at_rounding_level_are_the_same(after: Any, verdict: str) -> None:
    """Ten times as much rounding is no regression; what was rounding and is more than that is one."""
    base, new = (
        saved(name, "e2e", [arm("int8", None), *fidelity("int8", *kls)], arguments={"fidelity": "only"})
        for name, kls in (("base", (2e-9, 4e-9)), ("new", after))
    )
    comparison = compare(base, new, 0.05)
    (found,) = comparison.findings
    assert (found.verdict, bool(comparison.regressions)) == (verdict, verdict == "worse")
    assert found.reason == "both are rounding of float32 logits" or verdict == "worse"


def test_what_cannot_be_compared() -> None:
    runs = {name: saved(name, name, [product(1.0)]) for name in ("kernels", "tune", "sweep")}
    with pytest.raises(UsageError, match="kernels is a run of 'sdbench kernels' and tune of 'sdbench tune'"):
        compare(runs["kernels"], runs["tune"], 0.05)
    with pytest.raises(UsageError, match="'sdbench sweep', which has no rows to compare; those that do: kernels, tune, e2e"):
        compare(runs["sweep"], runs["sweep"], 0.05)
    with pytest.raises(SdbenchError, match="no row in common") as raised:
        compare(runs["kernels"], saved("new", "kernels", [product(1.0, layer="other")]), 0.05)
    assert raised.value.exit_code == 5


@pytest.mark.parametrize(
    ("before", "after", "verdict", "ratio"),
    [
        ((1.0, 2.0, 3.0, 2.0), (2.0, 4.0, 6.0, 4.0), "worse", 0.5),  # twice as far on every example: the interval is a point
        ((2.0, 4.0, 6.0, 4.0), (1.0, 2.0, 3.0, 2.0), "better", 2.0),
        ((1.0, 3.0, 1.0, 3.0), (3.0, 1.0, 3.0, 1.1), "same", 8 / 8.1),
        ((1.0, 2.0), (1.0, 2.0), "same", 1.0),
        ((1.0,), (2.0,), "no ratio", None),
    ],
)
def test_fidelity_is_compared_on_the_examples_of_both(before: Any, after: Any, verdict: str, ratio: float | None) -> None:
    """An example of one run alone says nothing, however good it is."""
    only = {"arguments": {"fidelity": "only"}}
    base = saved("base", "e2e", [arm("decode", None), *fidelity("decode", *before)], **only)
    new = saved("new", "e2e", [arm("decode", None), *fidelity("decode", *after, 0.0001)], **only)
    comparison = compare(base, new, 0.05)
    (found,) = comparison.findings
    assert (found.verdict, found.figure, found.key) == (verdict, "KL", {"arm": "decode", "prefill": "dense"})
    assert found.ratio == (pytest.approx(ratio) if ratio else None)
    assert (found.base, found.new) == (pytest.approx(sum(before) / len(before)), pytest.approx(sum(after) / len(after)))
    assert bool(comparison.regressions) == (verdict == "worse")
    assert ("within noise" in str(found.reason)) == (verdict == "same" and ratio != 1)
