"""A Triton matrix-vector product over 8-bit weights, built and searched like the dense one: next tile prefetched, 16-byte loads.

Codes are decoded by integer arithmetic on whole words, so that both kinds run on any back end and in the interpreter. int8: a code plus
128 as the low byte of the float32 2^23 is the number 2^23 + 128 + code, and one subtraction is exact (a conversion instruction runs at
a fraction of the rate). fp8: an e4m3 code's bits, moved up in a half, are the same number times 2^-8, subnormals included; the
factor 2^8 is applied once a row, with the scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.launching import pointer_type
from sdbench.kernels.quantized.weights import DTYPES, QuantizedWeight, words_of
from sdbench.kernels.registry import CompileSource, Config, Problem


@triton.jit
def _decode(word, BYTE: tl.constexpr, FP8: tl.constexpr):
    """Byte BYTE of each word as float32; an fp8 code as 2^-8 of what it stands for."""
    if FP8:
        if BYTE % 2 == 0:
            word = word << 8
        # Two halves at once: the sign stays, exponent and mantissa move a bit down, to where a half has them.
        halves = (word & -2147450880) | ((word & 0x7F007F00) >> 1)
        if BYTE > 1:
            half = (halves >> 16).to(tl.int16)
        else:
            half = halves.to(tl.int16)
        value = half.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = (((word >> (8 * BYTE)) & 255) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0
    return value


@triton.jit
def _load_tile(values_ptr, rows, columns, OUT: tl.constexpr, WORDS: tl.constexpr, GUARD: tl.constexpr):
    pointer = values_ptr + rows.to(tl.int64)[:, None] * WORDS + columns[None, :]
    if GUARD:
        tile = tl.load(pointer, mask=(rows < OUT)[:, None] & (columns < WORDS)[None, :], other=0, eviction_policy="evict_first")
    else:
        tile = tl.load(pointer, eviction_policy="evict_first")
    return tile


@triton.jit
def _add_tile(total, tile, x_ptr, columns, IN: tl.constexpr, WORDS: tl.constexpr, FP8: tl.constexpr, GUARD: tl.constexpr):
    """Adds four codes a word times the x of each quarter."""
    for byte in tl.static_range(4):
        at = byte * WORDS + columns
        if GUARD:
            x = tl.load(x_ptr + at, mask=(columns < WORDS) & (at < IN), other=0.0)
        else:
            x = tl.load(x_ptr + at)
        total += _decode(tile, byte, FP8) * x.to(tl.float32)[None, :]
    return total


@triton.jit
def gemv_kernel(
    values_ptr, scale_ptr, x_ptr, y_ptr,
    OUT: tl.constexpr, IN: tl.constexpr, WORDS: tl.constexpr, FP8: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr, DEPTH: tl.constexpr, GUARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = scale * (codes x), one program for BLOCK_OUT rows; DEPTH tiles are loaded ahead."""
    PADDED: tl.constexpr = IN != 4 * WORDS
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    columns = tl.arange(0, BLOCK_WORDS)
    total = tl.zeros([BLOCK_OUT, BLOCK_WORDS], tl.float32)
    if PDL == 1:
        gdc_launch_dependents()
    tile = _load_tile(values_ptr, rows, columns, OUT, WORDS, GUARD)
    if DEPTH == 2:
        tile1 = _load_tile(values_ptr, rows, columns + BLOCK_WORDS, OUT, WORDS, GUARD)
    scale = tl.load(scale_ptr + rows, mask=rows < OUT, other=0.0)
    if PDL:
        gdc_wait()
    for _ in range(0, (WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS - DEPTH):
        following = _load_tile(values_ptr, rows, columns + DEPTH * BLOCK_WORDS, OUT, WORDS, GUARD)
        total = _add_tile(total, tile, x_ptr, columns, IN, WORDS, FP8, PADDED)
        columns += BLOCK_WORDS
        if DEPTH == 2:
            tile = tile1
            tile1 = following
        else:
            tile = following
    if PDL == 2:
        gdc_launch_dependents()
    total = _add_tile(total, tile, x_ptr, columns, IN, WORDS, FP8, GUARD)
    if DEPTH == 2:
        total = _add_tile(total, tile1, x_ptr, columns + BLOCK_WORDS, IN, WORDS, FP8, GUARD)
    if FP8:
        scale *= 256.0
    tl.store(y_ptr + rows, (tl.sum(total, 1) * scale).to(y_ptr.dtype.element_ty), mask=rows < OUT)


def _constexprs(out_features: int, in_features: int, fp8: bool, config: Config) -> dict[str, int | bool]:
    words = words_of(in_features)
    even = out_features % config["block_out"] == 0 and words % config["block_words"] == 0 and in_features == 4 * words
    return {
        "OUT": out_features,
        "IN": in_features,
        "WORDS": words,
        "FP8": fp8,
        "BLOCK_OUT": config["block_out"],
        "BLOCK_WORDS": config["block_words"],
        "DEPTH": min(config["depth"], triton.cdiv(words, config["block_words"])),
        "GUARD": not even,
        "PDL": config["pdl"],
    }


def launch(weight: QuantizedWeight, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """Fills and returns y ``[out]`` = scale * (codes x), summed in float32.

    Args:
        weight: W ``[out, in]``, int8 or fp8.
        x: ``[in]``, contiguous, any float dtype.
        y: ``[out]``, contiguous.
        config: ``block_out`` rows, ``block_words`` words a step (powers of two), ``num_warps``, ``depth`` tiles loaded ahead (1 or 2),
            ``pdl`` for programmatic dependent launch: 0, 1 (the next kernel may start at once) or 2 (after the last load).
    """
    gemv_kernel[(triton.cdiv(weight.shape[0], config["block_out"]),)](
        weight.values.view(torch.int32), weight.scale, x, y, **_constexprs(*weight.shape, weight.values.dtype == DTYPES["fp8"], config),
        num_warps=config["num_warps"], launch_pdl=bool(config["pdl"]),
    )  # fmt: skip
    return y


def _config(block_out: int, num_warps: int, depth: int, pdl: int) -> Config:
    """All warps of a program along K, four words a lane and step: x is then read where it is needed, with no exchange between threads."""
    return {"block_out": block_out, "block_words": 128 * num_warps, "num_warps": num_warps, "depth": depth, "pdl": pdl}


def space(problem: Problem) -> list[Config]:
    """Tiles of 4 to 32 words (16 to 128 bytes) a thread that leave at least two programs an SM."""
    return [
        _config(block_out, num_warps, depth, pdl)
        for block_out in (1, 2, 4, 8)
        for num_warps in (1, 2, 4, 8)
        for depth in (1, 2)
        for pdl in ((1, 2) if problem.dependent_launch else (0,))
        if problem.out_features / block_out >= 2 * problem.sm_count and 128 * num_warps < 2 * words_of(problem.in_features)
    ] or [default(problem)]


def default(problem: Problem) -> Config:
    """Four rows a program, eight where that makes over 64 programs an SM; warps along K until there are about 16 an SM."""
    block_out = 4 if problem.out_features <= 4 * 64 * problem.sm_count else 8
    wanted = 16 * problem.sm_count / (problem.out_features / block_out)
    longest = words_of(problem.in_features) // 64
    return _config(block_out, max(warps for warps in (1, 2, 4, 8) if warps <= max(1, min(2 * wanted, longest))), 1, 0)


def compile_source(problem: Problem, config: Config, kind: str) -> CompileSource:
    """For a compile-only check with x of the unquantised weight's dtype and float32 y."""
    signature = {"values_ptr": "*i32", "scale_ptr": "*fp32", "x_ptr": pointer_type(problem.dtype), "y_ptr": "*fp32"}
    constexprs = _constexprs(problem.out_features, problem.in_features, kind == "fp8", config)
    return CompileSource(gemv_kernel, signature, constexprs, config["num_warps"])
