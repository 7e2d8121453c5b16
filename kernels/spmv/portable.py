"""SpMV with one matrix row a lane and one plain load a value: any pattern, any dtype, any Triton back end."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdbench.kernels.finish import finish, workspace
from sdbench.kernels.launching import pointer_type
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant, register
from sdbench.kernels.spmv.bits import gather, take_highest
from sdbench.kernels.spmv.chunks import pair_warps
from sdbench.packing import PackedWeight, chunk_length


@triton.jit
def portable_kernel(
    mask_ptr, values_ptr, x_ptr, sums_ptr, OUT, pitch, in_features, words, words_per_split,
    KEPT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """sums[split] = the split's share of W x; grid (row blocks, splits), a program walks its words BLOCK_WORDS at a time."""
    lane = tl.arange(0, BLOCK_OUT * BLOCK_WORDS)
    row = tl.program_id(0) * BLOCK_OUT + lane % BLOCK_OUT
    first = tl.program_id(1) * words_per_split
    end = tl.minimum(first + words_per_split, words)
    total = tl.zeros([BLOCK_OUT * BLOCK_WORDS], tl.float32)
    for start in range(0, words_per_split, BLOCK_WORDS):
        word = first + start + lane // BLOCK_OUT
        live = (word < end) & (row < OUT)
        # 64-bit: words * pitch * KEPT passes 2**31 on large matrices.
        wide = word.to(tl.int64)
        mask = tl.load(mask_ptr + wide * pitch + row, mask=live, other=0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
        limit = tl.where(live, in_features - word * 32, 0).to(tl.uint32)
        value_ptr = values_ptr + (wide * (KEPT // CHUNK) * pitch + row) * CHUNK
        for k in tl.static_range(KEPT):
            value = tl.load(value_ptr + (k // CHUNK) * tl.cast(pitch, tl.int64) * CHUNK + k % CHUNK, mask=live, other=0.0)
            position, mask = take_highest(mask, False)
            total += value.to(tl.float32) * gather(x_ptr + wide * 32, position, limit, True, False)
    total = tl.sum(tl.reshape(total, [BLOCK_WORDS, BLOCK_OUT]), 0)
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    tl.store(sums_ptr + tl.program_id(1) * OUT + rows, total.to(sums_ptr.dtype.element_ty), mask=rows < OUT)


def _constexprs(problem: Problem, config: Config) -> dict[str, int | bool]:
    assert problem.pattern is not None
    return {
        "KEPT": problem.pattern.kept_per_word,
        "CHUNK": chunk_length(problem.pattern.kept_per_word, problem.dtype),
        "BLOCK_OUT": config["block_out"],
        "BLOCK_WORDS": config["block_words"],
    }


def launch(packed: PackedWeight, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """Fills and returns y ``[out]`` = W x.

    Args:
        packed: W ``[out, in]``, any pattern, bf16, fp16 or fp32.
        x: ``[in]``, contiguous, any float dtype.
        y: ``[out]``, contiguous.
        config: ``block_out`` rows and ``block_words`` mask words a program (powers of two), ``splits`` of K.
    """
    problem = Problem(*packed.shape, packed.dtype, packed.pattern, 1)
    splits = config["splits"]
    sums = workspace(y, splits) if splits > 1 else y
    portable_kernel[triton.cdiv(packed.out_features, config["block_out"]), splits](
        packed.mask_words, packed.values, x, sums,
        packed.out_features, packed.pitch, packed.in_features, packed.words, triton.cdiv(packed.words, splits),
        **_constexprs(problem, config), num_warps=pair_warps(config),
    )  # fmt: skip
    return finish(sums, y) if splits > 1 else y


def space(problem: Problem) -> list[Config]:
    """A few block sizes; this variant is for reach, not for speed."""
    return [{"block_out": 32, "block_words": block_words, "splits": splits} for block_words in (4, 8) for splits in (1, 4)]


def default(problem: Problem) -> Config:
    """Splits K where there are few rows."""
    row_blocks = triton.cdiv(problem.out_features, 32)
    return {"block_out": 32, "block_words": 4, "splits": max(1, min(problem.words // 8, round(4 * problem.sm_count / row_blocks)))}


def compile_source(problem: Problem, config: Config) -> CompileSource:
    """For a compile-only check with bf16 x and float32 y."""
    integers = dict.fromkeys(("OUT", "pitch", "in_features", "words", "words_per_split"), "i32")
    pointers = {
        "mask_ptr": "*i32",
        "values_ptr": pointer_type(problem.dtype),
        "x_ptr": pointer_type(torch.bfloat16),
        "sums_ptr": "*fp32",
    }
    return CompileSource(portable_kernel, pointers | integers, _constexprs(problem, config), pair_warps(config))


register(
    Variant(
        kernel="spmv",
        name="portable",
        summary="a row a lane, a plain load a value, bit scan by arithmetic; any pattern, dtype and back end",
        launch=launch,
        space=space,
        default=default,
        compile_source=compile_source,
    )
)
