"""One decode step, from a token of each sequence on the device to the next one: nine kernels a layer, nothing read back."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from sdbench.engine.fused.launches import input_dtype
from sdbench.engine.fused.plan import LayerPlan, Plan
from sdbench.engine.fused.products import Product, Sums
from sdbench.kernels.decode.attention import Attention, slices_for
from sdbench.kernels.decode.gate import gate
from sdbench.kernels.decode.head import LOWEST, SLOTS, advance, head, pick
from sdbench.kernels.decode.norm import blocks, embed, norm
from sdbench.kernels.launching import capability, sm_count

TILE = 32
"""Positions a step of attention: short tiles spread a short context over more multiprocessors and cost nothing at 32k."""


class _Layer:
    def __init__(self, part: LayerPlan, attention: Attention, sums: Sums, int8: bool, batch: int):
        self.input_gamma, self.post_gamma = part.input_gamma, part.post_gamma
        self.attention = attention
        self.qkv, self.o, self.gate_up, self.down = (
            Product(linears, sums, int8, batch) for linears in (part.qkv, [part.o], part.gate_up, [part.down])
        )


class FusedStep:
    """The buffers and kernels of a step; :meth:`run` does one.

    Args:
        plan: The model.
        length: Positions of the static cache.
        most_ids: Most tokens of a reply after its first.
        int8: Weight-only int8 linears, of a dense model.
        batch: Sequences.

    Attributes:
        token: int64 ``[batch]``, the step's input and then its output.
        position: int32 ``[batch]`` of the input token; one more after a step.
        ids: int64 ``[batch, most_ids]``, outputs in order; ``-1 - id`` where a logit was not finite.
        count: int32 ``[batch]``, how many of them there are.
        keys: ``[layers, batch, key_value heads, length, size]``, the cache.
        values: As ``keys``.
    """

    def __init__(self, plan: Plan, length: int, most_ids: int, *, int8: bool = False, batch: int = 1):
        self.plan = plan
        heads, device = plan.heads, plan.device
        self._dependent = capability(device) >= 90
        shape = len(plan.layers), batch, heads.key_value, length, heads.size
        self.keys, self.values = (torch.zeros(shape, dtype=plan.dtype, device=device) for _ in range(2))
        self._slices = slices_for(length, heads.key_value * batch, sm_count(device), TILE)
        cos, sin = plan.angles(length)
        sums: Sums = {}
        self._layers = [
            _Layer(part, Attention(heads, part.attention, keys, values, cos, sin, self._slices, TILE, self._dependent), sums, int8, batch)
            for part, keys, values in zip(plan.layers, self.keys, self.values, strict=True)
        ]
        # One sequence has a kernel that finds the argmax as it multiplies.
        self._head = Product([_linear(plan.head)], sums, batch=batch, whole=True) if batch > 1 else None
        # Inputs of products, as transformers has them where that can be.
        narrow = input_dtype(plan.dtype)
        self._h, self._x = torch.empty(batch, plan.hidden, device=device), torch.empty(batch, plan.hidden, dtype=narrow, device=device)
        self._squares = torch.empty(batch, blocks(plan.hidden), device=device)
        self._attended = torch.empty(batch, heads.query * heads.size, dtype=narrow, device=device)
        self._gated = torch.empty(batch, plan.intermediate, dtype=narrow, device=device)
        self._maxima = torch.full((batch, SLOTS), LOWEST, dtype=torch.int64, device=device)
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(batch, dtype=torch.int32, device=device)
        self.ids = torch.zeros(batch, most_ids, dtype=torch.int64, device=device)
        self.count = torch.zeros(batch, dtype=torch.int32, device=device)

    def products(self) -> Iterator[Product]:
        """Every product of a step but lm_head."""
        for layer in self._layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)

    @property
    def kernels(self) -> int | None:
        """Launches of a step of one sequence on a GPU; None for several, and with torch's products, which may be more than one each."""
        unknown = self._head or any(product.variant == "linear" for product in self.products())
        return None if unknown else len(self._layers) * (8 + (self._slices > 1)) + 3

    def start(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Puts the first token of each reply in place; the cache holds every position before it."""
        self.token.copy_(torch.tensor(tokens))
        self.position.copy_(torch.tensor(positions))
        self.count.zero_()

    def run(self, logits: Tensor | None = None) -> None:
        """One step: attends, writes the position's keys and values, and moves on to the next token.

        Args:
            logits: float32 ``[batch, vocabulary]`` to write the step's logits to; None to write none.
        """
        plan, dependent = self.plan, self._dependent
        h, x, squares = self._h, self._x, self._squares
        before: Tensor | None = None
        for number, layer in enumerate(self._layers):
            if number == 0:
                embed(self.token, plan.embedding, h, layer.input_gamma, x, squares, dependent)
            else:
                norm(h, before, layer.input_gamma, x, squares, dependent)
            layer.attention(layer.qkv(x), squares, plan.hidden, plan.eps, self.position, self._attended)
            norm(h, layer.o(self._attended), layer.post_gamma, x, squares, dependent)
            gate(layer.gate_up(x), squares, plan.hidden, plan.eps, self._gated, dependent)
            before = layer.down(self._gated)
        norm(h, before, plan.final_gamma, x, squares, dependent)
        if self._head:
            pick(self._head(x)[0], squares, plan.hidden, plan.eps, self._maxima, logits, dependent)
        else:
            head(plan.head, x, squares, plan.eps, self._maxima, logits, 4, dependent)
        advance(self._maxima, self.token, self.position, self.ids, self.count, dependent)


def _linear(weight: Tensor) -> nn.Linear:
    """A linear of a matrix ``[out, in]``, which stays where it is."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
