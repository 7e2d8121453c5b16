"""What a kernel run multiplies: random weights, in the form that a variant reads, with the float64 product to check against."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sdbench.calibrate.magnitude import keep_mask
from sdbench.kernels.launching import capability, sm_count
from sdbench.kernels.registry import Prepare, Problem, as_it_is
from sdbench.pattern import WORD, Pattern
from sdbench.timing import copies_needed

Shape = tuple[int, int]
"""(out_features, in_features)."""

_WHOLE: Shape = (64, 256)
"""Rows and columns up to which the interpreter has a shape as it is."""

_REDUCTION = 64
_LEAST_ROWS = 40


@dataclass(frozen=True, eq=False)
class Operand:
    """One weight to multiply with.

    Attributes:
        problem: Shape, dtype and pattern.
        matrix: The unpruned matrix ``[out, in]``.
        prepare: The variant's own; called when the weight is first asked for, since there is none for a problem that the variant refuses.
    """

    problem: Problem
    matrix: Tensor
    prepare: Prepare

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.matrix.device

    @cached_property
    def _prepared(self) -> tuple[Any, Tensor]:
        pattern = self.problem.pattern
        keep = None if pattern is None else keep_mask(self.matrix, pattern, layer="x".join(map(str, self.matrix.shape)))
        return self.prepare(self.matrix, keep, pattern)

    @property
    def weight(self) -> Any:
        """What the kernels read: a packed or quantised form, or ``dense`` itself."""
        return self._prepared[0]

    @property
    def dense(self) -> Tensor:
        """The matrix ``[out, in]`` that ``weight`` stands for; every check multiplies it in float64."""
        return self._prepared[1]

    @property
    def nbytes(self) -> int:
        """Bytes that one product must read of the weight."""
        return int(self.weight.nbytes)

    def x_shape(self, tokens: int) -> tuple[int, ...]:
        """Shape of the input, as ``Variant.launch`` takes it."""
        return (self.problem.in_features,) if tokens == 1 else (tokens, self.problem.in_features)

    def y_shape(self, tokens: int) -> tuple[int, ...]:
        """Shape of the output."""
        return (self.problem.out_features,) if tokens == 1 else (tokens, self.problem.out_features)

    def copies(self) -> list[Any]:
        """The weight in enough places to make every read a cold one."""
        return [self.weight, *(self.weight.clone() for _ in range(copies_needed(self.nbytes, self.device) - 1))]


def make_operand(
    shape: Shape, dtype: torch.dtype, pattern: Pattern | None, device: torch.device, seed: int, prepare: Prepare = as_it_is
) -> Operand:
    """Random normal weights; with a pattern, magnitude-pruned.

    Args:
        shape: ``(out_features, in_features)``.
        dtype: Dtype of the weight.
        pattern: N kept of M, or None for an unpruned operand.
        device: Where it lives.
        seed: Seed of the weights.
        prepare: ``Variant.prepare`` of the variants that will read it; by default the matrix itself, packed where there is a pattern.
    """
    generator = torch.Generator(device).manual_seed(seed)
    matrix = torch.randn(shape, generator=generator, device=device).to(dtype)
    return Operand(Problem(*shape, dtype, pattern, sm_count(device), capability(device)), matrix, prepare)


def reduced(shape: Shape, pattern: Pattern | None) -> Shape:
    """A shape small enough for the interpreter: itself, or one with a width that is no multiple of 32 where the pattern allows it."""
    if shape[0] <= _WHOLE[0] and shape[1] <= _WHOLE[1]:
        return shape
    group = pattern.group if pattern else WORD
    out_features, in_features = (-(-n // _REDUCTION) for n in shape)
    return min(shape[0], max(_LEAST_ROWS, out_features)), min(shape[1], -(-in_features // WORD) * WORD + group % WORD)
