"""RMSNorm with the residual add and the reading of partial sums, the division by the root left to the consumer.

    h <- h + sum over splits of sums[split];   x = gamma * h;   squares[block] = sum over the block of h^2
    RMSNorm(h) = x * r  with  r = 1 / sqrt(sum(squares) / size + eps)

r is one scalar, so W RMSNorm(h) = r * (W x): nobody has to wait for it before the product, and no block for another. At the start of a step
h is the token's row of the embedding. Each sequence of a batch has a vector of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.launching import uses_kernels

BLOCK = 64
MOST_BLOCKS = 256
"""Consumers read all squares at once."""


@triton.jit
def norm_kernel(
    h_ptr, sums_ptr, gamma_ptr, table_ptr, token_ptr, x_ptr, squares_ptr,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, BATCH: tl.constexpr, EMBED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of a sequence's vector a program; grid (blocks, sequences)."""
    if BATCH > 1:
        sequence = tl.program_id(1)
        h_ptr += sequence * SIZE
        sums_ptr += sequence * SIZE
        token_ptr += sequence
        x_ptr += sequence * SIZE
        squares_ptr += sequence * tl.num_programs(0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    if PDL:
        gdc_launch_dependents()
    gamma = tl.load(gamma_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if EMBED:
        h = tl.load(table_ptr + tl.load(token_ptr) * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.load(h_ptr + at, mask=inside, other=0.0)
    for split in tl.static_range(SPLITS):
        h += tl.load(sums_ptr + split * BATCH * SIZE + at, mask=inside, other=0.0)
    tl.store(h_ptr + at, h, mask=inside)
    tl.store(x_ptr + at, h * gamma, mask=inside)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(h * h, 0))


@triton.jit
def root(squares_ptr, SIZE: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_CEIL: tl.constexpr, EPS: tl.constexpr):
    """r of the last norm."""
    block = tl.arange(0, BLOCKS_CEIL)
    total = tl.sum(tl.load(squares_ptr + block, mask=block < BLOCKS, other=0.0), 0)
    return 1.0 / tl.sqrt(total / SIZE + EPS)


def blocks(size: int) -> int:
    """Elements of ``squares`` for a vector of ``size``."""
    return triton.cdiv(size, BLOCK)


def norm(h: Tensor, sums: Tensor | None, gamma: Tensor, x: Tensor, squares: Tensor, dependent: bool) -> None:
    """Adds to the residual, in place, and prepares the next product's input.

    Args:
        h: float32 ``[batch, size]``, the residual.
        sums: float32 ``[splits, batch, size]`` of the product before; None to add nothing.
        gamma: ``[size]``, any float dtype.
        x: ``[batch, size]``, any float dtype, written.
        squares: float32 ``[batch, blocks(size)]``, written.
        dependent: Programmatic dependent launch.
    """
    if not uses_kernels(h.device):
        _finish(h if sums is None else h.add_(sums.sum(0)), gamma, x, squares)
        return
    _launch(h, sums, gamma, h, h, x, squares, False, dependent)


def embed(token: Tensor, table: Tensor, h: Tensor, gamma: Tensor, x: Tensor, squares: Tensor, dependent: bool) -> None:
    """The first norm of a step: h becomes each token's row.

    Args:
        token: int64 ``[batch]``.
        table: ``[vocabulary, size]``, any float dtype.
        h: float32 ``[batch, size]``, written.
        gamma: As in :func:`norm`, like the rest.
        x: ``[batch, size]``, any float dtype, written.
        squares: float32 ``[batch, blocks(size)]``, written.
        dependent: Programmatic dependent launch.
    """
    if not uses_kernels(h.device):
        _finish(h.copy_(table[token]), gamma, x, squares)
        return
    _launch(h, None, gamma, table, token, x, squares, True, dependent)


def _launch(
    h: Tensor,
    sums: Tensor | None,
    gamma: Tensor,
    table: Tensor,
    token: Tensor,
    x: Tensor,
    squares: Tensor,
    embedding: bool,
    dependent: bool,
) -> None:
    batch, size = h.shape
    # A step's first kernel waits for all of the step before: attention reads the position before its own wait.
    norm_kernel[blocks(size), batch](
        h, h if sums is None else sums, gamma, table, token, x, squares,
        size, 0 if sums is None else sums.shape[0], batch, embedding, BLOCK, dependent,
        num_warps=1, launch_pdl=dependent and not embedding,
    )  # fmt: skip


def _finish(h: Tensor, gamma: Tensor, x: Tensor, squares: Tensor) -> None:
    x.copy_(h * gamma.float())
    padded = torch.nn.functional.pad(h, (0, squares.shape[1] * BLOCK - h.shape[1]))
    squares.copy_(padded.view(len(h), -1, BLOCK).square().sum(2))
