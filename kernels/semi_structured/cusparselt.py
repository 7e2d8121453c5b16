"""cuSPARSELt's 2:4 product as torch has it, with x copied into the 8 columns that it asks for at least; y is the first column.

The functions are those behind ``torch.sparse.to_sparse_semi_structured`` (class ``SparseSemiStructuredTensorCUSPARSELT``), which has no way
to search for an algorithm in every torch that this package takes. The copy of x is part of the call, as it is of a user's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sdbench.kernels.registry import Config, Problem, Variant, register
from sdbench.pattern import Pattern

COLUMNS = 8
"""Least columns of the dense operand in 16 bits (torch's ``dense_min_cols``)."""

_MULTIPLE = 16
"""Rows and columns of the sparse operand in 16 bits are multiples of this (torch's ``sparse_min_rows`` and ``sparse_min_cols``)."""


@dataclass(frozen=True, eq=False)
class SemiStructuredWeight:
    """A 2:4 weight as cuSPARSELt reads it.

    Attributes:
        packed: Kept values and their positions in one tensor of the weight's dtype, in cuSPARSELt's own order.
        algorithm: What cuSPARSELt's search found fastest for this weight and 8 columns.
    """

    packed: Tensor
    algorithm: int

    @property
    def nbytes(self) -> int:
        """Bytes of values and positions: what one product reads of the weight."""
        return self.packed.nbytes

    def clone(self) -> "SemiStructuredWeight":
        """A copy in memory of its own (cold-cache timing rotates over copies)."""
        return SemiStructuredWeight(self.packed.clone(), self.algorithm)


def _columns(x: Tensor) -> Tensor:
    """``[in]`` as ``[in, 8]``, column after column in memory."""
    return x.expand(COLUMNS, -1).contiguous().t()


def prepare(dense: Tensor, keep: Tensor | None, pattern: Pattern | None) -> tuple[SemiStructuredWeight, Tensor]:
    """The registry's ``Prepare``, for problems that ``constraint`` lets pass.

    Args:
        dense: W ``[out, in]``, bf16 or fp16, on an NVIDIA GPU.
        keep: bool ``[out, in]``, two true in every four.
        pattern: 2:4.
    """
    assert keep is not None
    pruned = torch.where(keep, dense, 0)
    packed = torch._cslt_compress(pruned)
    return SemiStructuredWeight(packed, torch._cslt_sparse_mm_search(packed, _columns(torch.ones_like(pruned[0])))), pruned


def launch(weight: SemiStructuredWeight, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """Returns W x ``[out]`` in x's dtype; y is left alone, since the product has 8 columns and makes its own memory.

    Args:
        weight: W ``[out, in]``.
        x: ``[in]``, contiguous, the weight's dtype.
        y: ``[out]``; not written.
        config: ``searched`` is 1 for the algorithm that cuSPARSELt's search found, 0 for its default.
    """
    return torch._cslt_sparse_mm(weight.packed, _columns(x), alg_id=weight.algorithm if config["searched"] else 0)[:, 0]


def constraint(problem: Problem) -> str | None:
    """Why cuSPARSELt cannot take a problem here."""
    if problem.capability < 80:
        return "needs an NVIDIA GPU of sm_80 or newer, whose matrix units take 2:4"
    if not torch.backends.cusparselt.is_available():
        return "needs a torch that was built with cuSPARSELt"
    if problem.pattern != Pattern(2, 4):
        return f"takes 2:4, the only pattern of the sparse matrix units, not {problem.pattern}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bf16 and fp16, not {problem.dtype}"
    if problem.out_features % _MULTIPLE or problem.in_features % _MULTIPLE:
        return f"takes rows and columns in multiples of {_MULTIPLE}, not {problem.out_features}x{problem.in_features}"
    return None


register(
    Variant(
        kernel="semi_structured",
        name="cusparselt",
        summary="cuSPARSELt 2:4 through torch; x as 8 columns, its least, so that 7 of 8 products are thrown away",
        launch=launch,
        space=lambda problem: [{"searched": 0}, {"searched": 1}],
        default=lambda problem: {"searched": 0},
        constraint=constraint,
        needs="torch",
        prepare=prepare,
    )
)
