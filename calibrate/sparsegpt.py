"""SparseGPT: prune column by column and let the columns to the right make up for what was lost.

Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", ICML 2023, arXiv 2301.00774. With H the
(damped) Hessian of the layer's output error and U the upper triangular factor of its inverse, ``H^-1 = U^T U``, removing ``w_j`` costs
``(w_j / U_jj)^2`` and is best compensated by ``w_k -= w_j / U_jj * U_jk`` for the columns k > j that are still to come.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sdbench.calibrate.mask import best_of_groups
from sdbench.calibrate.numerics import full_float32, require_weight
from sdbench.errors import SdbenchError, UsageError
from sdbench.packing import require_finite
from sdbench.pattern import Pattern

log = logging.getLogger(__name__)

DampBy = Literal["mean", "median"]

FIRST_RAISE = 1e-4
"""Damping tried after a failure without any."""


@dataclass(frozen=True, eq=False)
class SparseGptResult:
    """A pruned weight and how it came about.

    Args:
        weight: [out, in] in the given weight's dtype; compensated where kept, 0 elsewhere.
        keep: Bool [out, in], exactly N true in each group.
        damp: Damping asked for, as a fraction of the mean (or median) diagonal.
        damp_used: Damping that the factorisation took; larger than ``damp`` if the Hessian was singular.
        damp_by: ``"mean"`` or ``"median"``.
        dead_columns: Columns that no token touched (zero on the Hessian's diagonal).
    """

    weight: Tensor
    keep: Tensor
    damp: float
    damp_used: float
    damp_by: DampBy
    dead_columns: int


def prune(weight: Tensor, hessian: Tensor, pattern: Pattern, damp: float = 0.01, block: int = 128) -> tuple[Tensor, Tensor]:
    """Prunes one matrix; `prune_with_report` says more and explains the arguments.

    Returns:
        The pruned and compensated weight [out, in] in the weight's dtype, and the keep mask, bool [out, in].
    """
    result = prune_with_report(weight, hessian, pattern, damp=damp, block=block)
    return result.weight, result.keep


def prune_with_report(
    weight: Tensor,
    hessian: Tensor,
    pattern: Pattern,
    *,
    damp: float = 0.01,
    damp_by: DampBy = "mean",
    block: int = 128,
    layer: str = "weight",
) -> SparseGptResult:
    """Prunes one matrix in float32 on its device; the arguments are left as they are.

    The mask of a group is chosen when the group is reached, from weights that are already compensated for all columns before it.

    Args:
        weight: [out, in], floating point.
        hessian: [in, in], ``X^T X`` of the layer's inputs, by any positive factor; float32.
        pattern: N:M along ``in``.
        damp: Added to the diagonal, as a fraction of the mean or median over the columns that saw input.
        damp_by: ``"mean"`` as in the paper; ``"median"`` where a few huge columns (the first position's) would swamp all others.
        block: Columns whose effect on the later ones is applied at once. It changes the speed, not the result; rounded up to whole groups.
        layer: Layer name for messages.

    Returns:
        Weight, mask and the damping that was used.

    Raises:
        SdbenchError: NaN or Inf in an argument, shapes that don't fit, or a matrix that is no Hessian at any damping.
        UsageError: ``in`` is not a multiple of M, or ``damp`` or ``block`` makes no sense.
    """
    return prune_together({layer: weight}, hessian, pattern, damp=damp, damp_by=damp_by, block=block)[layer]


def prune_together(
    weights: Mapping[str, Tensor],
    hessian: Tensor,
    pattern: Pattern,
    *,
    damp: float = 0.01,
    damp_by: DampBy = "mean",
    block: int = 128,
) -> dict[str, SparseGptResult]:
    """Prunes matrices that read the same input: one factorisation and one sweep, with the results that each has alone.

    Args:
        weights: [out, in] by layer name; ``out`` may differ.
        hessian: [in, in] of their input; the other arguments are those of `prune_with_report`.
        pattern: N:M along ``in``.
        damp: See `prune_with_report`.
        damp_by: See there.
        block: See there.

    Returns:
        Each layer's result.

    Raises:
        SdbenchError: As `prune_with_report`.
        UsageError: The same.
    """
    if not 0 <= damp < math.inf:
        raise UsageError(f"damp {damp}: it is a fraction of the {damp_by} diagonal, 0 or more; usually 0.01")
    if damp_by not in ("mean", "median"):
        raise UsageError(f"damp_by {damp_by!r}: choose mean or median")
    if block < 1:
        raise UsageError(f"block {block}: at least 1 column")
    columns = len(hessian)
    for layer, weight in weights.items():
        require_weight(weight, layer)
        pattern.require_width(weight.shape[1], layer)
        wanted = [weight.shape[1]] * 2
        if list(hessian.shape) != wanted:
            raise SdbenchError(f"layer {layer}: the Hessian has shape {list(hessian.shape)}, expected {wanted} for this weight")
    layer, weight = next(iter(weights.items()))
    require_finite(
        hessian, layer, "hessian", "an activation overflowed in calibration; use bf16 or fp32 instead of fp16, or other examples"
    )
    hessian = hessian.to(device=weight.device, dtype=torch.float32)
    if bool((hessian.diagonal() < 0).any()):
        raise SdbenchError(f"layer {layer}: hessian[{int(hessian.diagonal().argmin())}] has a negative diagonal, so it is no X^T X")
    dead = hessian.diagonal() == 0
    if bool(dead.all()):
        raise SdbenchError(
            f"layer {layer}: the Hessian's diagonal is all zero, so no token reached the layer; use other calibration examples"
        )

    sizes = [len(weight) for weight in weights.values()]
    with full_float32(), torch.no_grad():
        upper, damp_used = _inverse_factor(hessian, dead, damp, damp_by, layer)
        stacked = torch.cat([weight.detach().float() for weight in weights.values()])
        keep = _sweep(stacked, sizes, upper, dead, pattern, min(columns, -(-block // pattern.group) * pattern.group))
    results = {}
    for (layer, weight), pruned, kept in zip(weights.items(), stacked.split(sizes), keep.split(sizes), strict=True):
        pruned = pruned.to(weight.dtype)
        require_finite(pruned, layer, "compensated weight", f"it no longer fits {weight.dtype}; raise the damping or prune in bf16 or fp32")
        results[layer] = SparseGptResult(pruned, kept, damp, damp_used, damp_by, int(dead.sum()))
    return results


def _inverse_factor(hessian: Tensor, dead: Tensor, damp: float, damp_by: DampBy, layer: str) -> tuple[Tensor, float]:
    """The upper triangular U with ``(H + damping)^-1 = U^T U``, [in, in] float32, and the damping that made H factorable."""
    diagonal = hessian.diagonal()
    alive = diagonal[~dead]
    mean = float(alive.mean())
    unit = mean if damp_by == "mean" else float(alive.median())
    # A dead column stands alone: 1 on the diagonal and no share in any other column's compensation.
    lonely = torch.where(dead, torch.ones_like(diagonal), diagonal)
    used = damp
    while True:
        damped = hessian.clone()
        damped.diagonal().copy_(lonely + used * unit)
        upper = _inverse_root(damped)
        if upper is not None:
            break
        # A true X^T X has a factor at the latest when the whole mean diagonal is added.
        if used * unit >= mean:
            raise SdbenchError(
                f"layer {layer}: the Hessian has no Cholesky factor even with damping {used:g}, so it is no X^T X; collect it again"
            )
        used = used * 10 if used else FIRST_RAISE
    if used != damp:
        log.warning("layer %s: singular Hessian, damping raised from %g to %g of the %s diagonal", layer, damp, used, damp_by)
    return upper, used


def _inverse_root(matrix: Tensor) -> Tensor | None:
    """The upper triangular U with ``matrix^-1 = U^T U``, [in, in] float32; None if the matrix is singular as far as float32 can tell."""
    # With J the exchange matrix, J H J = L L^T gives H = R R^T for the upper triangular R = J L J, hence U = R^-1:
    # one factorisation, and the inverse of H is never formed.
    lower, info = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    if int(info) != 0:
        return None
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    # Pivots that should be 0 come out as rounding of either sign, and positive ones pass. Row u_j of U is the direction that pivot j
    # measures, so rounding of H shifts 1 = u_j H u_j by about eps * sum_k U_jk^2 H_kk: above 0.6 where the rank is too low, far below
    # 0.5 elsewhere.
    noise = torch.finfo(matrix.dtype).eps * (upper.square() @ matrix.diagonal())
    return upper if bool((noise < 0.5).all()) else None


def _sweep(weight: Tensor, sizes: Sequence[int], upper: Tensor, dead: Tensor, pattern: Pattern, block: int) -> Tensor:
    """Prunes ``weight`` [out, in] in place, left to right.

    A column costs three small kernels, and a group's mask about ten; all else is done once a block.

    Args:
        weight: float32, the rows of one or more matrices.
        sizes: How many rows each has: what passes from block to block is multiplied matrix by matrix, so that none is rounded otherwise
            than alone.
        upper: [in, in] U.
        dead: Bool [in].
        pattern: N:M.
        block: Columns at a time, whole groups.

    Returns:
        The keep mask, bool [out, in].
    """
    columns = weight.shape[1]
    group = pattern.group
    keep = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    # What a column costs per squared weight: 1 / U_jj^2, and nothing where no input ever arrives.
    cost = torch.where(dead, torch.zeros_like(upper.diagonal()), upper.diagonal().square().reciprocal())
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        # A column of all rows lies in one piece: [columns of the block, out].
        inner = weight[:, start:stop].T.contiguous()
        # Row j: what the later columns lose for each unit of column j that goes, U_jk / U_jj.
        share = upper[start:stop, start:] / upper.diagonal()[start:stop, None]
        gone = torch.empty_like(inner)
        for first in range(0, stop - start, group):
            ahead = slice(first, first + group)
            score = inner[ahead].square() * cost[start + first : start + first + group, None]
            kept = best_of_groups(score.T, pattern)
            keep[:, start + first : start + first + group] = kept
            dropped = (~kept).T.float()
            for column in range(first, first + group):
                torch.mul(inner[column], dropped[column - first], out=gone[column])
                # Not addr_, which on a CPU rounds by where an element lies, and so by what else is in the stack.
                inner[column:].sub_(torch.outer(share[column, column : stop - start], gone[column]))
        weight[:, start:stop] = inner.T
        for part, part_gone in zip(weight[:, stop:].split(list(sizes)), gone.split(list(sizes), dim=1), strict=True):
            part.addmm_(part_gone.T, share[:, stop - start :], alpha=-1)
    # Where rounding keeps w - w * (U_jj / U_jj) away from 0.
    weight.masked_fill_(~keep, 0.0)
    return keep
