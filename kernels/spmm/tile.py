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
from sdbench.kernels.launching import on_nvidia, pointer_type, scratch
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant, register
from sdbench.kernels.spmm.permutes import multiply_ptx, room_ptx, unfold_ptx
from sdbench.kernels.spmm.unfold import room_of, unfold
from sdbench.kernels.spmv.lane_row import constraint as chunk_constraint
from sdbench.kernels.spmv.lane_row import load_word
from sdbench.packing import PackedWeight
from sdbench.pattern import WORD

MOST_TOKENS = 64
"""Beyond it the weight is unfolded too many times: ``expand`` does it once."""

WARP_WORDS, TILE_TOKENS = 4, 8
"""What a warp multiplies in one step: words of a row, and tokens of a matrix instruction."""


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
def arrange_kernel(x_ptr, fragments_ptr, tokens, IN: tl.constexpr, RAGGED: tl.constexpr, PDL: tl.constexpr):
    """fragments[tile, quad, piece, lane] = eight columns of token 8 tile + lane // 4 in word 4 quad + lane % 4; grid (quads, tiles).

    Zeros past the last token and column.
    """
    lane = tl.arange(0, 128)
    token = tl.program_id(1) * 8 + lane // 4 % 8
    column = ((tl.program_id(0) * 4 + lane % 4) * 8 + lane // 32 * 2)[:, None] + tl.arange(0, 2)[None, :]
    live = (token < tokens)[:, None]
    if RAGGED:
        live = live & (column < IN // 4)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + (token * (IN // 4))[:, None] + column, mask=live, other=0)
    place = ((tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 128 + lane)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(fragments_ptr + place, x)


@triton.jit
def _load_tokens(
    x_ptr, word, token, tokens, inside,
    IN: tl.constexpr, WORDS: tl.constexpr, TILES: tl.constexpr,
    ARRANGED: tl.constexpr, PARTIAL: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """For each of a lane's tokens, eight apart, the columns of its word as eight int64."""
    x = ()
    for tile in tl.static_range(TILES):
        for piece in tl.static_range(4):
            quad = (word * 8 + 2 * piece)[:, None] + tl.arange(0, 2)[None, :]
            pointer = x_ptr + ((token + 8 * tile) * (IN // 4))[:, None] + quad
            live = inside
            if PARTIAL:
                live = live & (token + 8 * tile < tokens)
            if ARRANGED:
                # A warp's 512 bytes lie together.
                first = ((token // 8 + tile) * ((WORDS + 3) // 4) + word // 4) * 4 + piece
                pointer = x_ptr + (first * 32 + token % 8 * 4 + word % 4)[:, None] * 2 + tl.arange(0, 2)[None, :]
                if MASKED:
                    loaded = tl.load(pointer, mask=(word < WORDS)[:, None], other=0)
                else:
                    loaded = tl.load(pointer)
            elif RAGGED:
                loaded = tl.load(pointer, mask=live[:, None] & (quad < IN // 4), other=0)
            elif MASKED or PARTIAL:
                loaded = tl.load(pointer, mask=live[:, None], other=0)
            else:
                loaded = tl.load(pointer)
            x = x + tl.split(loaded)
    return x


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
    BF16: tl.constexpr, NVIDIA: tl.constexpr, ROOM: tl.constexpr, UNFOLD: tl.constexpr, UNFOLD_LOWER: tl.constexpr,
    MULTIPLY: tl.constexpr,
):  # fmt: skip
    """y[split, token, r] = the split's share of (W x_token)[r]; grid (row blocks, splits, token blocks)."""
    PER_SPLIT: tl.constexpr = (WORDS + 4 * SPLITS - 1) // (4 * SPLITS) * 4
    BLOCK_WORDS: tl.constexpr = 4 * WORD_WARPS
    STEPS: tl.constexpr = (PER_SPLIT + BLOCK_WORDS - 1) // BLOCK_WORDS
    TOKENS: tl.constexpr = 8 * TILES
    # Columns of x for the next step too, where a thread has the registers.
    AHEAD: tl.constexpr = NVIDIA and TILES * SLOTS <= 4
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
    if AHEAD:
        x = _load_tokens(quad_ptr, word, token, tokens, word < end, IN, WORDS, TILES, ARRANGED, PARTIAL, GUARD, RAGGED)
    for _ in range(0, STEPS - 1):
        # The next words, and their columns of x, are on their way while the current ones are unfolded.
        mask_ptr += BLOCK_WORDS * PITCH
        value_ptr += BLOCK_WORDS * CHUNKS * PITCH * 2
        later = _load_weights(mask_ptr, value_ptr, row, word + BLOCK_WORDS < end, OUT, PITCH, SLOTS, CHUNKS, GUARD)
        if AHEAD:
            next_word = word + BLOCK_WORDS
            next_x = _load_tokens(quad_ptr, next_word, token, tokens, next_word < end, IN, WORDS, TILES, ARRANGED, PARTIAL, GUARD, RAGGED)
            sums = _multiply(sums, words, x, room, SLOTS, TILES, CHUNKS, UNFOLD, UNFOLD_LOWER, MULTIPLY)
            x = next_x
        elif NVIDIA:
            x = _load_tokens(quad_ptr, word, token, tokens, word < end, IN, WORDS, TILES, ARRANGED, PARTIAL, GUARD, RAGGED)
            sums = _multiply(sums, words, x, room, SLOTS, TILES, CHUNKS, UNFOLD, UNFOLD_LOWER, MULTIPLY)
        else:
            sums = _multiply_plain(sums, words, x_ptr, word, first_token, tokens, word < end, IN, SLOTS, TOKENS, CHUNKS, BF16)
        word += BLOCK_WORDS
        words = later
    if PDL == 2:
        gdc_launch_dependents()
    if NVIDIA:
        if not AHEAD:
            x = _load_tokens(quad_ptr, word, token, tokens, word < end, IN, WORDS, TILES, ARRANGED, PARTIAL, GUARD, RAGGED)
        sums = _multiply(sums, words, x, room, SLOTS, TILES, CHUNKS, UNFOLD, UNFOLD_LOWER, MULTIPLY)
    else:
        sums = _multiply_plain(sums, words, x_ptr, word, first_token, tokens, word < end, IN, SLOTS, TOKENS, CHUNKS, BF16)
    y_ptr += tl.program_id(1) * tokens * OUT
    if NVIDIA:
        # Registers of a matrix instruction's sums: two tokens (2t and 2t + 1), at rows g and g + 8.
        left = tl.arange(0, 32 * ROW_WARPS)[:, None]
        register = tl.arange(0, 4)[None, :]
        rows = first_row + left // 32 * (8 * SLOTS) + left // 4 % 8 + 8 * (register % 2)
        columns = first_token + left % 4 * 2 + register // 2
        for pair in tl.static_range(SLOTS // 2):
            for tile in tl.static_range(TILES):
                first = tl.join(sums[4 * (pair * TILES + tile)], sums[4 * (pair * TILES + tile) + 1])
                joined = tl.join(first, tl.join(sums[4 * (pair * TILES + tile) + 2], sums[4 * (pair * TILES + tile) + 3]))
                total = tl.sum(tl.reshape(joined, [WORD_WARPS, 32 * ROW_WARPS, 4]), 0)
                found = (rows + 16 * pair < OUT) & (columns + 8 * tile < tokens)
                place = (columns + 8 * tile) * OUT + rows + 16 * pair
                tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=found)
    else:
        rows = first_row + tl.arange(0, 8 * ROW_WARPS)[:, None] // 8 * (8 * SLOTS) + tl.arange(0, 8 * ROW_WARPS)[:, None] % 8
        columns = first_token + tl.arange(0, TOKENS)[None, :]
        for slot in tl.static_range(SLOTS):
            total = tl.sum(tl.sum(tl.reshape(sums[slot], [WORD_WARPS, 8 * ROW_WARPS, 4, TOKENS]), 2), 0)
            found = (rows + 8 * slot < OUT) & (columns < tokens)
            tl.store(y_ptr + columns * OUT + rows + 8 * slot, total.to(y_ptr.dtype.element_ty), mask=found)


def _warps(config: Config) -> int:
    return config["block_out"] // config["warp_rows"] * config["block_words"] // WARP_WORDS


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
        "ROOM": room_ptx(_warps(config)) if nvidia and memory_rows else "",
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
            memory (0, 1 or 2; in groups of 32), the others by permutes: two units of the GPU share the work.
    """
    tokens, splits = len(x), config["splits"]
    narrow = (x.to(packed.dtype) if on_nvidia() else x).contiguous()
    if narrow.data_ptr() % 16:
        narrow = narrow.clone()
    problem = Problem(*packed.shape, packed.dtype, packed.pattern, 1, tokens=tokens)
    read = _arranged(narrow, problem, config) if config["arranged"] and on_nvidia() else narrow
    grid = triton.cdiv(packed.out_features, config["block_out"]), splits, triton.cdiv(tokens, config["block_tokens"])
    tile_kernel[grid](
        packed.mask_words, packed.values.view(torch.int64), read, parts, tokens,
        **_constexprs(problem, packed.pitch, config, on_nvidia()), num_warps=_warps(config), launch_pdl=bool(config["pdl"]),
    )  # fmt: skip


def _arranged(x: Tensor, problem: Problem, config: Config) -> Tensor:
    """x ``[tokens, in]`` in the order in which warps read it, 16 bytes a lane."""
    quads, tiles = triton.cdiv(problem.words, WARP_WORDS), triton.cdiv(problem.tokens, config["block_tokens"]) * config["block_tokens"] // 8
    fragments = scratch("tokens of spmm/tile", (tiles, quads * 128 * 8), x.dtype, x.device)
    arrange_kernel[quads, tiles](
        x.view(torch.int64), fragments.view(torch.int64), problem.tokens, problem.in_features,
        problem.in_features % (WARP_WORDS * WORD) != 0, config["pdl"], num_warps=4, launch_pdl=bool(config["pdl"]),
    )  # fmt: skip
    return fragments


def constraint(problem: Problem) -> str | None:
    """Why the 16-byte chunks, the tokens or the device do not fit a problem."""
    if 0 < problem.capability < 80:
        return f"needs matrix instructions of compute capability 8.0, and this is {problem.capability / 10}"
    if problem.tokens > MOST_TOKENS:
        return f"takes {MOST_TOKENS} tokens at most, not {problem.tokens}"
    return chunk_constraint(problem)


def _block_tokens(problem: Problem) -> int:
    return min(32, max(TILE_TOKENS, triton.next_power_of_2(problem.tokens)))


def space(problem: Problem) -> list[Config]:
    """Programs of two to sixteen warps, 6 to 40 warps an SM; K is split where rows are few, x shared by more rows where tokens are many."""
    block_tokens = _block_tokens(problem)
    return [
        {"block_out": warp_rows * row_warps, "block_words": WARP_WORDS * word_warps, "warp_rows": warp_rows, "block_tokens": block_tokens,
         "splits": splits, "arranged": arranged, "pdl": pdl, "memory_rows": memory_rows}
        for warp_rows in (16, 32)
        for row_warps, word_warps in ((1, 2), (2, 2), (1, 4), (2, 4), (1, 8), (2, 8), *(((4, 2), (4, 4)) if problem.tokens > 8 else ()))
        for splits in ((1, 4) if problem.out_features < 4096 else (1,))
        for arranged in (0, 1)
        for pdl in ((0, 1) if problem.dependent_launch else (0,))
        for memory_rows in ((0, 1) if problem.pattern and problem.pattern.group == WORD else (0,))
        # More warps a program would leave a thread fewer registers than it needs.
        if warp_rows * block_tokens * row_warps * word_warps <= 8192
        and problem.words >= 2 * splits * WARP_WORDS * word_warps
        and 6 <= problem.out_features / warp_rows * word_warps * splits / problem.sm_count <= 40
    ] or [default(problem)]  # fmt: skip


def default(problem: Problem) -> Config:
    """About 12 warps an SM without a search, all of a row's words in one program, at least two warps side by side along them.

    A warp of 32 rows halves the loads of x, which are many where tokens are, and needs twice the rows for as many warps.
    """
    enough = 12 * problem.sm_count
    warp_rows = 32 if problem.tokens > TILE_TOKENS and problem.out_features // 32 * 2 >= enough // 2 else 16
    most = max(1, min(8, triton.next_power_of_2(problem.words) // (2 * WARP_WORDS)))
    word_warps = min(most, max(2, 2 ** round(math.log2(enough * warp_rows / problem.out_features))))
    return {
        "block_out": 32 if word_warps <= 2 else warp_rows,
        "block_words": WARP_WORDS * word_warps,
        "warp_rows": warp_rows,
        "block_tokens": _block_tokens(problem),
        "splits": 1,
        "arranged": int(problem.tokens > TILE_TOKENS),
        "pdl": 0,
        # Permutes have the most to do in the largest groups.
        "memory_rows": int(problem.pattern is not None and problem.pattern.group == WORD),
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
