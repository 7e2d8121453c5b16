"""One decode step at batch 1, from a token on the device to the next one: nine kernels a layer, nothing read back."""

from collections.abc import Iterator

import torch
from torch import Tensor

from sdbench.engine.fused.plan import LayerPlan, Plan
from sdbench.engine.fused.products import Product, Rounding, Sums
from sdbench.kernels.decode.attention import Attention, slices_for
from sdbench.kernels.decode.gate import gate
from sdbench.kernels.decode.head import LOWEST, SLOTS, advance, head
from sdbench.kernels.decode.norm import blocks, embed, norm
from sdbench.kernels.launching import capability, sm_count

TILE = 32
"""Positions a step of attention: short tiles spread a short context over more multiprocessors and cost nothing at 32k."""


class _Layer:
    def __init__(self, part: LayerPlan, attention: Attention, sums: Sums, quantized: Rounding | None):
        self.input_gamma, self.post_gamma = part.input_gamma, part.post_gamma
        self.attention = attention
        self.qkv, self.o = Product(part.qkv, sums, quantized), Product([part.o], sums, quantized)
        self.gate_up, self.down = Product(part.gate_up, sums, quantized), Product([part.down], sums, quantized)


class FusedStep:
    """The buffers and kernels of a step; :meth:`run` does one.

    Args:
        plan: The model.
        length: Positions of the static cache.
        most_ids: Most tokens of a reply after its first.
        quantized: ``"int8"`` for a dense model with weight-only 8-bit linears.

    Attributes:
        token: int64 ``[1]``, the step's input and then its output.
        position: int32 ``[1]`` of the input token; one more after a step.
        ids: int64 ``[most_ids]``, outputs in order; ``-1 - id`` where a logit was not finite.
        count: int32 ``[1]``, how many of them there are.
        keys: ``[layers, key_value heads, length, size]``, the cache.
        values: As ``keys``.
    """

    def __init__(self, plan: Plan, length: int, most_ids: int, *, quantized: Rounding | None = None):
        self.plan = plan
        heads, device = plan.heads, plan.device
        self._dependent = capability(device) >= 90
        shape = len(plan.layers), heads.key_value, length, heads.size
        self.keys, self.values = (torch.zeros(shape, dtype=plan.dtype, device=device) for _ in range(2))
        self._slices = slices_for(length, heads.key_value, sm_count(device), TILE)
        cos, sin = plan.angles(length)
        sums: Sums = {}
        self._layers = [
            _Layer(part, Attention(heads, part.attention, keys, values, cos, sin, self._slices, TILE, self._dependent), sums, quantized)
            for part, keys, values in zip(plan.layers, self.keys, self.values, strict=True)
        ]
        # Inputs of products as the kernels were tuned for, and as transformers has them; fp16 has no room for a vector before its scaling.
        narrow = plan.dtype if plan.dtype == torch.bfloat16 else torch.float32
        self._h, self._x = torch.empty(plan.hidden, device=device), torch.empty(plan.hidden, dtype=narrow, device=device)
        self._squares = torch.empty(blocks(plan.hidden), device=device)
        self._attended = torch.empty(heads.query * heads.size, dtype=narrow, device=device)
        self._gated = torch.empty(plan.intermediate, dtype=narrow, device=device)
        self._maxima = torch.full((SLOTS,), LOWEST, dtype=torch.int64, device=device)
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.ids = torch.zeros(most_ids, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)

    def products(self) -> Iterator[Product]:
        """Every product of a step but lm_head."""
        for layer in self._layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)

    @property
    def kernels(self) -> int:
        """Launches of a step on a GPU."""
        return len(self._layers) * (8 + (self._slices > 1)) + 3

    def start(self, token: int, position: int) -> None:
        """Puts a reply's first token in place; the cache holds every position before it."""
        self.token.fill_(token)
        self.position.fill_(position)
        self.count.zero_()

    def run(self, logits: Tensor | None = None) -> None:
        """One step: attends, writes the position's keys and values, and moves on to the next token.

        Args:
            logits: float32 ``[vocabulary]`` to write the step's logits to; None to write none.
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
        head(plan.head, x, squares, plan.eps, self._maxima, logits, 4, dependent)
        advance(self._maxima, self.token, self.position, self.ids, self.count, dependent)
