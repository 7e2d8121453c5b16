import pytest
import torch
from transformers import PreTrainedModel

from sdbench.calibrate import replay
from sdbench.calibrate.choices import Weighting
from sdbench.calibrate.collect import Collector
from sdbench.calibrate.replay import collect, collect_sums, replay_difference, row_weights
from sdbench.calibrate.select import select_linears
from sdbench.calibrate.sources import CalibrationText, make_text
from sdbench.engine.greedy import greedy
from sdbench.errors import SdbenchError


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

    monkeypatch.setattr("sdbench.calibrate.replay.make_text", off_by_one)
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


@pytest.mark.parametrize("fixture", ["tiny_qwen3", "tiny_llama"])
@pytest.mark.parametrize("weighting", ["uniform", "late"])
def test_padded_batches_are_the_texts_one_by_one(
    fixture: str, weighting: Weighting, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = request.getfixturevalue(fixture)
    linears = select_linears(model)
    texts = [CalibrationText(tuple(range(5, 5 + length)), tuple(range(length // 2, length))) for length in (40, 7, 23, 8)]
    widths: list[tuple[int, ...]] = []
    found = {}
    for positions in (64, 1):
        monkeypatch.setattr(replay, "BATCH_POSITIONS", positions)
        with model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: widths.append(tuple(inputs[0].shape))):
            found[positions] = collect_sums(model, linears, texts, "hessian", weighting=weighting)
    # The longest first: 40 alone, 23 with 8 beside it, and 7, for which 3 * 23 has no room.
    assert widths == [(1, 40), (2, 23), (1, 7), (1, 40), (1, 23), (1, 8), (1, 7)]
    for name, sums in found[64].items():
        alone = found[1][name]
        assert sums.rows == alone.rows == sum(len(text.rows) for text in texts)
        assert sums.weight == pytest.approx(sums.rows)
        assert float((sums.total - alone.total).norm() / alone.total.norm()) < 1e-6


def test_a_model_that_gives_all_logits_gets_one_text_at_a_time(tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_fixed", lambda model: {})
    assert [len(batch.ids) for batch in replay.batches(tiny_llama, [CalibrationText((5, 6), (0,))] * 3, "uniform")] == [1, 1, 1]


def test_row_weights_have_mean_one_and_rise_or_fall_evenly() -> None:
    text = CalibrationText((5, 6, 7, 8, 9), (1, 2, 4))
    assert row_weights(text, "uniform").tolist() == [[False, True, True, False, True]]
    assert row_weights(text, "late").tolist() == [[0.0, 0.5, 1.0, 0.0, 1.5]]
    assert row_weights(text, "early").tolist() == [[0.0, 1.5, 1.0, 0.0, 0.5]]


@pytest.mark.parametrize("kind", ["sum_sq", "hessian"])
def test_weighted_rows(tiny_llama: PreTrainedModel, kind: str) -> None:
    """Rows 1 and 2 at 2/3 and 4/3 of two: one third and two thirds of the mean square."""
    linears = select_linears(tiny_llama, ["model.layers.0.*.q_proj"])
    ids = (5, 6, 7)
    one, two = (collect(tiny_llama, linears, [CalibrationText(ids, (row,))], kind) for row in (1, 2))
    both = collect(tiny_llama, linears, [CalibrationText(ids, (1, 2))], kind, weighting="late")
    for name, layer in both.items():
        assert layer.rows == 2
        torch.testing.assert_close(layer.sum_sq, one[name].sum_sq / 3 + two[name].sum_sq * 2 / 3)
        if kind == "hessian":
            torch.testing.assert_close(layer.hessian, one[name].hessian / 3 + two[name].hessian * 2 / 3)
