"""Magnitude pruning: of every group of M weights keep the N largest ``|W|``. The baseline that needs no data."""

from torch import Tensor

from sdbench.calibrate.mask import best_of_groups
from sdbench.calibrate.numerics import require_weight
from sdbench.pattern import Pattern


def keep_mask(weight: Tensor, pattern: Pattern, layer: str = "weight") -> Tensor:
    """The keep mask by ``|W|``.

    Args:
        weight: [out, in], floating point.
        pattern: N:M along ``in``.
        layer: Layer name for messages.

    Returns:
        Bool [out, in], exactly N true in each group; ties keep the lower column.

    Raises:
        SdbenchError: The weight holds NaN or Inf or is no matrix.
        UsageError: ``in`` is not a multiple of M.
    """
    require_weight(weight, layer)
    pattern.require_width(weight.shape[1], layer)
    return best_of_groups(weight.detach().float().abs(), pattern)
