"""The last step of a split-K product: partial sums of several programs become one y, always added in the same order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdbench.kernels.registry import Config


@triton.jit
def finish_rows(total, rows, inside, y_ptr, partial_ptr, arrived_ptr, OUT, splits, SPLIT_BLOCK: tl.constexpr):
    """Writes y for a block of rows; with more than one split, the program that arrives last adds every program's partial sums.

    Deterministic, since the order of the sum does not depend on the order of arrival. The counter is left at 0 for the next launch.
    The partial sums are read as one tile: read one after the other, each would wait a trip to the L2.

    Args:
        total: float32 sums of this program, one a row.
        rows: Row indices.
        inside: Which rows exist.
        y_ptr: Output ``[out]``.
        partial_ptr: float32 workspace ``[splits, out]``.
        arrived_ptr: int32 counters, one a row block, 0 at launch.
        OUT: Rows of the matrix.
        splits: Programs along K.
        SPLIT_BLOCK: The next power of two of ``splits``; 1 where y is finished without a second step.
    """
    if SPLIT_BLOCK > 1:
        tl.store(partial_ptr + tl.program_id(1) * OUT + rows, total, mask=inside)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            split = tl.arange(0, SPLIT_BLOCK)
            some = (split < splits)[:, None] & inside[None, :]
            y = tl.sum(tl.load(partial_ptr + split[:, None] * OUT + rows[None, :], mask=some, other=0.0, cache_modifier=".cg"), 0)
            tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=inside)
            tl.store(arrived_ptr + tl.program_id(0), 0)
    else:
        tl.store(y_ptr + rows, total.to(y_ptr.dtype.element_ty), mask=inside)


def pair_warps(config: Config) -> int:
    """Warps of a program that gives each thread one (row, word) pair."""
    return max(1, config["block_out"] * config["block_words"] // 32)


_WORKSPACES: dict[tuple[torch.device, int], list[tuple[Tensor, Tensor]]] = {}


def workspace(y: Tensor, splits: int, row_blocks: int) -> tuple[Tensor, Tensor]:
    """Partial sums and arrival counters of one launch, shared by the launches of a stream, which run one after the other.

    A workspace that became too small is kept: a captured CUDA graph may still hold its address.

    Args:
        y: Output ``[out]`` of the launch.
        splits: Programs along K.
        row_blocks: Programs along the rows.

    Returns:
        float32 ``[>= splits * out]`` and int32 zeros ``[>= row_blocks]``; y in place of both where K is not split and neither is touched.
    """
    if splits == 1:
        return y, y
    stream = torch.cuda.current_stream(y.device).cuda_stream if y.device.type == "cuda" else 0
    made = _WORKSPACES.setdefault((y.device, stream), [])
    for partial, arrived in made:
        if partial.numel() >= splits * y.numel() and arrived.numel() >= row_blocks:
            return partial, arrived
    partial = torch.empty(splits * y.numel(), dtype=torch.float32, device=y.device)
    made.append((partial, torch.zeros(row_blocks, dtype=torch.int32, device=y.device)))
    return made[-1]
