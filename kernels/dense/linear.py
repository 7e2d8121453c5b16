"""``torch.nn.functional.linear``: what a model runs today (cuBLAS on NVIDIA GPUs)."""

import torch.nn.functional as F
from torch import Tensor

from sdbench.kernels.registry import Config, Variant, register


def _launch(weight: Tensor, x: Tensor, y: Tensor, config: Config) -> Tensor:
    # No out= form reaches the same cuBLAS call, and a copy into y would be charged to the baseline.
    return F.linear(x, weight) if x.dim() == 2 else F.linear(x[None], weight)[0]


register(
    Variant(
        kernel="dense",
        name="linear",
        summary="torch.nn.functional.linear (cuBLAS)",
        launch=_launch,
        space=lambda problem: [{}],
        default=lambda problem: {},
        needs="torch",
        tokens=(1, None),
    )
)
