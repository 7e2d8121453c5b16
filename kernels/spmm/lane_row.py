"""Packed weight times a few tokens: the SpMV's lane-a-row walk, each value used for every token.

A decoded position costs the same whatever the number of tokens, and with the tokens of x side by side its elements come in one load: for T
tokens a value costs T conversions and T multiply-adds more, nothing else. So it pays up to the number of tokens at which those bind; beyond
it the matrix units win (``expand.py``).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.launching import on_nvidia, pointer_type
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant, register
from sdbench.kernels.spmv.bits import take_highest
from sdbench.kernels.spmv.chunks import widen
from sdbench.kernels.spmv.finish import finish, pair_warps, workspace
from sdbench.kernels.spmv.lane_row import constraint as chunk_constraint
from sdbench.kernels.spmv.lane_row import load_word
from sdbench.packing import PackedWeight

MOST_TOKENS = 8
"""Tokens whose elements of x, 16 bits each, fit one 16-byte load."""


@triton.jit
def _add_value(total, mask, value, x_ptr, limit, TOKENS: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr):
    """total[lane, t] += value[lane] * x[column of the highest set bit, t]; also the words without that bit."""
    position, mask = take_highest(mask, NVIDIA)
    pointer = (x_ptr + position * TOKENS)[:, None] + tl.arange(0, TOKENS)[None, :]
    if GUARD:
        x = tl.load(pointer, mask=(position < limit)[:, None], other=0.0)
    else:
        x = tl.load(pointer)
    return total + value[:, None] * x.to(tl.float32), mask


@triton.jit
def _add_four(
    total, mask, quad, x_ptr, limit, TOKENS: tl.constexpr, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr
):  # fmt: skip
    low = quad.to(tl.int32)
    high = (quad >> 32).to(tl.int32)
    total, mask = _add_value(total, mask, widen(low, False, BF16), x_ptr, limit, TOKENS, NVIDIA, GUARD)
    total, mask = _add_value(total, mask, widen(low, True, BF16), x_ptr, limit, TOKENS, NVIDIA, GUARD)
    total, mask = _add_value(total, mask, widen(high, False, BF16), x_ptr, limit, TOKENS, NVIDIA, GUARD)
    return _add_value(total, mask, widen(high, True, BF16), x_ptr, limit, TOKENS, NVIDIA, GUARD)


@triton.jit
def _add_word(
    total, mask, a, b, c, x_ptr, limit,
    CHUNKS: tl.constexpr, TOKENS: tl.constexpr, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """All values of each lane's mask word, eight (two int64 a lane) a chunk."""
    for chunk in tl.static_range(CHUNKS):
        if chunk == 0:
            first, second = tl.split(a)
        elif chunk == 1:
            first, second = tl.split(b)
        else:
            first, second = tl.split(c)
        total, mask = _add_four(total, mask, first, x_ptr, limit, TOKENS, BF16, NVIDIA, GUARD)
        total, mask = _add_four(total, mask, second, x_ptr, limit, TOKENS, BF16, NVIDIA, GUARD)
    return total


@triton.jit
def lane_row_kernel(
    mask_ptr, values_ptr, x_ptr, sums_ptr,
    OUT: tl.constexpr, PITCH: tl.constexpr, IN: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr, BF16: tl.constexpr, NVIDIA: tl.constexpr,
    GUARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums[split, t, r] = the split's share of (W x_t)[r]; x is ``[IN, TOKENS]``; grid (row blocks, splits)."""
    PER_SPLIT: tl.constexpr = (WORDS + SPLITS - 1) // SPLITS
    STRIDE: tl.constexpr = PITCH * 2
    lane = tl.arange(0, BLOCK_OUT * BLOCK_WORDS)
    row = tl.program_id(0) * BLOCK_OUT + lane % BLOCK_OUT
    word = tl.program_id(1) * PER_SPLIT + lane // BLOCK_OUT
    end = tl.minimum((tl.program_id(1) + 1) * PER_SPLIT, WORDS)
    at = word.to(tl.int64)
    mask_ptr += at * PITCH + row
    value_ptr = (values_ptr + (at * CHUNKS * PITCH + row) * 2)[:, None] + tl.arange(0, 2)[None, :]
    x_start = x_ptr
    total = tl.zeros([BLOCK_OUT * BLOCK_WORDS, TOKENS], tl.float32)
    if PDL:
        gdc_launch_dependents()
    live = (word < end) & (row < OUT)
    mask, a, b, c = load_word(mask_ptr, value_ptr, live, STRIDE, CHUNKS, True)
    if PDL:
        gdc_wait()
    for _ in range(0, (PER_SPLIT + BLOCK_WORDS - 1) // BLOCK_WORDS - 1):
        mask_ptr += BLOCK_WORDS * PITCH
        value_ptr += BLOCK_WORDS * CHUNKS * STRIDE
        later = (word + BLOCK_WORDS < end) & (row < OUT)
        next_mask, next_a, next_b, next_c = load_word(mask_ptr, value_ptr, later, STRIDE, CHUNKS, True)
        limit = tl.where((word < end) & (row < OUT), IN - word * 32, 0).to(tl.uint32)
        total = _add_word(total, mask, a, b, c, x_ptr + word * (32 * TOKENS), limit, CHUNKS, TOKENS, BF16, NVIDIA, GUARD)
        word += BLOCK_WORDS
        mask, a, b, c = next_mask, next_a, next_b, next_c
    live = (word < end) & (row < OUT)
    # Lanes past the end hold zeros; with a limit of 0 they read nothing of x.
    limit = tl.where(live, IN - word * 32, 0).to(tl.uint32)
    x_ptr = tl.where(live, x_start + word * (32 * TOKENS), x_start)
    total = _add_word(total, mask, a, b, c, x_ptr, limit, CHUNKS, TOKENS, BF16, NVIDIA, True)
    summed = tl.sum(tl.reshape(total, [BLOCK_WORDS, BLOCK_OUT, TOKENS]), 0)
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    place = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))[None, :] * OUT + rows[:, None]
    tl.store(sums_ptr + place, summed, mask=(rows < OUT)[:, None])


def _constexprs(problem: Problem, pitch: int, tokens: int, config: Config, nvidia: bool) -> dict[str, int | bool]:
    assert problem.pattern is not None
    return {
        "OUT": problem.out_features,
        "PITCH": pitch,
        "IN": problem.in_features,
        "WORDS": problem.words,
        "SPLITS": config["splits"],
        "TOKENS": tokens,
        "CHUNKS": problem.pattern.kept_per_word // 8,
        "BLOCK_OUT": config["block_out"],
        "BLOCK_WORDS": config["block_words"],
        "BF16": problem.dtype == torch.bfloat16,
        "NVIDIA": nvidia,
        # A padded last word, rows or words past the end of a program's share.
        "GUARD": bool(problem.in_features % 32 or problem.out_features % config["block_out"]),
        "PDL": bool(config["pdl"]),
    }


def launch(packed: PackedWeight, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """Fills and returns y ``[tokens, out]`` = x W^T.

    Args:
        packed: W ``[out, in]``, 16-bit values, S in {8, 16, 24}.
        x: ``[tokens, in]``, at most ``MOST_TOKENS``, any float dtype.
        y: ``[tokens, out]``, contiguous, any float dtype.
        config: ``block_out`` rows and ``block_words`` mask words a program (powers of two; a thread a pair), ``splits`` of K, ``pdl``.
    """
    tokens = len(x)
    width = triton.next_power_of_2(tokens)
    # Tokens side by side, and as many as a power of two: the rest are zeros, whose sums are left behind.
    beside = torch.nn.functional.pad(x, (0, 0, 0, width - tokens)).t().contiguous()
    problem = Problem(*packed.shape, packed.dtype, packed.pattern, 1)
    splits = config["splits"]
    sums = workspace(y[0], splits * width).view(splits, width, packed.out_features)
    lane_row_kernel[triton.cdiv(packed.out_features, config["block_out"]), splits](
        packed.mask_words, packed.values.view(torch.int64), beside, sums,
        **_constexprs(problem, packed.pitch, width, config, on_nvidia()), num_warps=pair_warps(config), launch_pdl=bool(config["pdl"]),
    )  # fmt: skip
    if tokens < width:
        y.copy_(sums[:, :tokens].sum(0))
        return y
    return finish(sums.view(splits, -1), y.view(-1), dependent=bool(config["pdl"])).view(y.shape)


def constraint(problem: Problem) -> str | None:
    """Why the 16-byte chunks, or the tokens, do not fit a problem."""
    if problem.tokens > MOST_TOKENS:
        return f"takes {MOST_TOKENS} tokens at most, not {problem.tokens}"
    return chunk_constraint(problem)


def space(problem: Problem) -> list[Config]:
    """The SpMV's tiles; K is split where rows are few."""
    return [
        {"block_out": block_out, "block_words": block_words, "splits": splits, "pdl": pdl}
        for block_out, block_words in ((8, 32), (16, 8), (16, 16), (32, 4), (32, 8))
        for splits in (1, 2, 4, 5, 8, 19)
        for pdl in ((0, 1) if problem.dependent_launch else (0,))
        if problem.words % splits == 0 and problem.words >= splits * block_words
    ] or [default(problem)]


def default(problem: Problem) -> Config:
    """About 16 warps an SM without a search."""
    row_blocks = triton.cdiv(problem.out_features, 16)
    block_words = min(16, max(2, triton.next_power_of_2(problem.words) // 2))
    wanted = max(1, round(32 * problem.sm_count / (row_blocks * block_words)))
    return {"block_out": 16, "block_words": block_words, "splits": max(1, min(wanted, problem.words // block_words)), "pdl": 0}


def compile_source(problem: Problem, config: Config) -> CompileSource:
    """For a compile-only check with bf16 x."""
    pointers = {"mask_ptr": "*i32", "values_ptr": "*i64", "x_ptr": pointer_type(torch.bfloat16), "sums_ptr": "*fp32"}
    width = triton.next_power_of_2(problem.tokens)
    constexprs = _constexprs(problem, problem.out_features, width, config, True)
    return CompileSource(lane_row_kernel, pointers, constexprs, pair_warps(config))


register(
    Variant(
        kernel="spmm",
        name="lane_row",
        summary=f"the SpMV's walk with up to {MOST_TOKENS} tokens side by side",
        launch=launch,
        space=space,
        default=default,
        constraint=constraint,
        compile_source=compile_source,
        tokens=(2, MOST_TOKENS),
    )
)
