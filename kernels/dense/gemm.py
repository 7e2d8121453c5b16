"""A Triton dense product for a few tokens, on the matrix units: the baseline that keeps small batches honest.

A program owns BLOCK_OUT rows of the weight and all tokens, and walks K, or a part of it where rows are few, with several tiles in flight.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.finish import whole
from sdbench.kernels.launching import interpreted, pointer_type
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant, register

MOST_TOKENS = 32
_MATRIX_COLUMNS = 16
"""Fewest columns that every matrix unit takes."""

_LONGEST_SUM = 5120
"""Columns that the matrix units of a Hopper GPU add up at most: they cut off what does not fit, and their error grows with each step."""


@triton.jit
def gemm_kernel(
    w_ptr, x_ptr, y_ptr, tokens,
    OUT: tl.constexpr, IN: tl.constexpr, TOKENS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y[split, t, r] = the split's share of (W x_t)[r]; grid (row blocks, splits).

    TOKENS is a power of two; those from ``tokens`` on are zeros.
    """
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    token = tl.arange(0, TOKENS)
    w_ptr += row.to(tl.int64)[:, None] * IN
    x_ptr += token[None, :] * IN
    PART: tl.constexpr = (IN + SPLITS * PARTS * BLOCK_K - 1) // (SPLITS * PARTS * BLOCK_K) * BLOCK_K
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_OUT, TOKENS], tl.float32)
    for part in tl.static_range(PARTS):
        sums = tl.zeros([BLOCK_OUT, TOKENS], tl.float32)
        first = (tl.program_id(1) * PARTS + part) * PART
        for start in tl.range(first, min(IN, first + PART), BLOCK_K, num_stages=STAGES):
            column = start + tl.arange(0, BLOCK_K)
            w = tl.load(w_ptr + column[None, :], mask=(row < OUT)[:, None] & (column < IN)[None, :], other=0.0)
            x = tl.load(x_ptr + column[:, None], mask=(token < tokens)[None, :] & (column < IN)[:, None], other=0.0)
            if WIDE:
                w = w.to(tl.float32)
            sums = tl.dot(w, x.to(w.dtype), sums, input_precision="ieee")
        total += sums
    y_ptr += tl.program_id(1) * tokens * OUT
    tl.store(y_ptr + token[None, :] * OUT + row[:, None], total, mask=(row < OUT)[:, None] & (token < tokens)[None, :])


def _constexprs(problem: Problem, config: Config) -> dict[str, int]:
    return {
        "OUT": problem.out_features,
        "IN": problem.in_features,
        "TOKENS": max(_MATRIX_COLUMNS, triton.next_power_of_2(problem.tokens)),
        "BLOCK_OUT": config["block_out"],
        "BLOCK_K": config["block_k"],
        "STAGES": config["stages"],
        "SPLITS": config["splits"],
        "PARTS": triton.cdiv(triton.cdiv(problem.in_features, config["splits"]), _LONGEST_SUM),
        "PDL": config["pdl"],
        # The interpreter multiplies bits of bf16, not numbers.
        "WIDE": interpreted(),
    }


def launch_parts(weight: Tensor, x: Tensor, parts: Tensor, config: Config) -> None:
    """Fills parts ``[splits, tokens, out]``, whose sum is x W^T.

    Args:
        weight: W ``[out, in]``, contiguous.
        x: ``[tokens, in]``, contiguous, at most ``MOST_TOKENS``; multiplied in the weight's dtype.
        parts: Contiguous.
        config: ``block_out`` rows, ``block_k`` columns a step (powers of two), ``num_warps``, ``stages`` tiles in flight, ``splits`` of K,
            ``pdl`` 1 for programmatic dependent launch.
    """
    problem = Problem(weight.shape[0], weight.shape[1], weight.dtype, None, 1, tokens=len(x))
    gemm_kernel[triton.cdiv(weight.shape[0], config["block_out"]), config["splits"]](
        weight, x, parts, len(x), **_constexprs(problem, config), num_warps=config["num_warps"], launch_pdl=bool(config["pdl"])
    )


def space(problem: Problem) -> list[Config]:
    """Tiles of 4 to 16 KB with 32 to 128 KB of them in flight; K is split where rows make less than four programs an SM."""
    return [
        {"block_out": block_out, "block_k": block_k, "num_warps": num_warps, "stages": stages, "splits": splits, "pdl": pdl}
        for block_out in (16, 32, 64)
        for block_k in (128, 256)
        for num_warps in (2, 4)
        for stages in (3, 4, 6)
        for splits in (1, 2, 4, 8)
        for pdl in ((0, 1) if problem.dependent_launch else (0,))
        if splits == 1
        or (problem.out_features / block_out * splits <= 4 * problem.sm_count and problem.in_features >= splits * stages * block_k)
        if 32 <= block_out * block_k * problem.dtype.itemsize * stages / 1024 <= 128
    ]


def default(problem: Problem) -> Config:
    """Small tiles, many programs: what is waited for is memory."""
    stages = 4 if problem.dtype.itemsize == 2 else 3
    return {"block_out": 16, "block_k": 256, "num_warps": 4, "stages": stages, "splits": 1, "pdl": 0}


def compile_source(problem: Problem, config: Config) -> CompileSource:
    """For a compile-only check with x of the weight's dtype and float32 y."""
    pointer = pointer_type(problem.dtype)
    signature = {"w_ptr": pointer, "x_ptr": pointer, "y_ptr": pointer_type(torch.float32), "tokens": "i32"}
    return CompileSource(gemm_kernel, signature, _constexprs(problem, config), config["num_warps"])


register(
    Variant(
        kernel="dense",
        name="gemm",
        summary="Triton dense product of a few tokens on the matrix units",
        launch=partial(whole, launch_parts),
        space=space,
        default=default,
        compile_source=compile_source,
        tokens=(2, MOST_TOKENS),
        launch_parts=launch_parts,
    )
)
