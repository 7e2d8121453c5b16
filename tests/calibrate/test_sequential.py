"""Sequential calibration against the one-pass collector on models whose earlier blocks are pruned by hand."""

import weakref
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from sdbench.calibrate import replay
from sdbench.calibrate.collect import LayerStatistics, StatisticsKind
from sdbench.calibrate.in_place import weights_in_place
from sdbench.calibrate.methods import METHODS, Pruned, prune_linears
from sdbench.calibrate.replay import collect, collect_sums
from sdbench.calibrate.select import select_linears
from sdbench.calibrate.sequential import collect_by_block, find_blocks, prune_sequentially
from sdbench.calibrate.sources import CalibrationText
from sdbench.errors import CheckFailed, SdbenchError, UsageError
from sdbench.pattern import Pattern

TWO_FOUR = Pattern(2, 4)
TEXTS = [
    CalibrationText(tuple(range(4, 60)), tuple(range(20, 56))),
    CalibrationText((5, 6), ()),
    CalibrationText(tuple(range(60, 120)), tuple(range(60))),
]


def one_pass(model: PreTrainedModel, method: str) -> dict[str, Pruned]:
    linears = select_linears(model)
    statistics = collect(model, linears, TEXTS, "hessian")
    return dict(prune_linears(linears, statistics, TWO_FOUR, method))


def equal(one: Pruned, other: Pruned) -> bool:
    return torch.equal(one.weight, other.weight) and torch.equal(one.keep, other.keep) and one.report == other.report


@pytest.mark.parametrize("fixture", ["tiny_qwen3", "tiny_llama"])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_the_second_block_is_calibrated_on_the_pruned_first(fixture: str, method: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(fixture)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    linears = select_linears(model)
    found = dict(prune_sequentially(model, linears, TEXTS, TWO_FOUR, method))
    assert list(found) == list(linears)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    dense = one_pass(model, method)
    half = deepcopy(model)
    with torch.no_grad():
        for name, linear in select_linears(half, ["model.layers.0.*"]).items():
            linear.weight.copy_(found[name].weight)
    half_pruned = one_pass(half, method)
    for name in linears:
        if name.startswith("model.layers.0."):
            assert equal(found[name], dense[name])
        else:
            assert equal(found[name], half_pruned[name]), name
    differing = [name for name in linears if not torch.equal(found[name].keep, dense[name].keep)]
    assert {name.split(".")[2] for name in differing} == {"1"} and len(differing) >= 5


def test_one_block_is_one_pass(tiny_llama: PreTrainedModel) -> None:
    tiny_llama.model.layers = tiny_llama.model.layers[:1]
    found = dict(prune_sequentially(tiny_llama, select_linears(tiny_llama), TEXTS, TWO_FOUR, "sparsegpt"))
    for name, expected in one_pass(tiny_llama, "sparsegpt").items():
        assert equal(found[name], expected)


def test_statistics_of_one_block_at_a_time(tiny_qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block 1's Hessians are not collected before block 0 is pruned, and the model is whole whenever the caller holds a result."""
    asked: list[str] = []

    def spy(weight: Tensor, statistics: LayerStatistics | None, pattern: Pattern, layer: str) -> Pruned:
        asked.append(layer)
        return METHODS["magnitude"].prune(weight, statistics, pattern, layer)

    monkeypatch.setitem(METHODS, "spy", type(METHODS["wanda"])("", "sum_sq", spy))
    linears = select_linears(tiny_qwen3)
    originals = {name: linear.weight.clone() for name, linear in linears.items()}
    for number, (name, _) in enumerate(prune_sequentially(tiny_qwen3, linears, TEXTS, TWO_FOUR, "spy"), start=1):
        assert len(asked) == number and asked[-1] == name
        assert all(torch.equal(linear.weight, originals[key]) for key, linear in linears.items())


@pytest.mark.parametrize("fixture", ["tiny_qwen3", "tiny_llama"])
@pytest.mark.parametrize("kind", ["sum_sq", "hessian"])
def test_a_block_at_a_time_gives_the_sums_of_the_whole_model(
    fixture: str, kind: StatisticsKind, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = request.getfixturevalue(fixture)
    linears = select_linears(model)
    for positions in (1, 8192):
        monkeypatch.setattr(replay, "BATCH_POSITIONS", positions)
        turns = list(collect_by_block(model, linears, TEXTS, kind, "late"))
        assert [len(sums) for sums in turns] == [7, 7]
        expected = collect_sums(model, linears, TEXTS, kind, weighting="late")
        for name, sums in (turns[0] | turns[1]).items():
            assert torch.equal(sums.total, expected[name].total), name
            assert (sums.rows, sums.weight) == (expected[name].rows, expected[name].weight) == (96, pytest.approx(96.0))
    # The blocks are themselves again.
    assert all("forward" not in vars(block) for block in model.model.layers)
    # A block without layers is passed through.
    (second,) = collect_by_block(model, select_linears(model, ["model.layers.1.*"]), TEXTS, kind, "late")
    assert all(torch.equal(sums.total, expected[name].total) for name, sums in second.items())


def test_one_block_of_hessians_is_in_memory_at_a_time(tiny_qwen3: PreTrainedModel) -> None:
    alive: list[weakref.ref[Tensor]] = []
    linears = select_linears(tiny_qwen3)
    for sums in collect_by_block(tiny_qwen3, linears, TEXTS, "hessian"):
        assert not any(total() is not None for total in alive)
        alive = [weakref.ref(layer.total) for layer in sums.values()]
        sums.clear()


def test_layers_left_out_stay_dense(tiny_qwen3: PreTrainedModel) -> None:
    linears = select_linears(tiny_qwen3, ["model.layers.1.*.down_proj"])
    (found,) = prune_sequentially(tiny_qwen3, linears, TEXTS, TWO_FOUR, "wanda")
    assert equal(found[1], one_pass(tiny_qwen3, "wanda")[found[0]])


def test_row_weights_reach_the_statistics(tiny_llama: PreTrainedModel) -> None:
    linears = select_linears(tiny_llama, ["model.layers.0.*.q_proj"])
    ((name, found),) = prune_sequentially(tiny_llama, linears, TEXTS, TWO_FOUR, "sparsegpt", "late")
    statistics = collect(tiny_llama, linears, TEXTS, "hessian", weighting="late")
    expected = dict(prune_linears(linears, statistics, TWO_FOUR, "sparsegpt"))[name]
    assert torch.equal(found.weight, expected.weight)


def test_magnitude_needs_no_statistics(tiny_llama: PreTrainedModel) -> None:
    linears = select_linears(tiny_llama)
    found = dict(prune_sequentially(tiny_llama, linears, TEXTS, TWO_FOUR, "magnitude"))
    assert all(equal(found[name], pruned) for name, pruned in prune_linears(linears, {}, TWO_FOUR, "magnitude"))


def test_what_cannot_be_walked_is_refused(tiny_llama: PreTrainedModel) -> None:
    linears = select_linears(tiny_llama)
    with pytest.raises(SdbenchError, match="layer lm_head: outside of the model's list of blocks"):
        prune_sequentially(tiny_llama, linears | {"lm_head": tiny_llama.lm_head}, TEXTS, TWO_FOUR, "wanda")
    with pytest.raises(UsageError, match="unknown method"):
        prune_sequentially(tiny_llama, linears, TEXTS, TWO_FOUR, "wnada")
    with pytest.raises(SdbenchError, match="no calibration text has a row"):
        next(prune_sequentially(tiny_llama, linears, TEXTS[1:2], TWO_FOUR, "wanda"))
    assert list(find_blocks(tiny_llama, linears)) == ["model.layers.0", "model.layers.1"]


def test_a_model_that_works_between_its_blocks_is_refused(tiny_llama: PreTrainedModel) -> None:
    linears = select_linears(tiny_llama)
    doubled = tiny_llama.model.layers[1].register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2, *inputs[1:]))
    with pytest.raises(CheckFailed, match=r"model\.layers\.1 gets other hidden states than model\.layers\.0 gives"):
        next(prune_sequentially(tiny_llama, linears, TEXTS, TWO_FOUR, "wanda"))
    doubled.remove()
    assert isinstance(tiny_llama.config, LlamaConfig)
    tiny_llama.model.layers[1] = tiny_llama.model.layers[0]
    with pytest.raises(CheckFailed, match=r"model\.layers\.0 ran 2 times in 1 forwards"):
        next(prune_sequentially(tiny_llama, linears, TEXTS, TWO_FOUR, "wanda"))


def test_swapped_weights_come_back_after_an_error() -> None:
    linear = nn.Linear(2, 2)
    parameter, original = linear.weight, linear.weight.clone()
    with pytest.raises(RuntimeError), weights_in_place({"a": linear, "b": linear}, {"a": torch.zeros(2, 2)}):
        assert linear.weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]
        raise RuntimeError
    assert linear.weight is parameter and torch.equal(linear.weight, original)
