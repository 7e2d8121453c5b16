"""Packed linears of one input that multiply together: one product in place of two or three, each with launches of its own."""

from collections.abc import Mapping, Sequence
from weakref import ref

import torch
from torch import Tensor, nn

from sdbench.kernels.launching import uses_kernels
from sdbench.kernels.spmm import FEW_TOKENS, BoundSpmm
from sdbench.kernels.spmm.expand import pieces
from sdbench.kernels.spmv import bind
from sdbench.packing import PackedWeight, stack_rows

NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What transformers calls linears that its decoders call one after the other with the same tensor."""


class Siblings:
    """The product of several packed weights with one input, of which each takes its own rows.

    The first one's call multiplies for all; the others' calls take what is theirs, each once, if they come with the very same tensor.
    What nobody took goes with that tensor. Many tokens, which need dense rows of the weights first, are multiplied together only where
    those of all fit into one piece.

    Args:
        weights: Of one input, in the order of their calls, alike but for their rows; their tensors become views of one stack.
        variant: Of the SpMV.

    Attributes:
        weight: The stack.
    """

    def __init__(self, weights: Sequence[PackedWeight], variant: str = "auto"):
        self.weight = stack_rows(weights)
        self._spmm = BoundSpmm(self.weight)
        # The torch reference launches nothing, and keeps an index of its own of each weight.
        self._spmv = bind(self.weight, variant) if uses_kernels(self.weight.device) else None
        self._most = None if pieces(self.weight) == 1 else FEW_TOKENS * self.weight.in_features
        self._sizes = [weight.out_features for weight in weights]
        self._shared: tuple[ref[Tensor], list[Tensor | None]] | None = None

    @property
    def variant(self) -> str | None:
        """Name of the SpMV variant that runs; None where weights multiply one token by themselves."""
        return self._spmv.variant.name if self._spmv else None

    def product(self, place: int, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor | None:
        """``[..., out]`` of the weight at a place for x ``[..., in]``; None where it was not multiplied with the others.

        Args:
            place: Of the weight.
            x: The very tensor that the first one was called with.
            out_dtype: Of the result, where this is the first one; x's when None.
        """
        if place == 0:
            size = x.numel()
            if size == self.weight.in_features:
                y = self._spmv(x, out_dtype) if self._spmv else None
            else:
                y = self._spmm.multiply(x, out_dtype) if self._most is None or size <= self._most else None
            if y is None:
                return None
            first, *others = torch.split_with_sizes(y, self._sizes, -1)
            made: list[Tensor | None] = [None, *others]
            self._shared = ref(x, lambda _: made.clear()), made
            return first
        # Read once: a forward in another thread may put its own there.
        shared = self._shared
        if shared is None or shared[0]() is not x:
            return None
        taken, shared[1][place] = shared[1][place], None
        return taken


def group(weights: Mapping[str, PackedWeight], places: Mapping[str, nn.Module], variant: str = "auto") -> dict[str, tuple[Siblings, int]]:
    """By dotted name, with whom a packed linear multiplies and its place among them; without those that have no siblings.

    Args:
        weights: Packed weights by the dotted name of their linear.
        places: The linears by that name: a module that stands in several places is no sibling.
        variant: Of the SpMV.
    """
    found: dict[str, tuple[Siblings, int]] = {}
    once = {name for name, module in places.items() if sum(module is other for other in places.values()) == 1}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in weights):
        for names in NAMES:
            paths = [f"{parent}.{name}" if parent else name for name in names]
            ours = [weights[path] for path in paths if path in weights and path in once]
            kinds = {(weight.pattern, weight.in_features, weight.dtype, weight.device) for weight in ours}
            if len(ours) == len(names) and len(kinds) == 1:
                together = Siblings(ours, variant)
                found |= {path: (together, place) for place, path in enumerate(paths)}
    return found
