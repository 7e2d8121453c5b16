"""Linears of one input that multiply together: the same products, fewer of them."""

from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdbench.calibrate.magnitude import keep_mask
from sdbench.calibrate.select import select_linears
from sdbench.engine.decoders import TransformersDecoder
from sdbench.engine.greedy import EagerForward, greedy
from sdbench.engine.packed_linear import packed_linears
from sdbench.engine.siblings import Siblings, group
from sdbench.errors import CheckFailed
from sdbench.kernels.spmm import BoundSpmm
from sdbench.kernels.spmv import BoundSpmv
from sdbench.packing import PackedWeight, pack
from sdbench.pattern import Pattern
from sdbench.timing import relative_error

TWO_OF_FOUR = Pattern(2, 4)


def packed(rows: int, pattern: Pattern = TWO_OF_FOUR, columns: int = 32) -> PackedWeight:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return pack(weight, keep_mask(weight, pattern), pattern)


def test_each_takes_its_rows_once():
    weights = [packed(8), packed(3), packed(5)]
    dense = [weight.unpack() for weight in weights]
    together, x = Siblings(weights), torch.randn(2, 4, 32)
    for _ in range(2):
        for place, matrix in enumerate(dense):
            torch.testing.assert_close(together.product(place, x), x @ matrix.T)
    assert together.product(1, x) is None, "taken already"
    together.product(0, x)
    assert together.product(2, x.clone()) is None, "another input"
    assert together.product(1, x) is not None


def test_the_first_one_multiplies_anew_whatever_came_before():
    weights = [packed(8), packed(3)]
    together, x = Siblings(weights), torch.randn(4, 32)
    together.product(0, x)
    x.mul_(2)
    torch.testing.assert_close(together.product(0, x), x @ weights[0].unpack().T)
    torch.testing.assert_close(together.product(1, x), x @ weights[1].unpack().T)


def test_who_are_siblings():
    names = ["0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj", "0.gate_proj", "0.up_proj", "0.down_proj"]
    places: dict[str, nn.Module] = {name: nn.Identity() for name in names}
    whole = {name: packed(4 + place) for place, name in enumerate(names)}
    found = {name: place for name, (_, place) in group(whole, places).items()}
    assert found == {"0.q_proj": 0, "0.k_proj": 1, "0.v_proj": 2, "0.gate_proj": 0, "0.up_proj": 1}
    some = {name: weight for name, weight in whole.items() if name != "0.v_proj"}
    assert set(group(some, places)) == {"0.gate_proj", "0.up_proj"}
    other = whole | {"0.up_proj": packed(9, Pattern(1, 4))}
    assert set(group(other, places)) == {"0.q_proj", "0.k_proj", "0.v_proj"}
    assert not group({"q_proj": packed(4)}, {"q_proj": nn.Identity()})
    places["0.gate_proj"] = places["0.up_proj"]
    assert set(group(whole, places)) == {"0.q_proj", "0.k_proj", "0.v_proj"}


def test_a_prompt_takes_four_products_a_layer_and_gives_the_same_logits(tiny_llama, monkeypatch):
    weights = {
        name: pack(linear.weight.detach(), keep_mask(linear.weight, Pattern(2, 4)), Pattern(2, 4))
        for name, linear in select_linears(tiny_llama).items()
    }
    products: list[int] = []
    multiply = BoundSpmm.multiply

    def counted(self: BoundSpmm, x: Tensor, *others: Any) -> Tensor:
        products.append(self.packed.out_features)
        return multiply(self, x, *others)

    def reply() -> tuple[int, ...]:
        products.clear()
        return greedy(tiny_llama, [[5, 6, 7]], max_new_tokens=4, eos_ids=(), ignore_eos=True)[0].ids

    monkeypatch.setattr(BoundSpmm, "multiply", counted)
    with packed_linears(tiny_llama, weights, "pruned") as modules:
        layers = len(tiny_llama.model.layers)
        together, count = reply(), len(products)
        for module in modules.values():
            module.siblings = None
        assert (reply(), count, len(products)) == (together, 4 * layers, 7 * layers)


def test_calls_are_rows_through_each_linear_and_not_products(tiny_llama, monkeypatch):
    """What a run counts and reports: a step that went round one of the linears lacks a row, however many launches there were."""
    weights = {
        name: pack(linear.weight.detach(), keep_mask(linear.weight, TWO_OF_FOUR), TWO_OF_FOUR)
        for name, linear in select_linears(tiny_llama).items()
    }
    monkeypatch.setattr("sdbench.engine.siblings.uses_kernels", lambda device: True)
    products: list[BoundSpmv] = []
    multiply = BoundSpmv.__call__

    def counted(self: BoundSpmv, x: Tensor, *others: Any) -> Tensor:
        products.append(self)
        return multiply(self, x, *others)

    monkeypatch.setattr(BoundSpmv, "__call__", counted)
    layers = len(tiny_llama.model.layers)
    with packed_linears(tiny_llama, weights, "pruned") as modules:
        decoder = TransformersDecoder(tiny_llama, modules, EagerForward(tiny_llama))
        products.clear()
        reply = decoder.reply([5, 6, 7], max_new_tokens=4, eos_ids=(), ignore_eos=True)
        assert len(products) == 4 * layers * 3
        assert decoder.calls == 7 * layers * 3 == decoder.pruned_products * reply.decode_steps
        modules["model.layers.0.mlp.down_proj"].forward = nn.Linear(128, 64).forward
        decoder.reply([5, 6, 7], max_new_tokens=4, eos_ids=(), ignore_eos=True)
        assert decoder.calls == (7 * layers + 7 * layers - 1) * 3


def test_one_token_is_one_launch_where_kernels_run(monkeypatch):
    """The reference launches nothing, and would keep its column indices a second time."""
    weights, x = [packed(8), packed(3)], torch.randn(1, 1, 32)
    assert Siblings(weights).product(0, x) is None
    monkeypatch.setattr("sdbench.engine.siblings.uses_kernels", lambda device: True)
    together = Siblings(weights)
    for place, weight in enumerate(weights):
        y = together.product(place, x)
        assert y.shape == (1, 1, weight.out_features)
        assert relative_error(y.view(-1), weight.unpack().double() @ x.view(-1).double()) < 1e-6
    assert together.product(1, x) is None


def test_many_tokens_share_only_what_one_piece_holds(monkeypatch):
    """Else the dense rows fall into as many pieces as there are weights, and a weight alone needs no rows put in place."""
    for piece in (1, 1 << 20):
        monkeypatch.setattr("sdbench.kernels.spmm.expand.PIECE_BYTES", piece)
        together = Siblings([packed(200), packed(56)])
        few, many = torch.randn(1, 32, 32), torch.randn(1, 33, 32)
        with torch.no_grad():
            assert together.product(0, few) is not None and together.product(1, few) is not None
            assert (together.product(0, many) is not None) == (piece > 1) == (together.product(1, many) is not None)


def test_what_nobody_takes_goes_with_the_input():
    """A forward that fails halfway, or never asks the others, leaves nothing behind."""
    together, x = Siblings([packed(8), packed(3)]), torch.randn(4, 32)
    taken = together.product(0, x)
    whole = StorageWeakRef(taken.untyped_storage())
    del taken
    assert not whole.expired()
    source = ref(x)
    del x
    assert source() is None and whole.expired()


def test_a_wrong_product_of_siblings_never_gets_into_a_model(tiny_llama, monkeypatch):
    """Rows of the last one alone are wrong, and only where it multiplies with the other."""
    weights = {
        name: pack(linear.weight.detach(), keep_mask(linear.weight, TWO_OF_FOUR), TWO_OF_FOUR)
        for name, linear in select_linears(tiny_llama).items()
    }
    multiply = BoundSpmm.multiply

    def wrong(self: BoundSpmm, x: Tensor, *others: Any) -> Tensor:
        y = multiply(self, x, *others)
        if self.packed.out_features == 256:
            y[..., -1] *= 2
        return y

    monkeypatch.setattr(BoundSpmm, "multiply", wrong)
    with (
        pytest.raises(CheckFailed, match=r"0\.mlp\.up_proj: the packed product of 2 tokens with its siblings is wrong"),
        packed_linears(tiny_llama, weights, "pruned"),
    ):
        pass
