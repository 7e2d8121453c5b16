"""Weights that can be pruned, and float32 matrix products that really are float32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sdbench.errors import SdbenchError
from sdbench.packing import require_finite


def require_weight(weight: Tensor, layer: str) -> None:
    """Refuses a weight that cannot be pruned: not a floating-point matrix, or holding NaN or Inf.

    Args:
        weight: Expected [out, in], floating point.
        layer: Layer name for the message.

    Raises:
        SdbenchError: The weight is no such matrix.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise SdbenchError(
            f"layer {layer}: the weight is {weight.dtype} of shape {list(weight.shape)}, expected a floating-point [out, in] matrix; "
            "leave the layer out with --ignore"
        )
    require_finite(weight, layer, "weight", "the checkpoint is damaged; download or convert it again")


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, float32 matrix products keep all 24 bits: no TF32 on a GPU, no bf16 on a CPU, whatever the process asked for before."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]  # torch's stubs lack it
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
