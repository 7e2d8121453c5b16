"""SpMV with one matrix row a lane: 16-byte value loads, the next words' weights prefetched into registers.

Each thread holds one (row, word) pair. A warp's lanes are neighbouring rows of the same word (or of two or four words): mask loads are at
least 32-byte pieces, value loads 128-byte ones, and the gathers of x fall into one to four 32-element windows. Only 1-D tiles appear, for
one Triton layout throughout. Takes 16-bit weights and patterns whose word holds 8, 16 or 24 values (1:4, 2:4, 3:4, 4:8, 8:16, 16:32, ...).

Shapes are compile-time values: with them the compiler keeps offsets in 32 bits and folds strides, worth a seventh of the time on a wide
matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.finish import finish, finish_again, workspace
from sdbench.kernels.launching import Repeat, on_nvidia, pointer_type, repeatable, stream_of
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant, register
from sdbench.kernels.spmv.bits import ALIGNMENT
from sdbench.kernels.spmv.chunks import add_word, pair_warps
from sdbench.packing import PackedWeight
from sdbench.pattern import WORD

_CHUNK = 8
AT_START, AT_END = 1, 2
"""Values of ``pdl``: a program lets the next kernel start before its own first load, or after its last one; 0 is an ordinary launch."""


@triton.jit
def _load(pointer, live, MASKED: tl.constexpr):
    """Weights are read once, so they leave the cache first."""
    if MASKED:
        loaded = tl.load(pointer, mask=live, other=0, eviction_policy="evict_first")
    else:
        loaded = tl.load(pointer, eviction_policy="evict_first")
    return loaded


@triton.jit
def load_word(mask_ptr, value_ptr, live, STRIDE: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr):
    """The mask word of each lane and its one to three chunks; chunks past CHUNKS repeat the last one and are never used."""
    mask = _load(mask_ptr, live, MASKED)
    a = _load(value_ptr, live[:, None], MASKED)
    b = a
    c = a
    if CHUNKS > 1:
        b = _load(value_ptr + STRIDE, live[:, None], MASKED)
    if CHUNKS > 2:
        c = _load(value_ptr + 2 * STRIDE, live[:, None], MASKED)
    return mask.to(tl.uint32, bitcast=True), a, b, c


@triton.jit
def lane_row_kernel(
    mask_ptr, values_ptr, x_ptr, sums_ptr,
    OUT: tl.constexpr, PITCH: tl.constexpr, IN: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr,
    CHUNKS: tl.constexpr, NIBBLE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr, DEPTH: tl.constexpr,
    BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums[split, r] = the split's share of (W x)[r]; grid (row blocks, splits), BLOCK_WORDS words at a time.

    PITCH is how many rows of weights lie between a word and the next one: OUT, or more where these are some of a stack's rows.
    GUARD is for ragged shapes: any load may be out of bounds. Without it, only a last step may be too long for its split.
    """
    PER_SPLIT: tl.constexpr = (WORDS + SPLITS - 1) // SPLITS
    STEPS: tl.constexpr = (PER_SPLIT + BLOCK_WORDS - 1) // BLOCK_WORDS
    TAIL: tl.constexpr = PER_SPLIT % BLOCK_WORDS != 0
    STRIDE: tl.constexpr = PITCH * 2
    lane = tl.arange(0, BLOCK_OUT * BLOCK_WORDS)
    row = tl.program_id(0) * BLOCK_OUT + lane % BLOCK_OUT
    word = tl.program_id(1) * PER_SPLIT + lane // BLOCK_OUT
    end = tl.minimum((tl.program_id(1) + 1) * PER_SPLIT, WORDS)
    at = word
    if WIDE:
        at = word.to(tl.int64)
    mask_ptr += at * PITCH + row
    value_ptr = (values_ptr + (at * CHUNKS * PITCH + row) * 2)[:, None] + tl.arange(0, 2)[None, :]
    x_start = x_ptr
    x_ptr += at * 32
    even = tl.zeros([BLOCK_OUT * BLOCK_WORDS], tl.float32)
    odd = tl.zeros([BLOCK_OUT * BLOCK_WORDS], tl.float32)
    if PDL == 1:
        gdc_launch_dependents()
    live = (word < end) & (row < OUT)
    mask, a, b, c = load_word(mask_ptr, value_ptr, live, STRIDE, CHUNKS, GUARD or (TAIL and STEPS == 1))
    if DEPTH == 2:
        mask_ptr += BLOCK_WORDS * PITCH
        value_ptr += BLOCK_WORDS * CHUNKS * STRIDE
        soon = (word + BLOCK_WORDS < end) & (row < OUT)
        mask1, a1, b1, c1 = load_word(mask_ptr, value_ptr, soon, STRIDE, CHUNKS, GUARD or (TAIL and STEPS == 2))
    if PDL:
        # x is the previous kernel's output, and what that one reads may be what this one writes; weights are neither.
        gdc_wait()
    for _ in range(0, STEPS - DEPTH):
        # Words to come are on their way while the current one is decoded: the largest single gain of this kernel.
        mask_ptr += BLOCK_WORDS * PITCH
        value_ptr += BLOCK_WORDS * CHUNKS * STRIDE
        later = (word + DEPTH * BLOCK_WORDS < end) & (row < OUT)
        next_mask, next_a, next_b, next_c = load_word(mask_ptr, value_ptr, later, STRIDE, CHUNKS, GUARD or TAIL)
        limit = tl.where((word < end) & (row < OUT), IN - word * 32, 0).to(tl.uint32)
        even, odd = add_word(even, odd, mask, a, b, c, x_ptr, limit, CHUNKS, NIBBLE, BF16, NVIDIA, GUARD, ALIGNED)
        x_ptr += BLOCK_WORDS * 32
        word += BLOCK_WORDS
        if DEPTH == 2:
            mask, a, b, c = mask1, a1, b1, c1
            mask1, a1, b1, c1 = next_mask, next_a, next_b, next_c
        else:
            mask, a, b, c = next_mask, next_a, next_b, next_c
    if PDL == 2:
        gdc_launch_dependents()
    if DEPTH == 2:
        limit = tl.where((word < end) & (row < OUT), IN - word * 32, 0).to(tl.uint32)
        even, odd = add_word(even, odd, mask, a, b, c, x_ptr, limit, CHUNKS, NIBBLE, BF16, NVIDIA, GUARD, ALIGNED)
        x_ptr += BLOCK_WORDS * 32
        word += BLOCK_WORDS
        mask, a, b, c = mask1, a1, b1, c1
    live = (word < end) & (row < OUT)
    if TAIL and not GUARD:
        # Lanes past the end hold zeros: any legal word keeps their positions, and so their reads of x, inside it.
        mask = tl.where(live, mask, 0x11111111 * ((1 << NIBBLE) - 1) if NIBBLE else (1 << (CHUNKS * 8)) - 1)
        x_ptr = tl.where(live, x_ptr, x_start)
    limit = tl.where(live, IN - word * 32, 0).to(tl.uint32)
    last_even, last_odd = add_word(even, odd, mask, a, b, c, x_ptr, limit, CHUNKS, NIBBLE, BF16, NVIDIA, GUARD, ALIGNED)
    if TAIL and not GUARD:
        # 0 times an x that is not finite is not 0.
        last_even, last_odd = tl.where(live, last_even, even), tl.where(live, last_odd, odd)
    total = tl.sum(tl.reshape(last_even + last_odd, [BLOCK_WORDS, BLOCK_OUT]), 0)
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    tl.store(sums_ptr + tl.program_id(1) * OUT + rows, total.to(sums_ptr.dtype.element_ty), mask=rows < OUT)


def _constexprs(problem: Problem, pitch: int, config: Config, nvidia: bool, nibble: bool, aligned: bool) -> dict[str, int | bool]:
    assert problem.pattern is not None
    chunks = problem.pattern.kept_per_word // _CHUNK
    steps = triton.cdiv(triton.cdiv(problem.words, config["splits"]), config["block_words"])
    even = problem.in_features % WORD == 0 and problem.out_features % config["block_out"] == 0
    return {
        "OUT": problem.out_features,
        "PITCH": pitch,
        "IN": problem.in_features,
        "WORDS": problem.words,
        "SPLITS": config["splits"],
        "CHUNKS": chunks,
        "NIBBLE": problem.pattern.keep if nibble else 0,
        "BLOCK_OUT": config["block_out"],
        "BLOCK_WORDS": config["block_words"],
        "DEPTH": min(config["depth"], steps),
        "BF16": problem.dtype == torch.bfloat16,
        "NVIDIA": nvidia,
        "GUARD": not (even and problem.words % config["splits"] == 0),
        "ALIGNED": nvidia and aligned,
        "WIDE": 2 * chunks * (problem.words + config["block_words"]) * pitch >= 2**31,
        "PDL": config["pdl"],
    }


def _launch_sums(packed: PackedWeight, x: Tensor, sums: Tensor, config: Config, nibble: bool) -> Repeat | None:
    problem = Problem(*packed.shape, packed.dtype, packed.pattern, 1)
    grid = triton.cdiv(packed.out_features, config["block_out"]), config["splits"], 1
    constexprs = _constexprs(problem, packed.pitch, config, on_nvidia(), nibble, x.data_ptr() % ALIGNMENT == 0)
    compiled = lane_row_kernel[grid](
        packed.mask_words, packed.values.view(torch.int64), x, sums, **constexprs,
        num_warps=pair_warps(config), launch_pdl=bool(config["pdl"]),
    )  # fmt: skip
    return repeatable(compiled, grid, constexprs.values(), packed.device)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Launches of a product that can be repeated.

    Attributes:
        weight: Addresses of mask words and values, and the weight's pitch.
        product: Sums from addresses of mask words, values, x and sums.
        finish: y from addresses of sums and y; None where the sums are y.
    """

    weight: tuple[int, int, int]
    product: Repeat
    finish: Repeat | None


class Bound:
    """W x again and again. A step that no CUDA graph holds makes hundreds of products, whose launches Triton would look up each time.

    Args:
        packed: W, as in :func:`launch`; stays on its device.
        config: As there.
        nibble: As there.
    """

    def __init__(self, packed: PackedWeight, config: Config, nibble: bool = False):
        self._packed, self._config, self._nibble = packed, config, nibble
        self._index, self._stream_of = packed.device.index, stream_of(packed.device)
        self._kept: dict[tuple[torch.dtype, torch.dtype], _Kept] = {}

    def multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """y ``[..., out]`` in a dtype, for x ``[..., in]`` with leading dimensions of 1."""
        packed, splits, x = self._packed, self._config["splits"], x.contiguous()
        y = x.new_empty(*x.shape[:-1], packed.out_features, dtype=dtype)
        sums = y if splits == 1 else workspace(y, splits)
        kept, at, to = self._kept.get((x.dtype, dtype)), x.data_ptr(), y.data_ptr()
        weight = packed.mask_words.data_ptr(), packed.values.data_ptr(), packed.mask_words.stride(0)
        # Weights that were moved, or became rows of a stack, are not where the kernel was told, and others are not aligned as it was told.
        if kept is None or kept.weight != weight or (at | to) % ALIGNMENT:
            self._look_up(x, y, sums, weight)
            return y
        stream = self._stream_of(self._index)
        kept.product(weight[0], weight[1], at, sums.data_ptr(), stream=stream)
        if kept.finish:
            kept.finish(sums.data_ptr(), to, stream=stream)
        return y

    def _look_up(self, x: Tensor, y: Tensor, sums: Tensor, weight: tuple[int, int, int]) -> None:
        product = _launch_sums(self._packed, x.view(-1), sums.view(-1) if sums is y else sums, self._config, self._nibble)
        finish = None if sums is y else finish_again(sums, y.view(-1), bool(self._config["pdl"]))
        alike = not (x.data_ptr() | y.data_ptr()) % ALIGNMENT and weight[2] == self._packed.pitch
        if product and (finish or sums is y) and alike:
            self._kept[x.dtype, y.dtype] = _Kept(weight, product, finish)


def launch(packed: PackedWeight, x: Tensor, y: Tensor, config: Config, nibble: bool = False) -> Tensor:
    """Fills and returns y ``[out]`` = W x.

    Args:
        packed: W ``[out, in]``, 16-bit values, S in {8, 16, 24}.
        x: ``[in]``, contiguous, any float dtype; faster where it starts at a multiple of 256 bytes, as torch's own tensors do.
        y: ``[out]``, contiguous.
        config: ``block_out`` rows and ``block_words`` mask words a program (powers of two; a thread a pair), ``splits`` of K, whose sums a
            second kernel adds, ``depth`` words a thread loaded ahead (1 or 2), ``pdl`` for programmatic dependent launch (0,
            ``AT_START`` or ``AT_END``).
        nibble: Look positions up instead of scanning bits (1:4 and 2:4).
    """
    if config["splits"] == 1:
        _launch_sums(packed, x, y, config, nibble)
        return y
    sums = workspace(y, config["splits"])
    _launch_sums(packed, x, sums, config, nibble)
    return finish(sums, y, dependent=bool(config["pdl"]))


def launch_partial(packed: PackedWeight, x: Tensor, y: Tensor, config: Config, nibble: bool = False) -> Tensor:
    """Partial sums float32 ``[splits, out]``, for a consumer that adds them; arguments as in :func:`launch`.

    They are written into y where it has that shape, else into a workspace that the next launch of the stream takes again.
    """
    sums = y if y.dim() == 2 else workspace(y, config["splits"])
    _launch_sums(packed, x, sums, config, nibble)
    return sums


def constraint(problem: Problem) -> str | None:
    """Why the 16-byte chunks do not fit a problem."""
    assert problem.pattern is not None
    if problem.dtype.itemsize != 2:
        return f"takes 16-bit weights, not {problem.dtype}"
    if problem.pattern.kept_per_word not in (8, 16, 24):
        return f"takes 8, 16 or 24 values a mask word; pattern {problem.pattern} has {problem.pattern.kept_per_word}"
    return None


_TILES = ((8, 32), (8, 64), (16, 8), (16, 16), (16, 32), (32, 4), (32, 8), (32, 16))


def _space(problem: Problem, splits: tuple[int, ...]) -> list[Config]:
    launches = (0, AT_START, AT_END) if problem.dependent_launch else (0,)
    return [
        {"block_out": block_out, "block_words": block_words, "splits": split, "depth": depth, "pdl": pdl}
        for block_out, block_words in _TILES
        for split in splits
        for depth in (1, 2)
        # Dependent launch gains where a launch is short; a matrix that fills the device several times over can lose by it.
        for pdl in launches
        # Splits of one length, or the kernel must ask of every word whether it is there.
        if problem.words % split == 0
        and problem.words >= split * block_words * depth
        and 8 <= triton.cdiv(problem.out_features, block_out) * split * block_out * block_words / 32 / problem.sm_count <= 200
        # Two words ahead cost registers that many warps an SM do not have.
        and (depth == 1 or split == 1)
    ]


def space(problem: Problem) -> list[Config]:
    """Tiles that give the device a sensible number of warps; K is split where rows are few against columns."""
    few_rows = problem.in_features > 2 * problem.out_features
    return _space(problem, (1, 4, 8, 19) if few_rows else (1,)) or [default(problem)]


def partial_space(problem: Problem) -> list[Config]:
    """The same with K split: without a second step, splits are free. Consumers that add sums take part in dependent launch."""
    configs = _space(problem, (2, 4, 5, 8, 19))
    return [config for config in configs if config["pdl"] or not problem.dependent_launch] or [partial_default(problem)]


def default(problem: Problem) -> Config:
    """About 16 warps an SM without a search, all of a row's words in one program: splits of K need a second step.

    Without dependent launch, which gains between kernels that all take part in it and not among others.
    """
    row_blocks = triton.cdiv(problem.out_features, 16)
    wanted = max(2, round(32 * problem.sm_count / row_blocks))
    block_words = min(32, triton.next_power_of_2(wanted), max(2, triton.next_power_of_2(problem.words) // 2))
    return {"block_out": 16, "block_words": block_words, "splits": 1, "depth": 1, "pdl": 0}


def partial_default(problem: Problem) -> Config:
    """The default with K halved."""
    return {**default(problem), "splits": 2}


def compile_source(problem: Problem, config: Config, nibble: bool = False) -> CompileSource:
    """For a compile-only check with bf16 x and float32 sums."""
    pointers = {"mask_ptr": "*i32", "values_ptr": "*i64", "x_ptr": pointer_type(torch.bfloat16), "sums_ptr": "*fp32"}
    constexprs = _constexprs(problem, problem.out_features, config, True, nibble, True)
    return CompileSource(lane_row_kernel, pointers, constexprs, pair_warps(config))


def register_both(name: str, summary: str, constraint: Callable[[Problem], str | None], nibble: bool) -> None:
    """Registers a variant as ``spmv`` (a finished y) and as ``spmv_partial`` (sums for a consumer that adds them).

    Args:
        name: The variant's name in both.
        summary: One line about it.
        constraint: Why it cannot take a problem.
        nibble: Look positions up instead of scanning bits.
    """
    source = partial(compile_source, nibble=nibble)
    register(
        Variant(
            kernel="spmv",
            name=name,
            summary=summary,
            launch=partial(launch, nibble=nibble),
            space=space,
            default=default,
            constraint=constraint,
            compile_source=source,
            bind=lambda packed, config: Bound(packed, config, nibble).multiply,
        )
    )
    register(
        Variant(
            kernel="spmv_partial",
            name=name,
            summary=f"{name}, K split and the sums left to the consumer",
            launch=partial(launch_partial, nibble=nibble),
            space=partial_space,
            default=partial_default,
            constraint=constraint,
            compile_source=source,
        )
    )


register_both(
    "lane_row",
    "a row a lane, 16-byte value loads, next words prefetched; bit scan in two instructions on NVIDIA",
    constraint,
    nibble=False,
)
