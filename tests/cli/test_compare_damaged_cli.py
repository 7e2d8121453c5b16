"""``sdbench compare`` on rows that are damaged: one line says file, row and field, and nothing is taken for missing."""

from typing import Any

import pytest

from .test_pool_cli import fidelity
from .test_report_cli import ASKED, CHAIN, E2E, ROWS, SAMPLE, arm, row

NAN = float("nan")
DECODE = {"model": "demo", "pattern": ["2:4"], "device": "cuda"}


def way(rate: float | None, **changes: Any) -> dict[str, Any]:
    """A row of ``sdbench decode``; one without a rate is one that did not run."""
    figures = {
        "decode_rate": {"p20": rate, "p50": rate, "p80": rate} if rate else None,
        "ms_per_token": 1e3 / rate if rate else None,
        **dict.fromkeys(("step_bytes", "gbps", "ceiling", "of_ceiling", "kernels", "ttft_ms", "capture", "memory", "profile")),
    }
    outcome = {"outcome": "correct", "reason": None} if rate else {"outcome": "constraint", "reason": "takes no such model"}
    return {"record": "decode", "arm": "2:4", "path": "fused step", "context": 128, "tokens": 64, **outcome, **figures} | changes


US, RATE = {"p20": 3.0, "p50": 4.0, "p80": 5.0}, {"p20": 90.0, "p50": 100.0, "p80": 110.0}
GOOD: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "kernels": (ASKED, [row("spmv", "lane_row", "o", 4.0), CHAIN]),
    "decode": (DECODE, [way(100.0), way(None, path="eager")]),
    "e2e": (E2E, [arm("dense", 100.0), fidelity("decode", "q1", 0.5, 10)]),
}
NUMBER, INTEGER, FINITE, POSITIVE, THERE = (
    *("Input should be a valid number", "Input should be a valid integer", "Input should be a finite number"),
    *("Input should be greater than or equal to 0", "Field required"),
)


@pytest.mark.parametrize(
    ("command", "number", "changes", "fault"),
    [
        ("kernels", 1, {"us": "4.0"}, "us: Input should be "),
        ("kernels", 1, {"us": US | {"p50": "4.0"}}, f"us.p50: {NUMBER}"),
        ("kernels", 1, {"us": US | {"p50": NAN}}, f"us.p50: {FINITE}"),
        ("kernels", 1, {"us": US | {"p50": None}}, f"us.p50: {NUMBER}"),
        ("kernels", 1, {"us": US | {"p80": -1.0}}, f"us.p80: {POSITIVE}"),
        ("kernels", 1, {"us": {"p20": 3.0, "p80": 5.0}}, f"us.p50: {THERE}"),
        ("kernels", 1, {"us": None}, "us: null, though gbps is not"),
        ("kernels", 1, {"us": ...}, f"us: {THERE}"),
        ("kernels", 1, {"outcome": None}, "outcome: Input should be a valid string"),
        ("kernels", 1, {"tokens": "1"}, f"tokens: {INTEGER}"),
        ("kernels", 2, {"us": US | {"p50": "fast"}}, f"us.p50: {NUMBER}"),
        ("kernels", 2, {"us": None}, "us: null, though gbps is not"),
        ("kernels", 2, {"kernel": ...}, f"kernel: {THERE}"),
        ("decode", 1, {"decode_rate": "fast"}, "decode_rate: Input should be "),
        ("decode", 1, {"decode_rate": RATE | {"p50": "fast"}}, f"decode_rate.p50: {NUMBER}"),
        ("decode", 1, {"decode_rate": RATE | {"p50": -100.0}}, f"decode_rate.p50: {POSITIVE}"),
        ("decode", 1, {"decode_rate": None}, "decode_rate: null, though ms_per_token is not"),
        ("decode", 1, {"decode_rate": ...}, f"decode_rate: {THERE}"),
        ("decode", 1, {"tokens": ...}, f"tokens: {THERE}"),
        ("e2e", 1, {"decode_rate": "fast"}, f"decode_rate: {NUMBER}"),
        ("e2e", 1, {"decode_rate": NAN}, f"decode_rate: {FINITE}"),
        ("e2e", 1, {"decode_rate": None}, "decode_rate: null, though decode_rate_spread is not"),
        ("e2e", 1, {"decode_rate_spread": RATE | {"p20": "low"}}, f"decode_rate_spread.p20: {NUMBER}"),
        ("e2e", 1, {"equal_tokens": ...}, f"equal_tokens: {THERE}"),
        ("e2e", 1, {"eos": None}, "eos: null, though examples is not"),
        ("e2e", 1, {"eos": -1}, f"eos: {POSITIVE}"),
        ("e2e", 1, {"answer_match": None, "graded": 4}, "answer_match: null, though graded is not"),
        ("e2e", 1, {"matches": {"q1": "yes"}}, "matches.q1: Input should be a valid boolean"),
        ("e2e", 1, {"kernel_calls": "many"}, f"kernel_calls: {INTEGER}"),
        ("e2e", 2, {"kl": None}, f"kl: {NUMBER}"),
        ("e2e", 2, {"kl": "small"}, f"kl: {NUMBER}"),
        ("e2e", 2, {"kl": -0.5}, f"kl: {POSITIVE}"),
        ("e2e", 2, {"kl": ...}, f"kl: {THERE}"),
        ("e2e", 2, {"positions": 0}, "positions: Input should be greater than or equal to 1"),
    ],
)
def test_a_damaged_row_is_told(command, number, changes, fault, sdbench, saved_run):
    """A change to ``...`` takes the field out."""
    arguments, rows = GOOD[command]
    spoilt = list(rows)
    spoilt[number - 1] = {name: value for name, value in (rows[number - 1] | changes).items() if value is not ...}
    saved_run("good", command, arguments, rows)
    saved_run("bad", command, arguments, spoilt)
    assert sdbench("compare", "good", "good").code == 0
    for runs in (("bad", "good"), ("good", "bad")):
        told = f"bad/rows.jsonl, line {number}: a row of kind '{rows[number - 1]['record']}' with a fault ({fault}"
        sdbench("compare", *runs).refuses(1, told, "take the line out, and the run's command with this --output measures it again")


def test_a_damaged_sample_is_told(sdbench, saved_run):
    sample = SAMPLE | {"arm": "dense", "example": "q1"}
    rows = [arm("dense", 100.0, examples=1)]
    saved_run("good", "e2e", E2E, rows, [sample])
    for name, changes, fault in (
        ("text", {"match": "yes"}, "match: Input should be a valid boolean"),
        ("hash", {"prompt_hash": None}, "prompt_hash: Input should be a valid string"),
    ):
        saved_run(name, "e2e", E2E, rows, [sample | changes])
        sdbench("compare", "good", name).refuses(1, f"{name}/samples.jsonl, line 1: a sample with a fault ({fault})")


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        ("kernels", [row("spmv", "lane_row", "o", None, us_reason="no GPU"), row("spmv", "nibble", "o", None, outcome="constraint")]),
        ("kernels", [row("spmv", "lane_row", "o", 4.0, roofline=None, us={"p20": None, "p50": 4.0, "p80": None})]),
        ("kernels", [CHAIN | {"us": None, "gbps": None, "us_reason": "no room", "speedup": {"linear": None, "dense": None}}, ROWS[0]]),
        ("decode", [way(None), way(100.0, context=256)]),
        ("e2e", [arm("dense", None, equal_tokens=None), arm("decode", 10.0)]),
        ("e2e", [arm("dense", 9.0, examples=0, answer_match=None, eos=None, truncated=None, matches=None, quality_reason="random")]),
        ("e2e", [arm("dense", 9.0, graded=0, answer_match=None, matches={"q1": None})]),
    ],
)
def test_what_a_run_itself_leaves_null_is_good(command, rows, sdbench, saved_run):
    saved_run("run", command, GOOD[command][0], rows)
    assert sdbench("compare", "run", "run").code == 0
