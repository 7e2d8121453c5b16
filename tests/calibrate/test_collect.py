"""The collector, most of it through the greedy loop on tiny random models."""

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sdbench.calibrate.collect import Collector, LayerStatistics, StatisticsKind
from sdbench.calibrate.select import select_linears
from sdbench.engine.greedy import greedy
from sdbench.engine.phase import PhaseName, phase
from sdbench.errors import SdbenchError

FIVE = [5, 6, 7, 8, 9]
NINE = [11, 12, 13, 14, 15, 16, 17, 18, 19]


def rows_of(statistics: dict[str, LayerStatistics]) -> set[int]:
    return {layer.rows for layer in statistics.values()}


def watch(
    model: PreTrainedModel, prompts: list[list[int]], new: int, phases: set[PhaseName], eos_ids: tuple[int, ...] = ()
) -> dict[str, LayerStatistics]:
    collector = Collector(model, select_linears(model), phases, "sum_sq")
    with collector:
        greedy(model, prompts, max_new_tokens=new, eos_ids=eos_ids, ignore_eos=not eos_ids)
    return collector.statistics()


@pytest.mark.parametrize("fixture", ["tiny_qwen3", "tiny_llama"])
def test_case_14_six_decode_rows_for_two_prompts(fixture: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(fixture)
    statistics = watch(model, [FIVE, NINE], 4, {"decode"})
    assert len(statistics) == 14
    assert rows_of(statistics) == {6}


def test_case_14_padding_is_no_prefill_row(tiny_qwen3: PreTrainedModel) -> None:
    assert rows_of(watch(tiny_qwen3, [FIVE, NINE], 4, {"prefill"})) == {14}
    assert rows_of(watch(tiny_qwen3, [FIVE, NINE], 4, {"prefill", "decode"})) == {20}


def test_case_14_a_prompt_of_one_token_is_prefill(tiny_qwen3: PreTrainedModel) -> None:
    assert rows_of(watch(tiny_qwen3, [[7]], 4, {"decode"})) == {3}
    assert rows_of(watch(tiny_qwen3, [[7]], 4, {"prefill"})) == {1}


def test_case_14_a_finished_reply_gives_no_rows(tiny_qwen3: PreTrainedModel) -> None:
    short, long = (reply.ids for reply in greedy(tiny_qwen3, [FIVE, NINE], max_new_tokens=6, eos_ids=(), ignore_eos=True))
    stop = next(token for token in short if token not in long)
    steps = short.index(stop)
    assert steps < 5, "the first reply must end before the second"
    statistics = watch(tiny_qwen3, [FIVE, NINE], 6, {"decode"}, eos_ids=(stop,))
    assert rows_of(statistics) == {steps + 5}
    # And what it holds are those rows: the two replies one by one.
    alone = [watch(tiny_qwen3, [prompt], new, {"decode"}) for prompt, new in ((FIVE, steps + 1), (NINE, 6)) if new > 1]
    for name, layer in statistics.items():
        expected = sum(each[name].sum_sq * each[name].rows for each in alone) / layer.rows
        torch.testing.assert_close(layer.sum_sq, expected, rtol=1e-4, atol=1e-6)


class OneLinear(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.linear = nn.Linear(width, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


def feed(
    model: OneLinear, inputs: Tensor, rows: Tensor | None = None, kind: StatisticsKind = "sum_sq", name: PhaseName = "decode"
) -> LayerStatistics:
    collector = Collector(model, {"linear": model.linear}, {"decode"}, kind)
    with collector, phase(name, rows):
        model(inputs)
    return collector.statistics()["linear"]


def test_sums_are_divided_by_rows() -> None:
    layer = feed(OneLinear(2), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    assert layer.rows == 2 and layer.hessian is None
    assert layer.sum_sq.tolist() == [5.0, 10.0]


def test_hessian_of_counted_rows_and_its_diagonal() -> None:
    inputs = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [float("nan"), 7.0]]])
    layer = feed(OneLinear(2), inputs, torch.tensor([[True, True, False]]), kind="hessian")
    assert layer.hessian is not None
    assert layer.rows == 2
    assert layer.hessian.tolist() == [[5.0, 7.0], [7.0, 10.0]]
    assert layer.sum_sq.tolist() == [5.0, 10.0]


def test_half_precision_inputs_are_summed_in_float32() -> None:
    # 300^2 overflows fp16, and 1 + 1/512 is no bf16 number.
    assert feed(OneLinear().half(), torch.full((1, 1, 4), 300.0, dtype=torch.float16)).sum_sq.tolist() == [90000.0] * 4
    wide = torch.tensor([[[1.0] * 4, [2.0**-4] * 4]], dtype=torch.bfloat16)
    assert feed(OneLinear().bfloat16(), wide).sum_sq.tolist() == [(1 + 2.0**-8) / 2] * 4


def test_flattened_inputs_count_by_position() -> None:
    layer = feed(OneLinear(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0], [1.0, 1.0]]), torch.tensor([[True, False], [False, True]]))
    assert layer.rows == 2 and layer.sum_sq.tolist() == [1.0, 0.5]


def test_reopening_goes_on_counting_and_hooks_are_gone_outside() -> None:
    model = OneLinear(2)
    collector = Collector(model, {"linear": model.linear}, {"decode"}, "sum_sq")
    for value in (1.0, 3.0):
        with collector, phase("decode"):
            model(torch.full((1, 1, 2), value))
        model(torch.full((1, 1, 2), 100.0))
    assert collector.statistics()["linear"].rows == 2
    assert collector.statistics()["linear"].sum_sq.tolist() == [5.0, 5.0]


def test_a_forward_outside_any_phase_is_an_error_and_leaves_no_hook() -> None:
    model = OneLinear()
    with (
        pytest.raises(SdbenchError, match="layer linear: a forward outside of any phase"),
        Collector(model, {"linear": model.linear}, {"decode"}, "sum_sq"),
    ):
        model(torch.ones(1, 1, 4))
    model(torch.ones(1, 1, 4))


def test_case_12_a_layer_without_rows_is_named(tiny_qwen3: PreTrainedModel) -> None:
    with pytest.raises(SdbenchError, match=r"layer model\.layers\.0\.self_attn\.q_proj: no row reached it"):
        watch(tiny_qwen3, [FIVE], 1, {"decode"})
    with pytest.raises(SdbenchError, match="layer linear: no row reached it"):
        feed(OneLinear(), torch.ones(1, 2, 4), torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(SdbenchError, match="layer linear: no row reached it"):
        feed(OneLinear(), torch.ones(1, 2, 4), name="prefill")


@pytest.mark.parametrize("kind", ["sum_sq", "hessian"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_bad_inputs_name_layer_and_column(kind: StatisticsKind, bad: float) -> None:
    inputs = torch.ones(1, 3, 4)
    inputs[0, 1, 2] = bad
    with pytest.raises(SdbenchError, match=r"layer linear: .*column 2"):
        feed(OneLinear(), inputs, kind=kind)


def test_routed_rows_are_refused() -> None:
    with pytest.raises(SdbenchError, match="layer linear: the forward feeds it 3 rows, but the phase marks 2"):
        feed(OneLinear(), torch.ones(3, 4), torch.ones(1, 2, dtype=torch.bool))


def test_what_makes_no_sense_is_refused_at_once() -> None:
    model = OneLinear()
    linears = {"linear": model.linear}
    with pytest.raises(SdbenchError, match="layer linear: not a part of this OneLinear"):
        Collector(OneLinear(), linears, {"decode"}, "sum_sq")
    with pytest.raises(SdbenchError, match="name prefill, decode or both"):
        Collector(model, linears, {"decoding"}, "sum_sq")  # type: ignore[arg-type]
    with pytest.raises(SdbenchError, match="name prefill, decode or both"):
        Collector(model, linears, set(), "sum_sq")
    with pytest.raises(SdbenchError, match="'norms'"):
        Collector(model, linears, {"decode"}, "norms")  # type: ignore[arg-type]
