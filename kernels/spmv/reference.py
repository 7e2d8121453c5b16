"""The SpMV in plain torch, straight from the packed form: y[r] = sum over kept k of values[r, k] * x[column(r, k)]."""

from torch import Tensor

from sdbench.kernels.registry import Config, Variant, register
from sdbench.packing import PackedWeight


def reference(packed: PackedWeight, x: Tensor) -> Tensor:
    """Vectorised product over the packed values.

    Args:
        packed: W ``[out, in]``.
        x: ``[in]``, any float dtype.

    Returns:
        float32 ``[out]``.
    """
    gathered = x.float().index_select(0, packed.columns.view(-1)).view(packed.columns.shape)
    return gathered.mul_(packed.values).sum(dim=(0, 1, 3))


def _launch(packed: PackedWeight, x: Tensor, y: Tensor, config: Config) -> Tensor:
    return y.copy_(reference(packed, x))


register(
    Variant(
        kernel="spmv",
        name="reference",
        summary="plain torch gather and sum over the packed values; runs anywhere",
        launch=_launch,
        space=lambda problem: [{}],
        default=lambda problem: {},
        needs="torch",
    )
)
