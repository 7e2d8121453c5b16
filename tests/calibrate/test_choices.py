from typing import Any

import pytest

from sdbench.calibrate.choices import CalibrationChoices, parse_count, parse_mix
from sdbench.errors import UsageError


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"sink": 0}, "--sink-tokens is 0; it must be at least 1"),
        ({"first": 0}, "--first-decode is 0"),
        ({"last": -1}, "--last-decode is -1"),
        ({"tokens": 0}, "--calibration-tokens is 0"),
        ({"window": 0}, "--text-window is 0"),
        ({"temperature": 1.0, "top_k": 0}, "--top-k is 0"),
        ({"first": 1, "last": 1}, "--first-decode and --last-decode exclude each other"),
        ({"weighting": "middle"}, "--token-weighting 'middle': choose uniform, early, late"),
        ({"mix": (("decode", 0.0),)}, "--mix decode=0: a weight is a positive number"),
        ({"mix": (("decode", float("nan")),)}, "--mix decode=nan: a weight is a positive number"),
        ({"mix": (("decode", 1.0), ("decode", 2.0))}, "--mix names decode twice"),
        ({"temperature": -0.1}, "--temperature is -0.1"),
        ({"temperature": float("inf")}, "--temperature is inf"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p is 0"),
        ({"temperature": 1.0, "top_p": 1.1}, "--top-p is 1.1"),
        ({"top_k": 5}, "give a --temperature above 0 too"),
        ({"top_p": 0.5}, "give a --temperature above 0 too"),
    ],
)
def test_what_makes_no_sense_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CalibrationChoices(**choices)


@pytest.mark.parametrize(("text", "number"), [("65536", 65536), ("64k", 64000), ("64K", 64000), ("1M", 1_000_000), ("1m", 1_000_000)])
def test_counts(text: str, number: int) -> None:
    assert parse_count(text, "--calibration-tokens") == number


@pytest.mark.parametrize("text", ["", "k", "1.5M", "-1", "1G", "1e6", "one"])
def test_no_counts(text: str) -> None:
    with pytest.raises(UsageError, match=r"--calibration-tokens .*: write a whole number"):
        parse_count(text, "--calibration-tokens")


def test_mix() -> None:
    assert parse_mix(["decode+sink=3", "prefill=0.5"]) == (("decode+sink", 3.0), ("prefill", 0.5))
    assert parse_mix([]) == ()
    for text in ("decode", "=1", "decode=", "decode=much"):
        with pytest.raises(UsageError, match="write SOURCE=WEIGHT"):
            parse_mix([text])
