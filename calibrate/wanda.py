"""Wanda: of every group of M weights keep the N largest ``|W_ij| * ||X_j||_2``.

Sun, Liu, Bair and Kolter, "A Simple and Effective Pruning Approach for Large Language Models", ICLR 2024, arXiv 2306.11695, equation 1.
The kept weights stay as they are.
"""

from torch import Tensor

from sdbench.calibrate.mask import best_of_groups
from sdbench.calibrate.numerics import require_weight
from sdbench.errors import SdbenchError
from sdbench.packing import require_finite
from sdbench.pattern import Pattern


def keep_mask(weight: Tensor, sum_sq: Tensor, pattern: Pattern, layer: str = "weight") -> Tensor:
    """The keep mask by ``|W| * sqrt(sum_sq)``.

    Args:
        weight: [out, in], floating point.
        sum_sq: [in], sum (or mean: the scale doesn't matter) of squares of each input column; float32.
        pattern: N:M along ``in``.
        layer: Layer name for messages.

    Returns:
        Bool [out, in] on the weight's device, exactly N true in each group; ties keep the lower column.

    Raises:
        SdbenchError: A weight or statistic is NaN or Inf, a statistic is negative, or the shapes don't fit.
        UsageError: ``in`` is not a multiple of M.
    """
    require_weight(weight, layer)
    pattern.require_width(weight.shape[1], layer)
    if sum_sq.shape != weight.shape[1:]:
        raise SdbenchError(
            f"layer {layer}: sum_sq has shape {list(sum_sq.shape)}, expected [{weight.shape[1]}], one value a column of the weight"
        )
    require_finite(sum_sq, layer, "sum_sq", "an activation overflowed in calibration; use bf16 or fp32 instead of fp16, or other examples")
    if bool((sum_sq < 0).any()):
        raise SdbenchError(f"layer {layer}: sum_sq[{int(sum_sq.argmin())}] is negative; pass sums of squares, not sums")
    norm = sum_sq.to(weight.device).float().sqrt()
    return best_of_groups(weight.detach().float().abs().mul_(norm), pattern)
