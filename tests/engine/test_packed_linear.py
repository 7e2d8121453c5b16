"""Packed linears in a live model: the phase says which way they run, decode rows are counted, and the model comes back as it was."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from sdbench.calibrate.magnitude import keep_mask
from sdbench.checkpoints.linear import _compiled_spmm, _compiled_spmv
from sdbench.engine.greedy import greedy
from sdbench.engine.packed_linear import PackedLinear, packed_linears
from sdbench.engine.phase import phase
from sdbench.errors import CheckFailed
from sdbench.kernels.spmm import FEW_TOKENS, spmm
from sdbench.kernels.spmv import BoundSpmv
from sdbench.packing import PackedWeight, pack
from sdbench.pattern import Pattern

PATTERN = Pattern(2, 4)


def packed(weight: torch.Tensor) -> PackedWeight:
    return pack(weight.detach(), keep_mask(weight, PATTERN), PATTERN)


def projections(model: PreTrainedModel) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


@pytest.mark.parametrize("kind", ["tiny_qwen3", "tiny_llama"])
def test_ids_are_those_of_the_pruned_dense_model(kind: str, request: pytest.FixtureRequest) -> None:
    model: PreTrainedModel = request.getfixturevalue(kind)
    weights = {name: packed(linear.weight) for name, linear in projections(model).items()}
    with packed_linears(model, weights, "pruned") as modules:
        (sparse,) = greedy(model, [[5, 9, 11]], max_new_tokens=10, eos_ids=())
        assert sum(module.calls for module in modules.values()) == len(weights) * 9
    for name, linear in projections(model).items():
        linear.weight.data = weights[name].unpack()
    (dense,) = greedy(model, [[5, 9, 11]], max_new_tokens=10, eos_ids=())
    assert sparse.ids == dense.ids


def test_the_phase_decides_and_not_the_number_of_tokens() -> None:
    """A one-token prompt is prefill: on original weights with prefill dense, on pruned ones else; a decode step is pruned always."""
    linear = nn.Linear(8, 3)
    model = nn.Sequential(linear)
    x = torch.randn(1, 1, 8)
    pruned = nn.functional.linear(x, torch.where(keep_mask(linear.weight, PATTERN), linear.weight, 0), linear.bias)
    for prefill, expected in (("pruned", pruned), ("dense", linear(x))):
        # One of both, mypy takes it for any str.
        with torch.no_grad(), packed_linears(model, {"0": packed(linear.weight)}, prefill) as modules:  # type: ignore[arg-type]
            with phase("prefill"):
                assert torch.allclose(model(x), expected, rtol=1e-5, atol=1e-6)
            assert modules["0"].calls == 0
            with phase("decode"):
                assert torch.allclose(model(x), pruned, rtol=1e-5, atol=1e-6)
            assert modules["0"].calls == 1
    assert model[0] is linear


def test_several_rows_are_counted_each() -> None:
    linear = nn.Linear(8, 3, bias=False)
    module = PackedLinear(packed(linear.weight), linear.weight, None)
    x = torch.randn(4, 1, 8)
    with torch.no_grad(), phase("decode"):
        y = module(x)
    assert y.shape == (4, 1, 3)
    assert module.calls == 4
    assert torch.allclose(y.squeeze(1), x.squeeze(1) @ module.packed.unpack().T, rtol=1e-5, atol=1e-6)


def test_outside_a_phase_it_refuses() -> None:
    linear = nn.Linear(8, 3)
    with pytest.raises(RuntimeError, match="outside a phase"):
        PackedLinear(packed(linear.weight), linear.weight, None)(torch.ones(1, 8))


def test_the_model_is_restored_after_an_error(tiny_llama: PreTrainedModel) -> None:
    before = projections(tiny_llama)
    with pytest.raises(KeyboardInterrupt), packed_linears(tiny_llama, {name: packed(m.weight) for name, m in before.items()}, "pruned"):
        raise KeyboardInterrupt
    assert projections(tiny_llama) == before


def test_a_wrong_kernel_never_gets_into_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct before timed: one wrong element of y is enough."""
    linear = nn.Linear(8, 3, bias=False)
    # Fixed rows: the wrong element of y must not happen to be too small to matter.
    linear.weight.data = torch.eye(3, 8) + 1
    model = nn.Sequential(linear)
    right = BoundSpmv.__call__

    def wrong(self: BoundSpmv, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        y = right(self, x, out_dtype)
        y[..., 1] *= 1.001
        return y

    monkeypatch.setattr(BoundSpmv, "__call__", wrong)
    with (
        pytest.raises(CheckFailed, match="layer 0: the reference SpMV is wrong"),
        packed_linears(model, {"0": packed(linear.weight)}, "pruned"),
    ):
        pass
    assert model[0] is linear


def test_a_wrong_product_of_several_tokens_never_gets_into_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 3, bias=False))
    weights = {"0": packed(torch.eye(3, 8) + 1)}
    monkeypatch.setattr(
        "sdbench.engine.packed_linear.BoundSpmm", lambda weight: SimpleNamespace(multiply=lambda x: 1.001 * spmm(weight, x))
    )
    # Decode steps of several prompts ask for it too, whatever the prompts run on.
    for prefill in ("pruned", "dense"):
        with pytest.raises(CheckFailed, match="layer 0: the packed product of 2 tokens is wrong"), packed_linears(model, weights, prefill):
            pass


def test_a_wrong_product_of_a_prompt_never_gets_into_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU another variant takes it than a few tokens."""
    model = nn.Sequential(nn.Linear(8, 3, bias=False))
    weights = {"0": packed(torch.eye(3, 8) + 1)}

    def bound(weight: PackedWeight) -> SimpleNamespace:
        return SimpleNamespace(multiply=lambda x: spmm(weight, x) * (1 if len(x) <= FEW_TOKENS else 1.001))

    monkeypatch.setattr("sdbench.engine.packed_linear.BoundSpmm", bound)
    with pytest.raises(CheckFailed, match="layer 0: the packed product of 33 tokens is wrong"), packed_linears(model, weights, "pruned"):
        pass
    # A prompt on the original weights is no product of packed ones.
    with packed_linears(model, weights, "dense"):
        pass


def test_what_multiplies_is_looked_up_once_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of products a step: what each costs on the host would be charged to pruning."""
    linear = nn.Linear(8, 3)
    module = PackedLinear(packed(linear.weight), None, None)
    asked: list[int] = []
    monkeypatch.setattr("sdbench.kernels.spmm.auto_variant", lambda packed, tokens: asked.append(tokens) or "reference")
    for tokens in (4, 2, 4, 4, 2):
        with torch.no_grad(), phase("prefill"):
            assert module(torch.ones(1, tokens, 8)).shape == (1, tokens, 3)
    assert asked == [4, 2]


def test_launches_are_on_the_layer_s_device(launched: list[str]) -> None:
    """Those of a tuned config's check and of a compiled step too: the current device may be another GPU."""
    model = nn.Sequential(nn.Linear(8, 3))
    weight = packed(model[0].weight)
    with torch.no_grad(), packed_linears(model, {"0": weight}, "pruned"):
        launched.clear()
        for name in ("prefill", "decode"):
            with phase(name):
                model(torch.ones(1, 8))
                model(torch.ones(2, 8))
    assert launched == ["spmv/reference", "spmm/reference"] * 2
    launched.clear()
    numbers = [3, 8, 2, 4]
    _compiled_spmv(torch.ones(8), *weight.tensors, numbers, "reference")
    _compiled_spmm(torch.ones(2, 8), *weight.tensors, numbers)
    assert launched == ["config", "spmv/reference", "spmm/reference"]


def test_a_pruned_prompt_needs_no_dense_copy() -> None:
    model = nn.Sequential(nn.Linear(8, 3))
    with packed_linears(model, {"0": packed(model[0].weight)}, "pruned") as modules:
        assert modules["0"].prefill_weight is None
        assert [tensor.shape for tensor in modules["0"].state_dict().values()] == [(3,)]
