"""Whether a product is right where it runs: asked before a config from a file is used, and before a decode step is timed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdbench.packing import PackedWeight
from sdbench.timing import TOLERANCE, relative_error, within


def trouble(product: Callable[[Tensor], Tensor], weight: Any, x: Tensor) -> str | None:
    """What is wrong with a product, in a few words; None for one that agrees with the float64 product.

    Args:
        product: Gives y ``[out]`` or ``[tokens, out]``, float32 or as x.
        weight: A matrix ``[out, in]``, or what stands for one: a ``PackedWeight`` or a ``QuantizedWeight``.
        x: ``[in]`` or ``[tokens, in]``.
    """
    try:
        y = product(x)
        matrix = weight if isinstance(weight, Tensor) else weight.unpack() if isinstance(weight, PackedWeight) else weight.dequantize()
        # A block of rows at a time: where a model fills a GPU there is no room for all of them in float64.
        want = torch.cat([x.double() @ rows.double().T for rows in matrix.split(1024)], -1)
        error = relative_error(y, want)
    except Exception as failure:  # a file says what to launch: whatever comes of it is the file's fault
        return f"fails ({type(failure).__name__}: {failure})"
    return None if within(error, TOLERANCE[y.dtype]) else f"gives a wrong product (relative error {error:.1e})"
