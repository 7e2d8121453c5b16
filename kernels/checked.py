"""Whether a product is right where it runs: asked before a config from a file is used, and before a decode step is timed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdbench.packing import PackedWeight
from sdbench.timing import TOLERANCE, relative_error, within


def exact(matrix: Tensor, x: Tensor) -> Tensor:
    """x W^T in float64, a block of rows at a time: where a model fills a GPU there is no room for all of them.

    Args:
        matrix: W ``[out, in]``, any float dtype.
        x: ``[..., in]``, any float dtype.
    """
    return torch.cat([x.double() @ rows.double().T for rows in matrix.split(1024)], -1)


def trouble(
    product: Callable[[Tensor], Tensor], weight: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, times: int = 1
) -> str | None:
    """What is wrong with a product of random x, in a few words; None where each agrees with the float64 product.

    Args:
        product: Gives y ``[out]`` or ``[tokens, out]``, in the dtype that says how near it has to be.
        weight: A matrix ``[out, in]``, or what stands for one: a ``PackedWeight`` or a ``QuantizedWeight``.
        shape: Of x, ``[in]`` or ``[tokens, in]``.
        dtype: Of x.
        device: Of x.
        times: How often, each time with another x.
    """
    generator = torch.Generator(device).manual_seed(0)
    try:
        matrix = weight if isinstance(weight, Tensor) else weight.unpack() if isinstance(weight, PackedWeight) else weight.dequantize()
        inputs = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(times)]
        for x, want in zip(inputs, exact(matrix, torch.stack(inputs)), strict=True):
            y = product(x)
            error = relative_error(y, want)
            if not within(error, TOLERANCE[y.dtype]):
                return f"gives a wrong product (relative error {error:.1e})"
    except Exception as failure:  # a file says what to launch: whatever comes of it is the file's fault
        return f"fails ({type(failure).__name__}: {failure})"
    return None
