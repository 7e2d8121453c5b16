from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdbench.calibrate.choices import CalibrationChoices
from sdbench.calibrate.sources import SOURCES, CalibrationText, assign, equalise, make_text, needs, require_sources
from sdbench.errors import SdbenchError, UsageError

PROMPT, REPLY, REFERENCE, WINDOW = (10, 11, 12), (20, 21, 22, 2), (30, 31), (40, 41, 42)


@pytest.mark.parametrize(
    ("source", "ids", "rows"),
    [
        # A reply of 4 tokens is fed in 3 times: its last token comes out and nothing follows (CASES 14).
        ("decode", (10, 11, 12, 20, 21, 22), (3, 4, 5)),
        ("decode+sink", (10, 11, 12, 20, 21, 22), (0, 3, 4, 5)),
        ("self", (10, 11, 12, 20, 21, 22, 2), tuple(range(7))),
        ("teacher-forced", (10, 11, 12, 30, 31), tuple(range(5))),
        ("prefill", (10, 11, 12), (0, 1, 2)),
        ("text", (40, 41, 42), (0, 1, 2)),
    ],
)
def test_text_and_rows_of_each_source(source: str, ids: tuple[int, ...], rows: tuple[int, ...]) -> None:
    assert make_text(source, PROMPT, reply=REPLY, reference=REFERENCE, window=WINDOW) == CalibrationText(ids, rows)


@pytest.mark.parametrize(
    ("source", "choices", "rows"),
    [
        ("decode", {"first": 2}, (3, 4)),
        ("decode", {"last": 2}, (4, 5)),
        ("decode", {"first": 9}, (3, 4, 5)),
        ("decode", {"last": 9}, (3, 4, 5)),
        ("decode+sink", {"sink": 2}, (0, 1, 3, 4, 5)),
        # Positions of the prompt alone: a sink longer than it takes no decode step twice.
        ("decode+sink", {"sink": 5, "last": 1}, (0, 1, 2, 5)),
    ],
)
def test_choices_of_rows(source: str, choices: dict[str, int], rows: tuple[int, ...]) -> None:
    text = make_text(source, PROMPT, reply=REPLY, choices=CalibrationChoices(**choices))
    assert text == CalibrationText((10, 11, 12, 20, 21, 22), rows)


def test_a_reply_of_one_token_has_no_decode_row() -> None:
    assert make_text("decode", PROMPT, reply=(2,)) == CalibrationText(PROMPT, ())
    assert make_text("decode+sink", PROMPT, reply=(2,)) == CalibrationText(PROMPT, (0,))


def test_unknown_source_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown calibration source 'teacher_forced'; did you mean teacher-forced"):
        make_text("teacher_forced", PROMPT)


@pytest.mark.parametrize("source", [source for source in SOURCES if source != "mixed"])
def test_missing_ingredients_are_named(source: str) -> None:
    given = {"reply": REPLY, "reference": REFERENCE, "window": WINDOW}
    need = SOURCES[source].needs
    if need is None:
        assert make_text(source, PROMPT).ids == PROMPT
    else:
        words = {"reply": "a reply of the model", "reference": "a reference answer", "window": "a window of the calibration text"}
        with pytest.raises(SdbenchError, match=rf"{source.replace('+', '.')}: needs {words[need]}, and this example has none"):
            make_text(source, PROMPT, **{name: ids for name, ids in given.items() if name != need})
    with pytest.raises(SdbenchError, match="the prompt has no token"):
        make_text(source, (), **given)


def test_a_mix_shares_the_examples_out_by_weight() -> None:
    choices = CalibrationChoices(mix=(("decode", 3.0), ("prefill", 1.0)))
    order = assign("mixed", 8, choices)
    assert order.count("decode") == 6 and order.count("prefill") == 2
    assert assign("mixed", 5, choices) == order[:5], "a longer draw goes on where a shorter one ends"
    assert assign("decode", 2, choices) == ["decode", "decode"]
    assert needs(["mixed"], choices) == {"reply"} and needs(["prefill"], choices) == set()
    with pytest.raises(SdbenchError, match="each example belongs to one of its parts"):
        make_text("mixed", PROMPT, reply=REPLY)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=4), st.integers(1, 60))
def test_shares_of_a_mix_are_within_one_example(weights: list[float], count: int) -> None:
    names = ["decode", "self", "prefill", "teacher-forced"][: len(weights)]
    order = assign("mixed", count, CalibrationChoices(mix=tuple(zip(names, weights, strict=True))))
    for name, weight in zip(names, weights, strict=True):
        assert abs(order.count(name) - count * weight / sum(weights)) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("sources", "choices", "message"),
    [
        (["decod"], {}, "unknown calibration source 'decod'; did you mean decode"),
        (["mixed"], {}, "name its parts"),
        (["mixed"], {"mix": (("decod", 1.0),)}, "unknown calibration source 'decod'; did you mean decode"),
        (["mixed"], {"mix": (("mixed", 1.0),)}, "a mix is made of other sources"),
        (["mixed"], {"mix": (("text", 1.0),)}, "name a corpus with --calibration-text FILE"),
        (["text"], {}, "name a corpus with --calibration-text FILE"),
        (["decode"], {"mix": (("decode", 1.0),)}, "--mix changes nothing without the calibration source mixed"),
        (["decode"], {"text": Path("a.txt")}, "--calibration-text changes nothing without the calibration source text"),
        (["decode"], {"sink": 2}, r"--sink-tokens changes nothing without the calibration source decode\+sink"),
        (["self"], {"first": 2}, "--first-decode changes nothing"),
        (["self"], {"last": 2}, "--last-decode changes nothing"),
        (["prefill"], {"temperature": 1.0}, "--temperature changes nothing"),
    ],
)
def test_choices_that_do_not_fit_the_sources(sources: list[str], choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        require_sources(sources, CalibrationChoices(**choices))


def test_choices_that_fit() -> None:
    require_sources(["decode", "mixed"], CalibrationChoices(mix=(("text", 1.0), ("decode+sink", 2.0)), text=Path("a"), sink=3, last=4))


@pytest.mark.parametrize("rows", [(3,), (-1,), (1, 0), (1, 1)])
def test_rows_outside_the_text_or_out_of_order_are_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(SdbenchError, match="3 tokens"):
        CalibrationText((1, 2, 3), rows)


def test_equalise_thins_evenly_and_keeps_both_ends_and_the_sink() -> None:
    ids = tuple(range(50))
    texts = {
        "decode": [CalibrationText(ids, tuple(range(40, 45))), CalibrationText(ids, tuple(range(9)))],
        "decode+sink": [CalibrationText(ids, (0, *range(40, 45))), CalibrationText(ids, tuple(range(9)))],
        "self": [CalibrationText(ids, tuple(range(41))), CalibrationText(ids, (1, 5, 7))],
    }
    equal = equalise(texts)
    assert [text.rows for text in equal["decode"]] == [(40, 41, 42, 43, 44), (0, 4, 8)]
    assert equal["decode+sink"][0].rows == (0, 40, 42, 43, 44)
    assert [text.rows for text in equal["self"]] == [(0, 10, 20, 30, 40), (1, 5, 7)]
    assert all(text.ids == ids for source in equal.values() for text in source)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 300), min_size=0, max_size=60, unique=True), min_size=1, max_size=4))
def test_equalise_gives_equal_counts_of_original_rows(choices: list[list[int]]) -> None:
    texts = {str(source): [CalibrationText(tuple(range(301)), tuple(sorted(rows)))] for source, rows in enumerate(choices)}
    count = min(map(len, choices))
    for source, (text,) in equalise(texts).items():
        before = texts[source][0].rows
        assert len(text.rows) == len(set(text.rows)) == count
        assert set(text.rows) <= set(before)
        if count >= 2:
            assert (text.rows[0], text.rows[-1]) == (before[0], before[-1])
            # Evenly spaced: neighbours are the same number of the source's rows apart, up to rounding.
            gaps = [before.index(high) - before.index(low) for low, high in zip(text.rows, text.rows[1:], strict=False)]
            assert max(gaps) - min(gaps) <= 1


def test_equalise_stops_at_a_token_budget() -> None:
    ids = tuple(range(50))
    texts = {
        "decode": [CalibrationText(ids, tuple(range(first, first + 6))) for first in (10, 20, 30)],
        "self": [CalibrationText(ids, tuple(range(40))) for _ in range(3)],
    }
    equal = equalise(texts, tokens=9)
    assert [text.rows for text in equal["decode"]] == [(10, 11, 12, 13, 14, 15), (20, 23, 25)]
    assert [len(text.rows) for text in equal["self"]] == [6, 3]
    assert [len(text.rows) for text in equalise(texts, tokens=18)["self"]] == [6, 6, 6]
    with pytest.raises(SdbenchError, match="rows on every arm: 18 of 3 calibration examples, fewer than --calibration-tokens 19"):
        equalise(texts, tokens=19)


def test_equalise_refuses_different_examples() -> None:
    text = CalibrationText((1,), (0,))
    with pytest.raises(SdbenchError, match="'decode': 1, 'self': 2"):
        equalise({"decode": [text], "self": [text, text]})
