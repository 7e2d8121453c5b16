"""SpMV with one matrix row a lane: 16-byte value loads, the next word's weights prefetched into registers.

Each thread holds one (row, word) pair. A warp's lanes are neighbouring rows of the same word, so mask loads are 128 bytes a warp, value
loads 512 bytes in 16-byte pieces, and the gathers of x fall in one 32-element window. Only 1-D tiles appear, which keeps one Triton layout.
For 16-bit weights and patterns whose word holds 8, 16 or 24 values (1:4, 2:4, 3:4, 4:8, 8:16, 16:32 and the like).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.launching import interpreted, pointer_type
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant, register
from sdbench.kernels.spmv.bits import gather, take_highest
from sdbench.kernels.spmv.finish import finish_rows, pair_warps, workspace
from sdbench.kernels.spmv.nibbles import byte_of, high_positions, low_positions, single_positions
from sdbench.packing import PackedWeight
from sdbench.pattern import WORD

_CHUNK = 8


@triton.jit
def _widen(pair, HIGH: tl.constexpr, BF16: tl.constexpr):
    """One 16-bit value of a 32-bit pair as float32; a bf16's bits are a float32's upper half."""
    if BF16:
        if HIGH:
            bits = pair & -65536
        else:
            bits = pair << 16
        value = bits.to(tl.float32, bitcast=True)
    else:
        if HIGH:
            half = (pair >> 16).to(tl.int16)
        else:
            half = pair.to(tl.int16)
        value = half.to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _add_four(even, odd, quad, p0, p1, p2, p3, x_ptr, limit, BF16: tl.constexpr, GUARD: tl.constexpr):
    """Adds four packed values (one int64) times x at four positions."""
    low = quad.to(tl.int32)
    high = (quad >> 32).to(tl.int32)
    even += _widen(low, False, BF16) * gather(x_ptr, p0, limit, GUARD)
    odd += _widen(low, True, BF16) * gather(x_ptr, p1, limit, GUARD)
    even += _widen(high, False, BF16) * gather(x_ptr, p2, limit, GUARD)
    odd += _widen(high, True, BF16) * gather(x_ptr, p3, limit, GUARD)
    return even, odd


@triton.jit
def _add_four_scanned(even, odd, mask, quad, x_ptr, limit, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr):
    """Four values at the four highest set bits; returns the sums and the bits that are left."""
    p0, mask = take_highest(mask, NVIDIA)
    p1, mask = take_highest(mask, NVIDIA)
    p2, mask = take_highest(mask, NVIDIA)
    p3, mask = take_highest(mask, NVIDIA)
    even, odd = _add_four(even, odd, quad, p0, p1, p2, p3, x_ptr, limit, BF16, GUARD)
    return even, odd, mask


@triton.jit
def _add_chunk_scanned(even, odd, mask, chunk, x_ptr, limit, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr):
    """Eight values (two int64 a lane) at the eight highest set bits."""
    first, second = tl.split(chunk)
    even, odd, mask = _add_four_scanned(even, odd, mask, first, x_ptr, limit, BF16, NVIDIA, GUARD)
    return _add_four_scanned(even, odd, mask, second, x_ptr, limit, BF16, NVIDIA, GUARD)


@triton.jit
def _add_chunk_pairs(
    even, odd, half, chunk, x_ptr, limit, FIRST: tl.constexpr, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr
):
    """Eight values of a 2:4 word: both positions of the four nibbles in the lower half of ``half``, whose first column is FIRST."""
    first, second = tl.split(chunk)
    high = high_positions(half, NVIDIA)
    low = low_positions(half, NVIDIA)
    even, odd = _add_four(
        even, odd, first,
        byte_of(high, 3) + (FIRST + 12), byte_of(low, 3) + (FIRST + 12), byte_of(high, 2) + (FIRST + 8), byte_of(low, 2) + (FIRST + 8),
        x_ptr, limit, BF16, GUARD,
    )  # fmt: skip
    return _add_four(
        even, odd, second,
        byte_of(high, 1) + (FIRST + 4), byte_of(low, 1) + (FIRST + 4), byte_of(high, 0) + FIRST, byte_of(low, 0) + FIRST,
        x_ptr, limit, BF16, GUARD,
    )  # fmt: skip


@triton.jit
def _add_four_singles(
    even, odd, half, quad, x_ptr, limit, FIRST: tl.constexpr, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr
):
    """Four values of a 1:4 word: the one position of each of four nibbles."""
    at = single_positions(half, NVIDIA)
    return _add_four(
        even, odd, quad,
        byte_of(at, 3) + (FIRST + 12), byte_of(at, 2) + (FIRST + 8), byte_of(at, 1) + (FIRST + 4), byte_of(at, 0) + FIRST,
        x_ptr, limit, BF16, GUARD,
    )  # fmt: skip


@triton.jit
def _load_chunk(pointer, live, GUARD: tl.constexpr):
    """Sixteen bytes a lane; weights are read once, so they leave the cache first."""
    if GUARD:
        chunk = tl.load(pointer, mask=live[:, None], other=0, eviction_policy="evict_first")
    else:
        chunk = tl.load(pointer, eviction_policy="evict_first")
    return chunk


@triton.jit
def _load_word(mask_ptr, value_ptr, stride, live, CHUNKS: tl.constexpr, GUARD: tl.constexpr):
    """The mask word of each lane and its one to three chunks; chunks past CHUNKS repeat the last one and are never used."""
    if GUARD:
        mask = tl.load(mask_ptr, mask=live, other=0, eviction_policy="evict_first")
    else:
        mask = tl.load(mask_ptr, eviction_policy="evict_first")
    a = _load_chunk(value_ptr, live, GUARD)
    b = a
    c = a
    if CHUNKS > 1:
        b = _load_chunk(value_ptr + stride, live, GUARD)
    if CHUNKS > 2:
        c = _load_chunk(value_ptr + 2 * stride, live, GUARD)
    return mask.to(tl.uint32, bitcast=True), a, b, c


@triton.jit
def _add_word(
    even, odd, mask, a, b, c, x_ptr, limit,
    CHUNKS: tl.constexpr, NIBBLE: tl.constexpr, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """All values of each lane's word; NIBBLE is N of an N:4 pattern whose positions are looked up, 0 where bits are scanned."""
    if NIBBLE == 2:
        even, odd = _add_chunk_pairs(even, odd, mask >> 16, a, x_ptr, limit, 16, BF16, NVIDIA, GUARD)
        even, odd = _add_chunk_pairs(even, odd, mask, b, x_ptr, limit, 0, BF16, NVIDIA, GUARD)
    elif NIBBLE == 1:
        first, second = tl.split(a)
        even, odd = _add_four_singles(even, odd, mask >> 16, first, x_ptr, limit, 16, BF16, NVIDIA, GUARD)
        even, odd = _add_four_singles(even, odd, mask, second, x_ptr, limit, 0, BF16, NVIDIA, GUARD)
    else:
        even, odd, mask = _add_chunk_scanned(even, odd, mask, a, x_ptr, limit, BF16, NVIDIA, GUARD)
        if CHUNKS > 1:
            even, odd, mask = _add_chunk_scanned(even, odd, mask, b, x_ptr, limit, BF16, NVIDIA, GUARD)
        if CHUNKS > 2:
            even, odd, mask = _add_chunk_scanned(even, odd, mask, c, x_ptr, limit, BF16, NVIDIA, GUARD)
    return even, odd


@triton.jit
def lane_row_kernel(
    mask_ptr, values_ptr, x_ptr, y_ptr, partial_ptr, arrived_ptr,
    OUT, in_features, words, words_per_split, splits,
    CHUNKS: tl.constexpr, NIBBLE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
    BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = W x over a grid (row blocks, splits); a program walks its split's words, BLOCK_WORDS at a time."""
    lane = tl.arange(0, BLOCK_OUT * BLOCK_WORDS)
    row = tl.program_id(0) * BLOCK_OUT + lane % BLOCK_OUT
    first = tl.program_id(1) * words_per_split
    end = tl.minimum(first + words_per_split, words)
    word = first + lane // BLOCK_OUT
    # 64-bit from here on: words * OUT * 16 passes 2**31 on large matrices.
    wide = word.to(tl.int64)
    mask_ptr += wide * OUT + row
    value_ptr = (values_ptr + (wide * CHUNKS * OUT + row) * 2)[:, None] + tl.arange(0, 2)[None, :]
    x_ptr += wide * 32
    stride = tl.cast(OUT, tl.int64) * 2
    live = (word < end) & (row < OUT)
    even = tl.zeros([BLOCK_OUT * BLOCK_WORDS], tl.float32)
    odd = tl.zeros([BLOCK_OUT * BLOCK_WORDS], tl.float32)
    if PDL:
        gdc_launch_dependents()
    mask, a, b, c = _load_word(mask_ptr, value_ptr, stride, live, CHUNKS, GUARD)
    if PDL:
        # x is the previous kernel's output, and what that one reads may be what this one writes; weights are neither.
        gdc_wait()
    for _ in range(1, tl.cdiv(words_per_split, BLOCK_WORDS)):
        # The next word's weights are on their way while the current one is decoded: the largest single gain of this kernel.
        mask_ptr += BLOCK_WORDS * stride // 2
        value_ptr += BLOCK_WORDS * CHUNKS * stride
        next_live = (word + BLOCK_WORDS < end) & (row < OUT)
        next_mask, next_a, next_b, next_c = _load_word(mask_ptr, value_ptr, stride, next_live, CHUNKS, GUARD)
        limit = tl.where(live, in_features - word * 32, 0).to(tl.uint32)
        even, odd = _add_word(even, odd, mask, a, b, c, x_ptr, limit, CHUNKS, NIBBLE, BF16, NVIDIA, GUARD)
        x_ptr += BLOCK_WORDS * 32
        word += BLOCK_WORDS
        live = next_live
        mask, a, b, c = next_mask, next_a, next_b, next_c
    limit = tl.where(live, in_features - word * 32, 0).to(tl.uint32)
    even, odd = _add_word(even, odd, mask, a, b, c, x_ptr, limit, CHUNKS, NIBBLE, BF16, NVIDIA, GUARD)
    total = tl.sum(tl.reshape(even + odd, [BLOCK_WORDS, BLOCK_OUT]), 0)
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    finish_rows(total, rows, rows < OUT, y_ptr, partial_ptr, arrived_ptr, OUT, splits, SPLIT_BLOCK)


def _constexprs(problem: Problem, config: Config, nvidia: bool, nibble: bool) -> dict[str, int | bool]:
    even = problem.in_features % WORD == 0 and problem.out_features % config["block_out"] == 0
    assert problem.pattern is not None
    return {
        "CHUNKS": problem.pattern.kept_per_word // _CHUNK,
        "NIBBLE": problem.pattern.keep if nibble else 0,
        "BLOCK_OUT": config["block_out"],
        "BLOCK_WORDS": config["block_words"],
        "SPLIT_BLOCK": triton.next_power_of_2(config["splits"]),
        "BF16": problem.dtype == torch.bfloat16,
        "NVIDIA": nvidia,
        "GUARD": not (even and problem.words % (config["splits"] * config["block_words"]) == 0),
        "PDL": bool(config["pdl"]),
    }


def launch(packed: PackedWeight, x: Tensor, y: Tensor, config: Config, nibble: bool = False) -> Tensor:
    """Fills and returns y ``[out]`` = W x.

    Args:
        packed: W ``[out, in]``, 16-bit values, S in {8, 16, 24}.
        x: ``[in]``, contiguous, any float dtype.
        y: ``[out]``, contiguous.
        config: ``block_out`` rows and ``block_words`` mask words a program (powers of two; a thread a pair), ``splits`` of K, ``pdl`` for
            programmatic dependent launch.
        nibble: Look positions up instead of scanning bits (1:4 and 2:4).
    """
    problem = Problem(*packed.shape, packed.dtype, packed.pattern, 1)
    row_blocks = triton.cdiv(packed.out_features, config["block_out"])
    partial, arrived = workspace(y, config["splits"], row_blocks)
    lane_row_kernel[row_blocks, config["splits"]](
        packed.mask_words, packed.values.view(torch.int64), x, y, partial, arrived,
        packed.out_features, packed.in_features, packed.words, triton.cdiv(packed.words, config["splits"]), config["splits"],
        **_constexprs(problem, config, not interpreted() and torch.version.hip is None, nibble),
        num_warps=pair_warps(config), launch_pdl=bool(config["pdl"]),
    )  # fmt: skip
    return y


def constraint(problem: Problem) -> str | None:
    """Why the 16-byte chunks do not fit a problem."""
    assert problem.pattern is not None
    if problem.dtype.itemsize != 2:
        return f"takes 16-bit weights, not {problem.dtype}"
    if problem.pattern.kept_per_word not in (8, 16, 24):
        return f"takes 8, 16 or 24 values a mask word; pattern {problem.pattern} has {problem.pattern.kept_per_word}"
    return None


def space(problem: Problem) -> list[Config]:
    """Block sizes and splits that give the device a sensible number of warps, each with at least two words a thread."""
    return [
        {"block_out": block_out, "block_words": block_words, "splits": splits, "pdl": pdl}
        for block_out in (16, 32)
        for block_words in (4, 8, 16, 32)
        for splits in (1, 2, 4, 5, 8, 19)
        # Dependent launch gains where a launch is short; a matrix that fills the device several times over can lose by it.
        for pdl in sorted({problem.dependent_launch, 0 if splits == 1 else problem.dependent_launch})
        if problem.words >= 2 * splits * block_words
        and 6 <= triton.cdiv(problem.out_features, block_out) * splits * block_out * block_words / 32 / problem.sm_count <= 100
    ] or [default(problem)]


def default(problem: Problem) -> Config:
    """About 16 warps an SM without a search, all of a row's words in one program: splits of K need a second step.

    Without dependent launch, which gains between kernels that all take part in it and not among others.
    """
    row_blocks = triton.cdiv(problem.out_features, 16)
    wanted = max(2, round(32 * problem.sm_count / row_blocks))
    block_words = min(32, triton.next_power_of_2(wanted), max(2, triton.next_power_of_2(problem.words) // 2))
    return {"block_out": 16, "block_words": block_words, "splits": 1, "pdl": 0}


def compile_source(problem: Problem, config: Config, nibble: bool = False) -> CompileSource:
    """For a compile-only check with bf16 x and float32 y."""
    integers = dict.fromkeys(("OUT", "in_features", "words", "words_per_split", "splits"), "i32")
    weights = {"mask_ptr": "*i32", "values_ptr": "*i64"}
    vectors = {"x_ptr": pointer_type(torch.bfloat16), "y_ptr": "*fp32", "partial_ptr": "*fp32", "arrived_ptr": "*i32"}
    return CompileSource(lane_row_kernel, weights | vectors | integers, _constexprs(problem, config, True, nibble), pair_warps(config))


register(
    Variant(
        kernel="spmv",
        name="lane_row",
        summary="a row a lane, 16-byte value loads, next word prefetched; bit scan in two instructions on NVIDIA",
        launch=launch,
        space=space,
        default=default,
        constraint=constraint,
        compile_source=compile_source,
    )
)
