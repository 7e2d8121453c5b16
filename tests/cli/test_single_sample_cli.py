"""Runs that timed each arm once: no spread is printed, and none is compared with."""

import json

import pytest

from .test_report_cli import E2E, arm


@pytest.fixture
def timed_once(saved_run):
    """Two runs of which the second has half the rate."""
    for name, rate in (("base", 100.0), ("new", 50.0)):
        saved_run(name, "e2e", E2E | {"rate_repeats": 1}, [arm("dense", rate), arm("decode", rate)])


def test_a_report_has_no_spread_of_one_sample(sdbench, timed_once, saved_run):
    shown = sdbench("report", "base").out
    assert "p20" not in shown and "on every arm, timed once; x dense" in shown
    spread = {"decode_rate_spread": {"p20": 99.0, "p50": 100.0, "p80": 101.5}}
    saved_run("three", "e2e", E2E | {"rate_repeats": 3}, [arm("dense", 100.0, **spread), arm("decode", 100.0)])
    shown = sdbench("report", "three").out
    assert "tok/s, p20 to p80: dense 99.0 to 101.5\n" in shown and "on every arm, median of 3; x dense" in shown


def test_half_the_rate_by_one_sample_each_is_told_and_fails_nothing(sdbench, timed_once):
    done = sdbench("compare", "base", "new")
    assert (done.code, done.err) == (0, "")
    rows = [" ".join(line.split()) for line in done.out.splitlines() if "tok/s" in line]
    why = "slower, not judged: one sample alone, and so no spread, in BASE and NEW"
    assert rows == [f"not judged {name} tok/s 100.00 - 50.00 - 0.500 {why}" for name in ("dense", "decode 2:4 wanda")]
    whole = json.loads(sdbench("compare", "base", "new", "--json").out)
    assert whole["regressions"] == 0
    rates = [row for row in whole["rows"] if row["figure"] == "tok/s"]
    assert [(row["verdict"], row["ratio"], row["base_spread"]) for row in rates] == [("not judged", 0.5, None)] * 2
