"""Packed weight times many tokens: rows of the dense matrix go into one small buffer, and the device's own matrix product reads them.

A piece of rows is as large as stays in the L2 cache between its writing and its reading, so that memory sees the packed bytes and not the
dense ones. All weights share the buffer: a model needs no dense copy of a pruned matrix.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdbench.kernels.launching import pointer_type, scratch
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant, register
from sdbench.packing import PackedWeight, chunk_length

PIECE_BYTES = 24 << 20
"""Bytes of a piece: half of an H200's L2 or less, for a piece's writes and the product's own traffic. A guess, not timed yet."""


@triton.jit
def expand_kernel(
    mask_ptr, values_ptr, dense_ptr, first_row, rows,
    OUT: tl.constexpr, IN: tl.constexpr, KEPT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """dense[r, c] = W[first_row + r, c] for ``rows`` rows; grid (row blocks, column blocks).

    Values lie in descending column order: the place of a kept column's value is the number of set bits above its own.
    """
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.program_id(1) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    inside = (row < rows)[:, None] & (column < IN)[None, :]
    at = (first_row + row).to(tl.int64)[:, None]
    word = (column // 32)[None, :]
    bit = (column % 32).to(tl.uint32)[None, :]
    mask = tl.load(mask_ptr + word.to(tl.int64) * OUT + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    above = (mask >> bit) >> 1
    # Set bits of a word by adding neighbours: two, four, eight and so on.
    above = above - ((above >> 1) & 0x55555555)
    above = (above & 0x33333333) + ((above >> 2) & 0x33333333)
    above = (above + (above >> 4)) & 0x0F0F0F0F
    place = ((above * 0x01010101) >> 24).to(tl.int64)
    value_ptr = values_ptr + ((word.to(tl.int64) * (KEPT // CHUNK) + place // CHUNK) * OUT + at) * CHUNK + place % CHUNK
    kept = ((mask >> bit) & 1) == 1
    value = tl.load(value_ptr, mask=inside & kept, other=0.0)
    tl.store(dense_ptr + row.to(tl.int64)[:, None] * IN + column[None, :], value, mask=inside)


def _constexprs(problem: Problem, config: Config) -> dict[str, int]:
    assert problem.pattern is not None
    kept = problem.pattern.kept_per_word
    return {
        "OUT": problem.out_features,
        "IN": problem.in_features,
        "KEPT": kept,
        "CHUNK": chunk_length(kept, problem.dtype),
        "BLOCK_OUT": config["block_out"],
        "BLOCK_IN": config["block_in"],
    }


def expand(packed: PackedWeight, rows: slice, dense: Tensor, config: Config) -> Tensor:
    """Fills and returns dense ``[rows, in]`` with rows of W, bit for bit as they were packed.

    Args:
        packed: W ``[out, in]``, any pattern and dtype.
        rows: Which rows, with a step of 1.
        dense: In the weight's dtype, contiguous.
        config: ``block_out`` rows and ``block_in`` columns a program, powers of two.
    """
    count = rows.stop - rows.start
    # The kernel asks for OUT only to step from a word to the next.
    problem = Problem(packed.pitch, packed.in_features, packed.dtype, packed.pattern, 1)
    expand_kernel[triton.cdiv(count, config["block_out"]), triton.cdiv(packed.in_features, config["block_in"])](
        packed.mask_words, packed.values, dense, rows.start, count, **_constexprs(problem, config), num_warps=config["num_warps"],
    )  # fmt: skip
    return dense


def launch(packed: PackedWeight, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """``[tokens, out]`` = x W^T in the weight's dtype, accumulated as torch accumulates: in y, where that has this dtype.

    Args:
        packed: W ``[out, in]``, any pattern and dtype.
        x: ``[tokens, in]``; multiplied in the weight's dtype.
        y: ``[tokens, out]``, any float dtype.
        config: As in :func:`expand`, and ``piece`` rows at a time.
    """
    narrow, found = x.to(packed.dtype), y if y.dtype == packed.dtype else torch.empty_like(y, dtype=packed.dtype)
    for start in range(0, packed.out_features, config["piece"]):
        rows = slice(start, min(start + config["piece"], packed.out_features))
        shape = rows.stop - rows.start, packed.in_features
        dense = expand(packed, rows, scratch("expanded rows", shape, packed.dtype, packed.device), config)
        torch.mm(narrow, dense.T, out=found[:, rows])
    return found


def default(problem: Problem) -> Config:
    """Pieces of ``PIECE_BYTES``, whole 128-row tiles of the product."""
    piece = max(128, PIECE_BYTES // (problem.in_features * problem.dtype.itemsize) // 128 * 128)
    return {"block_out": 16, "block_in": 128, "num_warps": 4, "piece": min(piece, problem.out_features)}


def space(problem: Problem) -> list[Config]:
    """Tiles of 2048 or 4096 elements, one piece or several."""
    pieces = {default(problem)["piece"], problem.out_features}
    return [
        {"block_out": block_out, "block_in": block_in, "num_warps": num_warps, "piece": piece}
        for block_out, block_in in ((8, 256), (16, 128), (32, 64), (16, 256), (32, 128))
        for num_warps in (4, 8)
        for piece in sorted(pieces)
    ]


def compile_source(problem: Problem, config: Config) -> CompileSource:
    """For a compile-only check."""
    pointer = pointer_type(problem.dtype)
    signature = {"mask_ptr": "*i32", "values_ptr": pointer, "dense_ptr": pointer, "first_row": "i32", "rows": "i32"}
    return CompileSource(expand_kernel, signature, _constexprs(problem, config), config["num_warps"])


register(
    Variant(
        kernel="spmm",
        name="expand",
        summary="rows of the dense matrix into a small shared buffer, then torch's own product",
        launch=launch,
        space=space,
        default=default,
        compile_source=compile_source,
        tokens=(2, None),
    )
)
