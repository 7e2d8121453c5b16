"""Packed weight times some tokens on the tensor cores: mask words unfolded in registers, straight into operands of matrix instructions.

A matrix instruction (m16n8k16) wants four of its sixteen columns from each lane, for two rows, and which four is free as long as weight and
x agree. So a lane takes whole mask words: lane 4g + t of a warp holds word t of rows g and g + 8, and the eight instructions of a step
each take four columns of it, in order. The weight's operands are then what unfolding gives, x's are 64 neighbouring bytes of a token, and
neither passes from lane to lane; a warp's loads are 128-byte pieces of values and 32-byte pieces of masks.

On other back ends (and in the interpreter) a lane multiplies and adds its words by itself.
"""

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.finish import whole
from sdbench.kernels.launching import on_nvidia, pointer_type
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant, register
from sdbench.kernels.spmm.permutes import REACH, multiply_ptx, room_ptx, unfold_ptx
from sdbench.kernels.spmm.tokens import TILE_TOKENS, WARP_WORDS, arrange, load_tokens
from sdbench.kernels.spmm.unfold import room_of, unfold
from sdbench.kernels.spmm.warps import after_loads, sum_over_warps
from sdbench.kernels.spmv.lane_row import constraint as chunk_constraint
from sdbench.kernels.spmv.lane_row import load_word
from sdbench.packing import PackedWeight
from sdbench.pattern import WORD

MOST_TOKENS = 64
"""Beyond it the weight is unfolded too many times: ``expand`` does it once."""


@triton.jit
def _load_weights(
    mask_ptr, value_ptr, row, inside,
    OUT: tl.constexpr, PITCH: tl.constexpr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """For each of a lane's rows, eight apart, the mask word and three chunks."""
    words = ()
    for slot in tl.static_range(SLOTS):
        live = inside & (row + 8 * slot < OUT)
        words = words + load_word(mask_ptr + 8 * slot, value_ptr + 16 * slot, live, PITCH * 2, CHUNKS, MASKED)
    return words


@triton.jit
def _multiply(
    sums, words, x, room,
    SLOTS: tl.constexpr, TILES: tl.constexpr, CHUNKS: tl.constexpr,
    UNFOLD: tl.constexpr, UNFOLD_LOWER: tl.constexpr, MULTIPLY: tl.constexpr,
):  # fmt: skip
    """sums += a step's words times x, by matrix instructions."""
    added = ()
    for pair in tl.static_range(SLOTS // 2):
        upper = unfold(words[8 * pair], words[8 * pair + 1], words[8 * pair + 2], words[8 * pair + 3], room, CHUNKS, UNFOLD, True)
        lower = unfold(words[8 * pair + 4], words[8 * pair + 5], words[8 * pair + 6], words[8 * pair + 7], room, CHUNKS, UNFOLD_LOWER, True)
        for tile in tl.static_range(TILES):
            added = added + tl.inline_asm_elementwise(
                MULTIPLY, "=f,=f,=f,=f,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,f,f,f,f",
                [upper[0], upper[1], upper[2], upper[3], upper[4], upper[5], upper[6], upper[7],
                 lower[0], lower[1], lower[2], lower[3], lower[4], lower[5], lower[6], lower[7],
                 x[8 * tile], x[8 * tile + 1], x[8 * tile + 2], x[8 * tile + 3],
                 x[8 * tile + 4], x[8 * tile + 5], x[8 * tile + 6], x[8 * tile + 7],
                 sums[4 * (pair * TILES + tile)], sums[4 * (pair * TILES + tile) + 1],
                 sums[4 * (pair * TILES + tile) + 2], sums[4 * (pair * TILES + tile) + 3]],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
    return added


@triton.jit
def _multiply_plain(
    sums, words, x_ptr, word, first, tokens, inside,
    IN: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """The same a column at a time, every token in the lane that holds the weight."""
    added = ()
    token = first + tl.arange(0, TOKENS)
    for slot in tl.static_range(SLOTS):
        quads = unfold(words[4 * slot], words[4 * slot + 1], words[4 * slot + 2], words[4 * slot + 3], words[4 * slot], CHUNKS, "", False)
        total = sums[slot]
        for column in tl.static_range(32):
            bits = (quads[column // 4] >> (16 * (column % 4))).to(tl.int16)
            value = bits.to(tl.bfloat16 if BF16 else tl.float16, bitcast=True).to(tl.float32)
            place = word * 32 + column
            live = (inside & (place < IN))[:, None] & (token < tokens)[None, :]
            x = tl.load(x_ptr + token[None, :] * IN + place[:, None], mask=live, other=0.0).to(tl.float32)
            total += value[:, None] * x
        # Triton's tuples grow by addition alone, each time into another type.
        added = added + (total,)  # type: ignore[assignment]  # noqa: RUF005
    return added


@triton.jit
def tile_kernel(
    mask_ptr, values_ptr, x_ptr, y_ptr, tokens,
    OUT: tl.constexpr, PITCH: tl.constexpr, IN: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr,
    ROW_WARPS: tl.constexpr, WORD_WARPS: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr,
    ARRANGED: tl.constexpr, GUARD: tl.constexpr, RAGGED: tl.constexpr, PARTIAL: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
    BF16: tl.constexpr, NVIDIA: tl.constexpr, MEMORY: tl.constexpr, AHEAD: tl.constexpr, ROOM: tl.constexpr,
    UNFOLD: tl.constexpr, UNFOLD_LOWER: tl.constexpr, MULTIPLY: tl.constexpr,
):  # fmt: skip
    """y[split, token, r] = the split's share of (W x_token)[r]; grid (row blocks, splits, token blocks)."""
    PER_SPLIT: tl.constexpr = (WORDS + 4 * SPLITS - 1) // (4 * SPLITS) * 4
    BLOCK_WORDS: tl.constexpr = 4 * WORD_WARPS
    STEPS: tl.constexpr = (PER_SPLIT + BLOCK_WORDS - 1) // BLOCK_WORDS
    TOKENS: tl.constexpr = 8 * TILES
    # Columns of x for the next step too, where a thread has the registers.
    X_AHEAD: tl.constexpr = NVIDIA and TILES * SLOTS <= 4
    lane = tl.arange(0, 32 * ROW_WARPS * WORD_WARPS)
    warp = lane // 32
    first_row = tl.program_id(0) * (8 * SLOTS * ROW_WARPS)
    row = first_row + warp % ROW_WARPS * (8 * SLOTS) + lane // 4 % 8
    word = tl.program_id(1) * PER_SPLIT + warp // ROW_WARPS * 4 + lane % 4
    end = tl.minimum((tl.program_id(1) + 1) * PER_SPLIT, WORDS)
    first_token = tl.program_id(2) * TOKENS
    token = first_token + lane // 4 % 8
    at = word
    if WIDE:
        at = word.to(tl.int64)
    mask_ptr += at * PITCH + row
    value_ptr = (values_ptr + (at * CHUNKS * PITCH + row) * 2)[:, None] + tl.arange(0, 2)[None, :]
    sums = ()
    if NVIDIA:
        quad_ptr = x_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        for _ in tl.static_range(2 * SLOTS * TILES):
            # Triton's tuples grow by addition alone, each time into another type.
            sums = sums + (tl.zeros([32 * ROW_WARPS * WORD_WARPS], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        quad_ptr = x_ptr
        for _ in tl.static_range(SLOTS):
            # Triton's tuples grow by addition alone, each time into another type.
            sums = sums + (tl.zeros([32 * ROW_WARPS * WORD_WARPS, TOKENS], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    if PDL == 1:
        gdc_launch_dependents()
    words = _load_weights(mask_ptr, value_ptr, row, word < end, OUT, PITCH, SLOTS, CHUNKS, GUARD)
    room = lane
    if NVIDIA:
        room = room_of(lane, ROOM)
    if PDL:
        # x is the previous kernel's output, and what that one reads may be what this one writes; weights are neither.
        gdc_wait()
    if X_AHEAD:
        x = load_tokens(quad_ptr, word, token, tokens, word < end, IN, WORDS, TILES, ARRANGED, PARTIAL, GUARD, RAGGED)
    # Two steps a turn, so that what one of them loads need not be moved to where the other one reads it.
    for _ in tl.range(0, STEPS - 1, loop_unroll_factor=2 if AHEAD else 1):
        # The next words, and their columns of x, are on their way while the current ones are unfolded.
        mask_ptr += BLOCK_WORDS * PITCH
        value_ptr += BLOCK_WORDS * CHUNKS * PITCH * 2
        later = _load_weights(mask_ptr, value_ptr, row, word + BLOCK_WORDS < end, OUT, PITCH, SLOTS, CHUNKS, GUARD)
        if X_AHEAD:
            next_word = word + BLOCK_WORDS
            next_x = load_tokens(quad_ptr, next_word, token, tokens, next_word < end, IN, WORDS, TILES, ARRANGED, PARTIAL, GUARD, RAGGED)
        if NVIDIA:
            if AHEAD:
                words = after_loads(words, SLOTS)
            if not X_AHEAD:
                x = load_tokens(quad_ptr, word, token, tokens, word < end, IN, WORDS, TILES, ARRANGED, PARTIAL, GUARD, RAGGED)
            sums = _multiply(sums, words, x, room, SLOTS, TILES, CHUNKS, UNFOLD, UNFOLD_LOWER, MULTIPLY)
        else:
            sums = _multiply_plain(sums, words, x_ptr, word, first_token, tokens, word < end, IN, SLOTS, TOKENS, CHUNKS, BF16)
        word += BLOCK_WORDS
        words = later
        if X_AHEAD:
            x = next_x
    if PDL == 2:
        gdc_launch_dependents()
    if NVIDIA:
        if not X_AHEAD:
            x = load_tokens(quad_ptr, word, token, tokens, word < end, IN, WORDS, TILES, ARRANGED, PARTIAL, GUARD, RAGGED)
        sums = _multiply(sums, words, x, room, SLOTS, TILES, CHUNKS, UNFOLD, UNFOLD_LOWER, MULTIPLY)
    else:
        sums = _multiply_plain(sums, words, x_ptr, word, first_token, tokens, word < end, IN, SLOTS, TOKENS, CHUNKS, BF16)
    y_ptr += tl.program_id(1) * tokens * OUT
    if NVIDIA:
        REGISTERS: tl.constexpr = 2 * SLOTS * TILES
        EACH: tl.constexpr = (REGISTERS + WORD_WARPS - 1) // WORD_WARPS
        if WORD_WARPS > 1:
            sums = sum_over_warps(sums, room, lane, REGISTERS, EACH, ROW_WARPS, WORD_WARPS, MEMORY)
        for number in tl.static_range(EACH):
            # Registers of a matrix instruction's sums: two tokens (2t and 2t + 1), at rows g and g + 8.
            register = warp // ROW_WARPS * EACH + number
            rows = first_row + warp % ROW_WARPS * (8 * SLOTS) + lane // 4 % 8 + register // 2 % 2 * 8 + register // (4 * TILES) * 16
            columns = first_token + lane % 4 * 2 + register % 2 + register // 4 % TILES * 8
            found = (register < REGISTERS) & (rows < OUT) & (columns < tokens)
            tl.store(y_ptr + columns * OUT + rows, sums[number].to(y_ptr.dtype.element_ty), mask=found)
    else:
        rows = first_row + tl.arange(0, 8 * ROW_WARPS)[:, None] // 8 * (8 * SLOTS) + tl.arange(0, 8 * ROW_WARPS)[:, None] % 8
        columns = first_token + tl.arange(0, TOKENS)[None, :]
        for slot in tl.static_range(SLOTS):
            total = tl.sum(tl.sum(tl.reshape(sums[slot], [WORD_WARPS, 8 * ROW_WARPS, 4, TOKENS]), 2), 0)
            found = (rows + 8 * slot < OUT) & (columns < tokens)
            tl.store(y_ptr + columns * OUT + rows + 8 * slot, total.to(y_ptr.dtype.element_ty), mask=found)


def _warps(config: Config) -> int:
    return config["block_out"] // config["warp_rows"] * config["block_words"] // WARP_WORDS


def _room(config: Config, memory_rows: int) -> int:
    """Bytes of shared memory in which a program's warps spread words, and then add their sums."""
    warps = _warps(config)
    registers = config["warp_rows"] * config["block_tokens"] // 32
    return warps * max(REACH if memory_rows else 0, 128 * max(registers, config["block_words"] // WARP_WORDS))


def _constexprs(problem: Problem, pitch: int, config: Config, nvidia: bool) -> dict[str, Any]:
    assert problem.pattern is not None
    chunks = problem.pattern.kept_per_word // 8
    ragged = problem.in_features % WORD != 0
    # A config of another pattern with as many values a word may ask for them in groups that permutes are faster with.
    memory_rows = config["memory_rows"] if problem.pattern.group == WORD else 0
    return {
        "OUT": problem.out_features,
        "PITCH": pitch,
        "IN": problem.in_features,
        "WORDS": problem.words,
        "SPLITS": config["splits"],
        "CHUNKS": chunks,
        "ROW_WARPS": config["block_out"] // config["warp_rows"],
        "WORD_WARPS": config["block_words"] // WARP_WORDS,
        "SLOTS": config["warp_rows"] // 8,
        "TILES": config["block_tokens"] // TILE_TOKENS,
        "ARRANGED": bool(config["arranged"]),
        # Any load of a weight may be out of bounds.
        "GUARD": bool(ragged or problem.out_features % config["block_out"] or problem.words % (config["splits"] * config["block_words"])),
        "RAGGED": ragged,
        "PARTIAL": problem.tokens % config["block_tokens"] != 0,
        "WIDE": 2 * chunks * (problem.words + config["block_words"]) * pitch >= 2**31,
        "PDL": config["pdl"],
        "BF16": problem.dtype == torch.bfloat16,
        "NVIDIA": nvidia,
        "MEMORY": memory_rows > 0,
        "AHEAD": bool(config["ahead"]),
        "ROOM": room_ptx(_room(config, memory_rows)) if nvidia and (memory_rows or config["block_words"] > WARP_WORDS) else "",
        "UNFOLD": unfold_ptx(problem.pattern, memory_rows == 2) if nvidia else "",
        "UNFOLD_LOWER": unfold_ptx(problem.pattern, memory_rows > 0) if nvidia else "",
        "MULTIPLY": multiply_ptx(problem.dtype == torch.bfloat16) if nvidia else "",
    }


def launch_parts(packed: PackedWeight, x: Tensor, parts: Tensor, config: Config) -> None:
    """Fills parts ``[splits, tokens, out]``, whose sum is x W^T, accumulated in float32.

    Args:
        packed: W ``[out, in]``, 16-bit values, S in {8, 16, 24}.
        x: ``[tokens, in]``, any float dtype; rounded to the weight's for the tensor cores.
        parts: Contiguous, any float dtype.
        config: ``block_out`` rows and ``block_words`` mask words a program, of which a warp takes ``warp_rows`` (16 or 32) and 4 at a time,
            ``block_tokens`` tokens a program (all powers of two), ``splits`` of K, ``arranged`` 1 where a first kernel orders x as warps
            load it, ``pdl`` for dependent launch (0, or as in ``spmv/lane_row.py``), ``memory_rows`` of each two rows unfold through shared
            memory (0, 1 or 2; in groups of 32), the others by permutes: two units of the GPU share the work; ``ahead`` 1 keeps a step's
            loads before the work of the step before, at the price of registers; with 0 the compiler places them, and other warps have to
            fill the time.
    """
    tokens, splits = len(x), config["splits"]
    narrow = (x.to(packed.dtype) if on_nvidia() else x).contiguous()
    if narrow.data_ptr() % 16:
        narrow = narrow.clone()
    problem = Problem(*packed.shape, packed.dtype, packed.pattern, 1, tokens=tokens)
    read = narrow
    if config["arranged"] and on_nvidia():
        read = arrange(narrow, triton.cdiv(tokens, config["block_tokens"]) * config["block_tokens"] // TILE_TOKENS, config["pdl"])
    grid = triton.cdiv(packed.out_features, config["block_out"]), splits, triton.cdiv(tokens, config["block_tokens"])
    tile_kernel[grid](
        packed.mask_words, packed.values.view(torch.int64), read, parts, tokens,
        **_constexprs(problem, packed.pitch, config, on_nvidia()), num_warps=_warps(config), launch_pdl=bool(config["pdl"]),
    )  # fmt: skip


def constraint(problem: Problem) -> str | None:
    """Why the 16-byte chunks, the tokens or the device do not fit a problem."""
    if 0 < problem.capability < 80:
        return f"needs matrix instructions of compute capability 8.0, and this is {problem.capability / 10}"
    if problem.tokens > MOST_TOKENS:
        return f"takes {MOST_TOKENS} tokens at most, not {problem.tokens}"
    return chunk_constraint(problem)


def _block_tokens(problem: Problem) -> int:
    return min(32, max(TILE_TOKENS, triton.next_power_of_2(problem.tokens)))


def _splits(problem: Problem) -> tuple[int, ...]:
    """Parts of K: many where rows are few, since their sums cost less than multiprocessors that wait."""
    return (8, 16) if problem.out_features < 32 * problem.sm_count and problem.words >= 64 else (1,)


def _words_of_a_part(problem: Problem, splits: int) -> int:
    return triton.cdiv(problem.words, WARP_WORDS * splits) * WARP_WORDS


def space(problem: Problem) -> list[Config]:
    """Programs of two to eight warps, 5 to 26 of them an SM; K is split where rows are few, warps take 32 rows too at 9 to 16 tokens."""
    block_tokens, few_rows = _block_tokens(problem), _splits(problem) != (1,)
    many_tokens = block_tokens > TILE_TOKENS
    return [
        {"block_out": warp_rows * row_warps, "block_words": WARP_WORDS * word_warps, "warp_rows": warp_rows, "block_tokens": block_tokens,
         "splits": splits, "arranged": arranged, "pdl": pdl, "memory_rows": memory_rows, "ahead": ahead}
        for warp_rows in ((16, 32) if block_tokens == 2 * TILE_TOKENS else (16,))
        for row_warps, word_warps in ((1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (2, 4), (4, 2))
        for splits in _splits(problem)
        for arranged in ((1,) if many_tokens and not few_rows else (0, 1))
        # Many short programs are best followed at their end: until then the next kernel's would take their place on a multiprocessor.
        for pdl in ((0,) if not problem.dependent_launch else (2,) if few_rows else (0, 1))
        for memory_rows in ((0, 1) if problem.pattern and problem.pattern.group == WORD and not many_tokens else (0,))
        for ahead in ((1,) if few_rows else (0, 1))
        if problem.words >= 2 * splits * WARP_WORDS * word_warps
        and triton.cdiv(problem.words, _words_of_a_part(problem, splits)) == splits
        and (warps := problem.out_features / warp_rows * word_warps * splits / problem.sm_count) >= 5
        # More are of no use, unless rows alone give them.
        and (warps <= 26 or word_warps * splits <= 2)
    ] or [default(problem)]  # fmt: skip


def default(problem: Problem) -> Config:
    """About 12 warps an SM without a search, two of them or more side by side along a row's words, or K in eight parts where rows are few.

    A warp of 32 rows halves the loads of x, which are many where tokens are, and needs twice the rows for as many warps; of more than 16
    tokens it would need more registers than a thread has.
    """
    enough = 12 * problem.sm_count
    warp_rows = 32 if _block_tokens(problem) == 2 * TILE_TOKENS and problem.out_features // 32 * 2 >= enough // 2 else 16
    most = max(1, min(8, triton.next_power_of_2(problem.words) // (2 * WARP_WORDS)))
    splits = _splits(problem)[0]
    word_warps = 1 if splits > 1 else min(most, max(2, 2 ** round(math.log2(enough * warp_rows / problem.out_features))))
    return {
        "block_out": 32 if word_warps <= 2 else warp_rows,
        "block_words": WARP_WORDS * word_warps,
        "warp_rows": warp_rows,
        "block_tokens": _block_tokens(problem),
        "splits": splits,
        "arranged": int(problem.tokens > TILE_TOKENS and splits == 1),
        "pdl": 2 if splits > 1 and problem.dependent_launch else 0,
        # Permutes have the most to do in the largest groups.
        "memory_rows": int(problem.pattern is not None and problem.pattern.group == WORD and problem.tokens <= TILE_TOKENS),
        "ahead": 1,
    }


def compile_source(problem: Problem, config: Config) -> CompileSource:
    """For a compile-only check with x of the weight's dtype and float32 y."""
    pointers = {"mask_ptr": "*i32", "values_ptr": "*i64", "x_ptr": pointer_type(problem.dtype), "y_ptr": "*fp32", "tokens": "i32"}
    return CompileSource(tile_kernel, pointers, _constexprs(problem, problem.out_features, config, True), _warps(config))


register(
    Variant(
        kernel="spmm",
        name="tile",
        summary=f"mask words unfolded in registers, straight into matrix instructions; up to {MOST_TOKENS} tokens",
        launch=partial(whole, launch_parts),
        space=space,
        default=default,
        constraint=constraint,
        compile_source=compile_source,
        tokens=(2, MOST_TOKENS),
        launch_parts=launch_parts,
    )
)
