"""The product in plain torch: unpack, multiply, forget."""

import torch
from torch import Tensor

from sdbench.kernels.registry import Config, Variant, register
from sdbench.packing import PackedWeight


def launch(packed: PackedWeight, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """Fills and returns y ``[tokens, out]`` = x W^T, in the wider dtype of the two."""
    dense = packed.unpack()
    wide = torch.promote_types(x.dtype, dense.dtype)
    return y.copy_(torch.nn.functional.linear(x.to(wide), dense.to(wide)))


register(
    Variant(
        kernel="spmm",
        name="reference",
        summary="unpacked by torch, then torch's own product; runs anywhere",
        launch=launch,
        space=lambda problem: [{}],
        default=lambda problem: {},
        needs="torch",
    )
)
