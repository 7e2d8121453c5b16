"""A Triton dense matrix-vector product, tuned as hard as the sparse one: the baseline that keeps the headline honest.

A program owns BLOCK_OUT rows and walks K in BLOCK_K steps with the next tile prefetched into registers; lanes lie along K, so that weight
loads are 16 bytes each and neighbouring, and the sum over K happens once, at the end.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.launching import pointer_type
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant, register


@triton.jit
def _load_tile(w_ptr, rows, columns, OUT, in_features, GUARD: tl.constexpr):
    pointer = w_ptr + rows.to(tl.int64)[:, None] * in_features + columns[None, :]
    if GUARD:
        tile = tl.load(pointer, mask=(rows < OUT)[:, None] & (columns < in_features)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(pointer, eviction_policy="evict_first")
    return tile


@triton.jit
def gemv_kernel(
    w_ptr, x_ptr, y_ptr, OUT: tl.constexpr, IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, GUARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = W x, one program for BLOCK_OUT rows; DEPTH tiles are loaded ahead."""
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    columns = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_OUT, BLOCK_K], tl.float32)
    if PDL == 1:
        gdc_launch_dependents()
    tile = _load_tile(w_ptr, rows, columns, OUT, IN, GUARD)
    if DEPTH == 2:
        tile1 = _load_tile(w_ptr, rows, columns + BLOCK_K, OUT, IN, GUARD)
    if PDL:
        gdc_wait()
    for _ in range(0, (IN + BLOCK_K - 1) // BLOCK_K - DEPTH):
        following = _load_tile(w_ptr, rows, columns + DEPTH * BLOCK_K, OUT, IN, GUARD)
        total += tile.to(tl.float32) * tl.load(x_ptr + columns).to(tl.float32)[None, :]
        columns += BLOCK_K
        if DEPTH == 2:
            tile = tile1
            tile1 = following
        else:
            tile = following
    if PDL == 2:
        gdc_launch_dependents()
    total += tile.to(tl.float32) * tl.load(x_ptr + columns, mask=columns < IN, other=0.0).to(tl.float32)[None, :]
    if DEPTH == 2:
        columns += BLOCK_K
        total += tile1.to(tl.float32) * tl.load(x_ptr + columns, mask=columns < IN, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows, tl.sum(total, 1).to(y_ptr.dtype.element_ty), mask=rows < OUT)


def _constexprs(problem: Problem, config: Config) -> dict[str, int | bool]:
    return {
        "OUT": problem.out_features,
        "IN": problem.in_features,
        "BLOCK_OUT": config["block_out"],
        "BLOCK_K": config["block_k"],
        "DEPTH": min(config["depth"], triton.cdiv(problem.in_features, config["block_k"])),
        "GUARD": bool(problem.out_features % config["block_out"] or problem.in_features % config["block_k"]),
        "PDL": config["pdl"],
    }


def launch(weight: Tensor, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """Fills and returns y ``[out]`` = W x.

    Args:
        weight: W ``[out, in]``, contiguous.
        x: ``[in]``, contiguous.
        y: ``[out]``, contiguous.
        config: ``block_out`` rows, ``block_k`` columns a step (powers of two), ``num_warps``, ``depth`` tiles loaded ahead (1 or 2),
            ``pdl`` for programmatic dependent launch: 0, 1 (the next kernel may start at once) or 2 (after the last load).
    """
    problem = Problem(weight.shape[0], weight.shape[1], weight.dtype, None, 1)
    gemv_kernel[(triton.cdiv(weight.shape[0], config["block_out"]),)](
        weight, x, y, **_constexprs(problem, config), num_warps=config["num_warps"], launch_pdl=bool(config["pdl"])
    )
    return y


def space(problem: Problem) -> list[Config]:
    """Tiles of 8 to 32 weights a thread that leave at least two programs an SM."""
    return [
        {"block_out": block_out, "block_k": block_k, "num_warps": num_warps, "depth": depth, "pdl": pdl}
        for block_out in (2, 4, 8)
        for block_k in (512, 1024, 2048)
        for num_warps in (1, 2, 4, 8)
        for depth in (1, 2)
        for pdl in ((1, 2) if problem.dependent_launch else (0,))
        # All warps lie along K, or Triton moves x through shared memory in every step.
        if block_k >= 256 * num_warps
        and 8 <= block_out * block_k / (32 * num_warps) <= 32
        and problem.out_features / block_out >= 2 * problem.sm_count
        and block_k < 2 * problem.in_features
    ] or [default(problem)]


def default(problem: Problem) -> Config:
    """A tile that did well on the shapes of Qwen3-4B."""
    return {
        "block_out": 4,
        "block_k": min(1024, triton.next_power_of_2(problem.in_features)),
        "num_warps": 4,
        "depth": 1,
        "pdl": 0,
    }


def compile_source(problem: Problem, config: Config) -> CompileSource:
    """For a compile-only check with x of the weight's dtype and float32 y."""
    pointer = pointer_type(problem.dtype)
    signature = {"w_ptr": pointer, "x_ptr": pointer, "y_ptr": "*fp32"}
    return CompileSource(gemv_kernel, signature, _constexprs(problem, config), config["num_warps"])


register(
    Variant(
        kernel="dense",
        name="gemv",
        summary="Triton dense GEMV, next tile prefetched",
        launch=launch,
        space=space,
        default=default,
        compile_source=compile_source,
    )
)
