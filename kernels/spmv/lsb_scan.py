"""SpMV as the paper describes it (arXiv 2610.12327): for comparison, so that what the faster kernels add has a figure.

A lane scans its mask word from the least significant bit and takes one value a bit; x comes through the cache by ordinary loads, weights
stream past it (``evict_first``). Each word is loaded when its turn comes: there is no prefetch, no dependent launch and no split of K. The
packed layout is ours, whose values descend, so that the lowest bit meets the last value. Values are loaded 16 bytes at a time, as by the
other kernels: element by element the layout, made for wide loads, would be the handicap.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdbench.kernels.launching import on_nvidia, pointer_type
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant, register
from sdbench.kernels.spmv.chunks import pair_warps
from sdbench.kernels.spmv.lane_row import constraint
from sdbench.packing import PackedWeight

_CHUNK = 8


@triton.jit
def _take_lowest(mask, NVIDIA: tl.constexpr):
    """Position of the lowest set bit of each uint32, and the words without that bit; for an empty word the position means nothing."""
    rest = mask & (mask - 1)
    if NVIDIA:
        position = tl.inline_asm_elementwise(
            "{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }", "=r,r", [mask], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        bit = mask ^ rest
        position = tl.zeros_like(mask)
        for power in tl.static_range(5):
            # The bits at positions whose number has this power of two: 0xAAAAAAAA, 0xCCCCCCCC, ...
            position += tl.where(bit & (0xFFFFFFFF // ((1 << (1 << power)) + 1) << (1 << power)) != 0, 1 << power, 0).to(tl.uint32)
    return position, rest


@triton.jit
def _value(quad, INDEX: tl.constexpr, BF16: tl.constexpr):
    """One of four 16-bit values of an int64, as float32; a bf16's bits are a float32's upper half."""
    bits = (quad >> (16 * INDEX)).to(tl.int32)
    if BF16:
        value = (bits << 16).to(tl.float32, bitcast=True)
    else:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def lsb_scan_kernel(
    mask_ptr, values_ptr, x_ptr, y_ptr, OUT, pitch, in_features, words,
    CHUNKS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr, BF16: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """y = W x, one program for BLOCK_OUT rows, which walks their words BLOCK_WORDS at a time."""
    lane = tl.arange(0, BLOCK_OUT * BLOCK_WORDS)
    row = tl.program_id(0) * BLOCK_OUT + lane % BLOCK_OUT
    total = tl.zeros([BLOCK_OUT * BLOCK_WORDS], tl.float32)
    for start in range(0, words, BLOCK_WORDS):
        word = start + lane // BLOCK_OUT
        live = (word < words) & (row < OUT)
        # 64-bit: words * pitch * 16 passes 2**31 on large matrices.
        wide = word.to(tl.int64)
        mask = tl.load(mask_ptr + wide * pitch + row, mask=live, other=0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
        limit = tl.where(live, in_features - word * 32, 0).to(tl.uint32)
        for step in tl.static_range(CHUNKS):
            pointer = values_ptr + ((wide * CHUNKS + (CHUNKS - 1 - step)) * pitch + row)[:, None] * 2 + tl.arange(0, 2)[None, :]
            chunk = tl.load(pointer, mask=live[:, None], other=0, eviction_policy="evict_first")
            first, second = tl.split(chunk)
            for k in tl.static_range(8):
                position, mask = _take_lowest(mask, NVIDIA)
                if k < 4:
                    value = _value(second, 3 - k, BF16)
                else:
                    value = _value(first, 7 - k, BF16)
                total += value * tl.load(x_ptr + wide * 32 + position, mask=position < limit, other=0.0).to(tl.float32)
    total = tl.sum(tl.reshape(total, [BLOCK_WORDS, BLOCK_OUT]), 0)
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    tl.store(y_ptr + rows, total.to(y_ptr.dtype.element_ty), mask=rows < OUT)


def _constexprs(problem: Problem, config: Config, nvidia: bool) -> dict[str, int | bool]:
    assert problem.pattern is not None
    return {
        "CHUNKS": problem.pattern.kept_per_word // _CHUNK,
        "BLOCK_OUT": config["block_out"],
        "BLOCK_WORDS": config["block_words"],
        "BF16": problem.dtype == torch.bfloat16,
        "NVIDIA": nvidia,
    }


def launch(packed: PackedWeight, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """Fills and returns y ``[out]`` = W x.

    Args:
        packed: W ``[out, in]``, 16-bit values, S in {8, 16, 24}.
        x: ``[in]``, contiguous, any float dtype.
        y: ``[out]``, contiguous.
        config: ``block_out`` rows and ``block_words`` mask words a program (powers of two; a thread a pair).
    """
    problem = Problem(*packed.shape, packed.dtype, packed.pattern, 1)
    lsb_scan_kernel[(triton.cdiv(packed.out_features, config["block_out"]),)](
        packed.mask_words, packed.values.view(torch.int64), x, y,
        packed.out_features, packed.pitch, packed.in_features, packed.words,
        **_constexprs(problem, config, on_nvidia()), num_warps=pair_warps(config),
    )  # fmt: skip
    return y


def space(problem: Problem) -> list[Config]:
    """Block sizes that give the device a sensible number of warps."""
    return [
        {"block_out": block_out, "block_words": block_words}
        for block_out in (16, 32)
        for block_words in (4, 8, 16, 32)
        if block_words <= problem.words
        and 6 <= triton.cdiv(problem.out_features, block_out) * block_out * block_words / 32 / problem.sm_count <= 100
    ] or [default(problem)]


def default(problem: Problem) -> Config:
    """About 16 warps an SM."""
    wanted = max(4, round(16 * problem.sm_count / triton.cdiv(problem.out_features, 32)))
    return {"block_out": 32, "block_words": min(32, triton.next_power_of_2(wanted), triton.next_power_of_2(problem.words))}


def compile_source(problem: Problem, config: Config) -> CompileSource:
    """For a compile-only check with bf16 x and float32 y."""
    pointers = {"mask_ptr": "*i32", "values_ptr": "*i64", "x_ptr": pointer_type(torch.bfloat16), "y_ptr": "*fp32"}
    integers = dict.fromkeys(("OUT", "pitch", "in_features", "words"), "i32")
    return CompileSource(lsb_scan_kernel, pointers | integers, _constexprs(problem, config, True), pair_warps(config))


register(
    Variant(
        kernel="spmv",
        name="lsb_scan",
        summary="the paper's description: lowest bit first, no prefetch, no dependent launch; a comparison",
        launch=launch,
        space=space,
        default=default,
        constraint=constraint,
        compile_source=compile_source,
    )
)
