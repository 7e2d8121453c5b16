"""SiLU(gate) * up from the partial sums of one product that holds both, with the norm's scalar applied first."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.decode.norm import root
from sdbench.kernels.launching import uses_kernels

_BLOCK = 128


@triton.jit
def gate_kernel(
    sums_ptr, squares_ptr, y_ptr,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, BATCH: tl.constexpr, HIDDEN: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_CEIL: tl.constexpr,
    EPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[i] = silu(r g[i]) * r u[i]; gate rows above up rows; grid (blocks, sequences)."""
    if BATCH > 1:
        sequence = tl.program_id(1)
        sums_ptr += sequence * 2 * SIZE
        squares_ptr += sequence * BLOCKS
        y_ptr += sequence * SIZE
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    r = root(squares_ptr, HIDDEN, BLOCKS, BLOCKS_CEIL, EPS)
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        gate += tl.load(sums_ptr + split * BATCH * 2 * SIZE + at, mask=inside, other=0.0)
        up += tl.load(sums_ptr + (split * BATCH * 2 + 1) * SIZE + at, mask=inside, other=0.0)
    gate *= r
    tl.store(y_ptr + at, gate * tl.sigmoid(gate) * (up * r), mask=inside)


def gate(sums: Tensor, squares: Tensor, hidden: int, eps: float, y: Tensor, dependent: bool) -> None:
    """Writes y.

    Args:
        sums: float32 ``[splits, batch, 2 * size]`` of the product with gate rows above up rows.
        squares: float32 ``[batch, blocks]``, of the norm before that product.
        hidden: Size of that norm.
        eps: Its epsilon.
        y: ``[batch, size]``, any float dtype.
        dependent: Programmatic dependent launch.
    """
    if not uses_kernels(sums.device):
        g, u = (sums.sum(0) * torch.rsqrt(squares.sum(1, keepdim=True) / hidden + eps)).chunk(2, -1)
        y.copy_(torch.nn.functional.silu(g) * u)
        return
    (batch, size), count = y.shape, squares.shape[1]
    gate_kernel[triton.cdiv(size, _BLOCK), batch](
        sums, squares, y, size, sums.shape[0], batch, hidden, count, triton.next_power_of_2(count), eps, _BLOCK, dependent,
        launch_pdl=dependent,
    )  # fmt: skip
