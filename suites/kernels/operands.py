"""What a kernel run multiplies: random weights, pruned and packed, with the float64 product to check against."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sdbench.calibrate.magnitude import keep_mask
from sdbench.kernels.launching import capability, sm_count
from sdbench.kernels.registry import Problem
from sdbench.packing import PackedWeight, pack
from sdbench.pattern import WORD, Pattern
from sdbench.timing import copies_needed

Shape = tuple[int, int]
"""(out_features, in_features)."""

_REDUCTION = 64
_LEAST_ROWS = 40


@dataclass(frozen=True)
class Operand:
    """One weight to multiply with.

    Attributes:
        problem: Shape, dtype and pattern.
        dense: The (pruned) matrix ``[out, in]`` that every check multiplies in float64.
        weight: What the kernels read: the packed form, or ``dense`` itself.
    """

    problem: Problem
    dense: Tensor
    weight: PackedWeight | Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that one product must read of the weight."""
        return self.weight.nbytes

    def copies(self) -> list[PackedWeight | Tensor]:
        """The weight in enough places to make every read a cold one."""
        return [self.weight, *(self.weight.clone() for _ in range(copies_needed(self.nbytes, self.dense.device) - 1))]


def make_operand(shape: Shape, dtype: torch.dtype, pattern: Pattern | None, device: torch.device, seed: int) -> Operand:
    """Random normal weights; with a pattern, magnitude-pruned and packed.

    Args:
        shape: ``(out_features, in_features)``.
        dtype: Dtype of the weight.
        pattern: N kept of M, or None for a dense operand.
        device: Where it lives.
        seed: Seed of the weights.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dense = torch.randn(shape, generator=generator, device=device).to(dtype)
    problem = Problem(*shape, dtype, pattern, sm_count(device), capability(device))
    if pattern is None:
        return Operand(problem, dense, dense)
    keep = keep_mask(dense, pattern, layer="x".join(map(str, shape)))
    packed = pack(dense, keep, pattern)
    return Operand(problem, torch.where(keep, dense, 0), packed)


def reduced(shape: Shape, pattern: Pattern | None) -> Shape:
    """A shape small enough for the interpreter, with a width that is no multiple of 32 where the pattern allows it."""
    group = pattern.group if pattern else WORD
    out_features, in_features = (-(-n // _REDUCTION) for n in shape)
    return min(shape[0], max(_LEAST_ROWS, out_features)), min(shape[1], -(-in_features // WORD) * WORD + group % WORD)
