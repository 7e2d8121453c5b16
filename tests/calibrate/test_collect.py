"""The collector, most of it through the greedy loop on tiny random models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from sdbench.calibrate.collect import Collector, LayerStatistics, StatisticsKind, add_rows
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
        Collector(model, linears, {"decoding"}, "sum_sq")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(SdbenchError, match="name prefill, decode or both"):
        Collector(model, linears, set(), "sum_sq")
    with pytest.raises(SdbenchError, match="'norms'"):
        Collector(model, linears, {"decode"}, "norms")  # type: ignore[arg-type]  # wrong on purpose


class Fork(nn.Module):
    """Two linears of one input, and a third of another."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 3, bias=False) for _ in range(3))
        self.own = False

    def forward(self, inputs: Tensor) -> Tensor:
        return self.one(inputs) + self.two(inputs + 1 if self.own else inputs) + self.three(inputs * 2)


def fork_collector(model: Fork) -> Collector:
    return Collector(model, {name: getattr(model, name) for name in ("one", "two", "three")}, {"decode"}, "hessian")


def test_linears_of_one_input_share_their_sums() -> None:
    model = Fork()
    collector = fork_collector(model)
    inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    with collector:
        for part in inputs.split(1):
            with phase("decode"):
                model(part)
    sums, found = collector.sums(), collector.statistics()
    assert sums["one"].total is sums["two"].total and sums["one"].total is not sums["three"].total
    assert found["one"].hessian is found["two"].hessian and found["two"].name == "two"
    rows = inputs.reshape(6, 4)
    for name, expected in (("one", rows.T @ rows), ("two", rows.T @ rows), ("three", 4 * rows.T @ rows)):
        assert sums[name].rows == sums[name].weight == 6
        torch.testing.assert_close(sums[name].total, expected)


def test_a_tensor_that_was_changed_in_place_is_another_input() -> None:
    model = Fork()

    def spoil(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        inputs[0].add_(1.0)

    model.one.register_forward_hook(spoil)
    collector = fork_collector(model)
    with torch.no_grad(), collector, phase("decode"):
        model(torch.zeros(1, 1, 4))
    sums = collector.sums()
    assert sums["one"].total.sum() == 0 and sums["two"].total.tolist() == [[1.0] * 4] * 4


def test_linears_that_no_longer_share_their_input_are_refused() -> None:
    model = Fork()
    collector = fork_collector(model)
    with collector:
        with phase("decode"):
            model(torch.ones(1, 1, 4))
        model.own = True
        with phase("decode"), pytest.raises(SdbenchError, match="layer two: shared its input with one in the first forward"):
            model(torch.ones(1, 1, 4))


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("kind", ["sum_sq", "hessian"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_mask_is_looked_at_once_a_forward_and_not_in_each_layer(
    kind: StatisticsKind, weighted: bool, tiny_qwen3: PreTrainedModel
) -> None:
    counts = torch.tensor([[0, 1, 1, 0, 1]])
    rows = counts.float() if weighted else counts.bool()
    ids = torch.tensor([FIVE])
    reads = []
    for linears in ({}, select_linears(tiny_qwen3)):
        with torch.no_grad(), Reads() as seen, Collector(tiny_qwen3, linears, {"prefill"}, kind), phase("prefill", rows):
            tiny_qwen3(input_ids=ids, use_cache=False)
        reads.append(seen.count)
    assert reads[1] - reads[0] <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_products_on_tensor_cores_are_as_good_as_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8191, 2560, generator=generator).to(dtype).cuda()
    expected = rows.double().T @ rows.double()
    errors = []
    for weights in (None, torch.ones(len(rows), device="cuda")):
        total = torch.zeros(2560, 2560, device="cuda")
        add_rows(total, rows, weights)
        errors.append(float((total - expected).norm() / expected.norm()))
    assert errors[0] < 1e-5 and errors[1] < 1e-5, errors
