import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from sdbench.calibrate.collect import Collector
from sdbench.calibrate.select import select_linears
from sdbench.calibrate.sources import SOURCES, CalibrationText, collect, equalise, make_text, replay_difference
from sdbench.engine.greedy import greedy
from sdbench.errors import SdbenchError, UsageError

PROMPT, REPLY, REFERENCE = (10, 11, 12), (20, 21, 22, 2), (30, 31)


@pytest.mark.parametrize(
    ("source", "ids", "rows"),
    [
        # A reply of 4 tokens is fed in 3 times: its last token comes out and nothing follows (CASES 14).
        ("decode", (10, 11, 12, 20, 21, 22), (3, 4, 5)),
        ("decode+sink", (10, 11, 12, 20, 21, 22), (0, 3, 4, 5)),
        ("self", (10, 11, 12, 20, 21, 22, 2), tuple(range(7))),
        ("teacher-forced", (10, 11, 12, 30, 31), tuple(range(5))),
        ("prefill", (10, 11, 12), (0, 1, 2)),
    ],
)
def test_text_and_rows_of_each_source(source: str, ids: tuple[int, ...], rows: tuple[int, ...]) -> None:
    assert make_text(source, PROMPT, reply=REPLY, reference=REFERENCE) == CalibrationText(ids, rows)


def test_a_reply_of_one_token_has_no_decode_row() -> None:
    assert make_text("decode", PROMPT, reply=(2,)) == CalibrationText(PROMPT, ())
    assert make_text("decode+sink", PROMPT, reply=(2,)) == CalibrationText(PROMPT, (0,))


def test_unknown_source_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown calibration source 'teacher_forced'; did you mean teacher-forced"):
        make_text("teacher_forced", PROMPT)


@pytest.mark.parametrize("source", SOURCES)
def test_missing_ingredients_are_named(source: str) -> None:
    needs = SOURCES[source]
    if needs.needs_reply:
        with pytest.raises(SdbenchError, match=rf"{source.replace('+', '.')}: needs a reply"):
            make_text(source, PROMPT, reference=REFERENCE)
    elif needs.needs_reference:
        with pytest.raises(SdbenchError, match=f"{source}: needs a reference answer"):
            make_text(source, PROMPT, reply=REPLY)
    else:
        assert make_text(source, PROMPT).ids == PROMPT
    with pytest.raises(SdbenchError, match="the prompt has no token"):
        make_text(source, (), reply=REPLY, reference=REFERENCE)


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


def test_equalise_refuses_different_examples() -> None:
    text = CalibrationText((1,), (0,))
    with pytest.raises(SdbenchError, match="'decode': 1, 'self': 2"):
        equalise({"decode": [text], "self": [text, text]})


@pytest.mark.parametrize("fixture", ["tiny_qwen3", "tiny_llama"])
def test_replay_equals_live_decode_steps(fixture: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(fixture)
    linears = select_linears(model)
    assert replay_difference(model, linears, [5, 6, 7, 8, 9], max_new_tokens=12, eos_ids=(), ignore_eos=True) < 1e-5
    assert replay_difference(model, linears, [7], max_new_tokens=5, eos_ids=(), ignore_eos=True) < 1e-5


def test_replay_difference_sees_a_wrong_row(tiny_qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(source: str, prompt: tuple[int, ...], *, reply: tuple[int, ...]) -> CalibrationText:
        right = make_text(source, prompt, reply=reply)
        return CalibrationText(right.ids, tuple(row - 1 for row in right.rows))

    monkeypatch.setattr("sdbench.calibrate.sources.make_text", off_by_one)
    assert replay_difference(tiny_qwen3, select_linears(tiny_qwen3), [5, 6, 7], max_new_tokens=6, eos_ids=(), ignore_eos=True) > 1e-3


def test_collect_sums_several_texts_like_one_live_batch(tiny_qwen3: PreTrainedModel) -> None:
    linears = select_linears(tiny_qwen3)
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    live = Collector(tiny_qwen3, linears, {"decode"}, "hessian")
    with live:
        replies = greedy(tiny_qwen3, prompts, max_new_tokens=6, eos_ids=(), ignore_eos=True)
    texts = [make_text("decode", prompt, reply=reply.ids) for prompt, reply in zip(prompts, replies, strict=True)]
    done: list[int] = []
    replayed = collect(tiny_qwen3, linears, texts, "hessian", on_text=done.append)
    assert done == [1, 2]
    for name, layer in live.statistics().items():
        assert replayed[name].rows == layer.rows == 10
        hessian = replayed[name].hessian
        assert hessian is not None and layer.hessian is not None
        assert float((hessian - layer.hessian).norm() / layer.hessian.norm()) < 1e-5
        assert torch.equal(replayed[name].sum_sq, hessian.diagonal())


def test_collect_passes_over_texts_without_rows(tiny_qwen3: PreTrainedModel) -> None:
    linears = select_linears(tiny_qwen3, ["q_proj"])
    texts = [CalibrationText((1, 2), ()), CalibrationText((5, 6, 7), (0, 2))]
    assert {layer.rows for layer in collect(tiny_qwen3, linears, texts, "sum_sq").values()} == {2}
    with pytest.raises(SdbenchError, match="no calibration text has a row"):
        collect(tiny_qwen3, linears, texts[:1], "sum_sq")


def test_collect_computes_the_logits_of_one_position(tiny_llama: PreTrainedModel) -> None:
    shapes: list[tuple[int, ...]] = []
    with tiny_llama.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape))):
        collect(tiny_llama, select_linears(tiny_llama), [CalibrationText((5, 6, 7), (0, 1, 2))], "sum_sq")
    assert shapes == [(1, 1, 128)]
