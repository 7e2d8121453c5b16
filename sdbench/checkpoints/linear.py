"""The modules that stand in a loaded model for its pruned linears: empty ones for the loader to fill, then packed ones that run."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from sdbench.checkpoints.layout import GUARD, stored_shapes
from sdbench.engine.packed_linear import PackedLinear
from sdbench.engine.phase import current_phase, phase
from sdbench.kernels.launching import unkept_scratch
from sdbench.kernels.spmm import spmm
from sdbench.kernels.spmv import bind
from sdbench.packing import PackedWeight, StoredWeight, pack
from sdbench.pattern import Pattern


class StoredLinear(nn.Module):
    """A pruned linear's stored tensors, to be filled from a checkpoint; it can't run.

    Args:
        linear: The dense linear in whose place it stands; its sizes, dtype and device are taken over.
        pattern: N:M.
    """

    compressed: Tensor
    bitmask: Tensor
    shape: Tensor

    def __init__(self, linear: nn.Linear, pattern: Pattern):
        super().__init__()
        shapes = stored_shapes(linear.out_features, linear.in_features, pattern)
        like = linear.weight
        self.pattern = pattern
        self.compressed = nn.Parameter(like.new_empty(shapes["compressed"]), requires_grad=False)
        self.register_buffer("bitmask", like.new_empty(shapes["bitmask"], dtype=torch.uint8))
        self.register_buffer("shape", like.new_empty(shapes["shape"], dtype=torch.int64))
        self.register_parameter(GUARD, nn.Parameter(like.new_empty(shapes[GUARD]), requires_grad=False))
        self.bias = linear.bias

    def packed(self, name: str) -> "CheckpointLinear":
        """The module that runs, on the device where the tensors lie.

        Raises:
            CheckFailed: The tensors don't fit together; names the layer.
        """
        stored = StoredWeight(self.compressed.detach(), self.bitmask, self.shape)
        weight = PackedWeight.from_stored(stored, self.pattern, self.compressed.device, name)
        return CheckpointLinear(weight, None, self.bias)


class CheckpointLinear(PackedLinear):
    """A PackedLinear that runs outside of sdbench's decode loop too, as in ``generate``: one row through the SpMV, more through the SpMM.

    Inside a phase the phase decides, as for every PackedLinear. ``torch.compile`` sees either as one operator, which ``calls`` does
    not count.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies ``[..., in]`` into ``[..., out]``, in x's dtype."""
        one = x.numel() == self.in_features
        if torch.compiler.is_compiling():
            packed = self.packed
            numbers = [*packed.shape, packed.pattern.keep, packed.pattern.group]
            rows = x.reshape(-1, self.in_features)
            if one:
                y = _compiled_spmv(rows[0], packed.mask_words, packed.values, numbers, self.variant)
            else:
                y = _compiled_spmm(rows, packed.mask_words, packed.values, numbers)
            y = y.view(*x.shape[:-1], self.out_features)
            return y if self.bias is None else y + self.bias
        if current_phase() is not None:
            return super().forward(x)
        with phase("decode" if one else "prefill"):
            return super().forward(x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``model.to`` does to each module; packed anew, since the layout depends on the dtype."""
        super()._apply(fn, recurse)
        self.packed = pack(fn(self.packed.unpack()), fn(self.packed.keep()), self.packed.pattern)
        self.look_up(self.variant)
        return self


def _weight(mask_words: Tensor, values: Tensor, numbers: list[int]) -> PackedWeight:
    out_features, in_features, keep, group = numbers
    return PackedWeight(Pattern(keep, group), out_features, in_features, mask_words, values)


@torch.library.custom_op("sdbench::spmv", mutates_args=())
def _compiled_spmv(x: Tensor, mask_words: Tensor, values: Tensor, numbers: list[int], variant: str) -> Tensor:
    with unkept_scratch():
        return bind(_weight(mask_words, values, numbers), variant)(x)


@_compiled_spmv.register_fake
def _(x: Tensor, mask_words: Tensor, values: Tensor, numbers: list[int], variant: str) -> Tensor:
    return x.new_empty(numbers[0])


@torch.library.custom_op("sdbench::spmm", mutates_args=())
def _compiled_spmm(x: Tensor, mask_words: Tensor, values: Tensor, numbers: list[int]) -> Tensor:
    with unkept_scratch():
        return spmm(_weight(mask_words, values, numbers), x)


@_compiled_spmm.register_fake
def _(x: Tensor, mask_words: Tensor, values: Tensor, numbers: list[int]) -> Tensor:
    return x.new_empty(x.shape[0], numbers[0])
