from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sdbench.calibrate import magnitude, sparsegpt, wanda
from sdbench.calibrate.collect import LayerStatistics
from sdbench.calibrate.methods import METHODS, prune_linears
from sdbench.calibrate.replay import collect
from sdbench.calibrate.select import select_linears
from sdbench.calibrate.sources import CalibrationText
from sdbench.errors import SdbenchError, UsageError
from sdbench.pattern import Pattern

TWO_FOUR = Pattern(2, 4)
TEXTS = [CalibrationText(tuple(range(4, 60)), tuple(range(56))), CalibrationText(tuple(range(60, 120)), tuple(range(60)))]


def snapshot(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pattern", [TWO_FOUR, Pattern(3, 8), Pattern(16, 32)], ids=str)
def test_case_16_every_method_prunes_exactly_and_leaves_the_tied_model_alone(
    tiny_qwen3: PreTrainedModel, method: str, pattern: Pattern
) -> None:
    before = snapshot(tiny_qwen3)
    linears = select_linears(tiny_qwen3)
    needs = METHODS[method].needs
    statistics = {} if needs == "none" else collect(tiny_qwen3, linears, TEXTS, needs)
    pruned = dict(prune_linears(linears, statistics, pattern, method))
    assert list(pruned) == list(linears)
    assert "lm_head" not in pruned
    for name, result in pruned.items():
        weight = linears[name].weight
        assert result.weight.shape == result.keep.shape == weight.shape and result.weight.dtype == weight.dtype
        assert bool((result.keep.view(len(weight), -1, pattern.group).sum(-1) == pattern.keep).all())
        assert bool((result.weight[~result.keep] == 0).all())
        assert not result.weight.requires_grad
    after = tiny_qwen3.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert tiny_qwen3.lm_head.weight is tiny_qwen3.get_input_embeddings().weight


def test_each_method_is_its_own_function(tiny_llama: PreTrainedModel) -> None:
    linears = select_linears(tiny_llama, ["down_proj"])
    statistics = collect(tiny_llama, linears, TEXTS, "hessian")
    for name, linear in linears.items():
        weight, layer = linear.weight.detach(), statistics[name]
        assert layer.hessian is not None
        masks = {
            "magnitude": magnitude.keep_mask(weight, TWO_FOUR),
            "wanda": wanda.keep_mask(weight, layer.sum_sq, TWO_FOUR),
            "sparsegpt": sparsegpt.prune(weight, layer.hessian, TWO_FOUR)[1],
        }
        results = {method: dict(prune_linears({name: linear}, statistics, TWO_FOUR, method))[name] for method in METHODS}
        for method, mask in masks.items():
            assert torch.equal(results[method].keep, mask)
        assert not torch.equal(masks["magnitude"], masks["wanda"])
        for method in ("magnitude", "wanda"):
            assert torch.equal(results[method].weight, weight * masks[method])
        assert results["magnitude"].report == {}
        assert results["wanda"].report == {"rows": 116}
        assert results["sparsegpt"].report == {"rows": 116, "damp": 0.01, "damp_used": 0.01, "damp_by": "mean", "dead_columns": 0}
        assert results["sparsegpt-median"].report["damp_by"] == "median"


def test_layers_of_one_hessian_are_pruned_together_and_come_out_as_alone(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    linears = select_linears(tiny_llama, ["model.layers.0.*"])
    statistics = collect(tiny_llama, linears, TEXTS, "hessian")
    alone = {name: dict(prune_linears({name: linear}, statistics, TWO_FOUR, "sparsegpt"))[name] for name, linear in linears.items()}
    calls: list[list[str]] = []
    together = sparsegpt.prune_together

    def spy(weights: dict[str, Tensor], *arguments: Any, **options: Any) -> Any:
        calls.append([name.rpartition(".")[2] for name in weights])
        return together(weights, *arguments, **options)

    monkeypatch.setattr(sparsegpt, "prune_together", spy)
    for name, result in prune_linears(linears, statistics, TWO_FOUR, "sparsegpt"):
        assert torch.equal(result.weight, alone[name].weight) and result.report == alone[name].report
    assert calls == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_unknown_method_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown method 'wandaa'; did you mean wanda"):
        prune_linears({}, {}, TWO_FOUR, "wandaa")


def test_case_6_all_widths_are_checked_before_the_first_layer(tiny_llama: PreTrainedModel) -> None:
    linears = select_linears(tiny_llama, ["down_proj"])
    linears["odd"] = torch.nn.Linear(10, 4)
    with pytest.raises(UsageError, match=r"layer odd: in_features 10 .*M=4"):
        prune_linears(linears, {}, TWO_FOUR, "magnitude")  # nothing has been asked of the iterator


@pytest.mark.parametrize(("method", "kind"), [("wanda", "sum_sq"), ("sparsegpt", "hessian")])
def test_missing_statistics_name_the_layer(method: str, kind: str) -> None:
    linears = {"up": torch.nn.Linear(4, 4)}
    with pytest.raises(SdbenchError, match=f"layer up: the method needs a {kind}"):
        dict(prune_linears(linears, {}, TWO_FOUR, method))
    if kind == "hessian":
        with pytest.raises(SdbenchError, match="layer up: the method needs a hessian"):
            dict(prune_linears(linears, {"up": LayerStatistics("up", 1, torch.ones(4))}, TWO_FOUR, method))


def test_case_12_nan_weight_of_a_model_names_the_layer(tiny_llama: PreTrainedModel) -> None:
    linears = select_linears(tiny_llama, ["up_proj"])
    with torch.no_grad():
        linears["model.layers.1.mlp.up_proj"].weight[3, 5] = float("nan")
    with pytest.raises(SdbenchError, match=r"layer model\.layers\.1\.mlp\.up_proj: weight\[3, 5\] is nan"):
        dict(prune_linears(linears, {}, TWO_FOUR, "magnitude"))
