"""Packed weight times many tokens: rows of the dense matrix go into one small buffer, and the device's own matrix product reads them.

A piece of rows is about as large as an L2 cache, so that memory sees little of the dense bytes between their writing and their reading. All
weights share the buffer: a model needs no dense copy of a pruned matrix.

Two kernels write the same rows: one loads a value for every column; where a mask word has one to three 16-byte chunks of 16-bit values,
the other has a thread unfold whole words in registers (``unfold.py``).
"""

from dataclasses import dataclass
from threading import get_ident
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sdbench.kernels.launching import Repeat, on_nvidia, pointer_type, repeatable, scratch, stream_of
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant, register
from sdbench.kernels.spmm.permutes import REACH, room_ptx, unfold_ptx
from sdbench.kernels.spmm.unfold import room_of, unfold
from sdbench.kernels.spmv.lane_row import constraint as chunk_constraint
from sdbench.kernels.spmv.lane_row import load_word
from sdbench.packing import PackedWeight, chunk_length
from sdbench.pattern import WORD

PIECE_BYTES = 50 << 20
"""Bytes of a piece at most: whole matrices of a small model, since each piece is two more launches."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A launch that can be repeated in its thread.

    Attributes:
        repeat: The launch.
        operands: Its operands, addresses of mask words, values and dense rows first.
        pitch: Of the weight.
        stream: Whose scratch memory the dense rows are.
        dense: Those rows, which scratch memory may give back.
    """

    repeat: Repeat
    operands: tuple[int, ...]
    pitch: int
    stream: int
    dense: "ref[Tensor]"


@triton.jit(do_not_specialize=["first_row", "rows"])
def expand_kernel(
    mask_ptr, values_ptr, dense_ptr, first_row, rows,
    OUT: tl.constexpr, IN: tl.constexpr, KEPT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """dense[r, c] = W[first_row + r, c] for ``rows`` rows; grid (row blocks, column blocks).

    Values lie in descending column order: the place of a kept column's value is the number of set bits above its own.
    """
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.program_id(1) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    inside = (row < rows)[:, None] & (column < IN)[None, :]
    at = (first_row + row).to(tl.int64)[:, None]
    word = (column // 32)[None, :]
    bit = (column % 32).to(tl.uint32)[None, :]
    mask = tl.load(mask_ptr + word.to(tl.int64) * OUT + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    above = (mask >> bit) >> 1
    # Set bits of a word by adding neighbours: two, four, eight and so on.
    above = above - ((above >> 1) & 0x55555555)
    above = (above & 0x33333333) + ((above >> 2) & 0x33333333)
    above = (above + (above >> 4)) & 0x0F0F0F0F
    place = ((above * 0x01010101) >> 24).to(tl.int64)
    value_ptr = values_ptr + ((word.to(tl.int64) * (KEPT // CHUNK) + place // CHUNK) * OUT + at) * CHUNK + place % CHUNK
    kept = ((mask >> bit) & 1) == 1
    value = tl.load(value_ptr, mask=inside & kept, other=0.0)
    tl.store(dense_ptr + row.to(tl.int64)[:, None] * IN + column[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["first_row", "rows"])
def words_kernel(
    mask_ptr, values_ptr, dense_ptr, first_row, rows,
    OUT: tl.constexpr, IN: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    NVIDIA: tl.constexpr, ROOM: tl.constexpr, UNFOLD: tl.constexpr,
):  # fmt: skip
    """The same by whole mask words, four columns of dense an int64.

    Four lanes have neighbouring words of a row, and eight such groups neighbouring rows: loads are 128-byte pieces of values, and stores
    256 bytes of a row.
    """
    lane = tl.arange(0, BLOCK_OUT * BLOCK_WORDS)
    row = tl.program_id(0) * BLOCK_OUT + lane // 4 % BLOCK_OUT
    word = tl.program_id(1) * BLOCK_WORDS + lane // (4 * BLOCK_OUT) * 4 + lane % 4
    from_row = (first_row + row).to(tl.int64)
    pointer = (values_ptr + (word.to(tl.int64) * CHUNKS * OUT + from_row) * 2)[:, None] + tl.arange(0, 2)[None, :]
    live = (row < rows) & (word < WORDS)
    mask, a, b, c = load_word(mask_ptr + word.to(tl.int64) * OUT + from_row, pointer, live, OUT * 2, CHUNKS, True)
    room = lane
    if NVIDIA:
        room = room_of(lane, ROOM)
    q = unfold(mask, a, b, c, room, CHUNKS, UNFOLD, NVIDIA)
    # Joined in the order of bits of a quad's number, lowest last.
    even = tl.join(tl.join(q[0], q[4]), tl.join(q[2], q[6]))
    odd = tl.join(tl.join(q[1], q[5]), tl.join(q[3], q[7]))
    quads = tl.reshape(tl.join(even, odd), [BLOCK_OUT * BLOCK_WORDS, 8])
    quad = (word * 8)[:, None] + tl.arange(0, 8)[None, :]
    inside = (row < rows)[:, None] & (quad < IN // 4)
    tl.store(dense_ptr + row.to(tl.int64)[:, None] * (IN // 4) + quad, quads, mask=inside)


def _constexprs(problem: Problem, config: Config, nvidia: bool) -> dict[str, Any]:
    assert problem.pattern is not None
    # Permutes have the most to do in the largest groups.
    kept, large = problem.pattern.kept_per_word, problem.pattern.group == WORD
    common = {"OUT": problem.out_features, "IN": problem.in_features}
    if config["words"]:
        return common | {
            "WORDS": problem.words,
            "CHUNKS": kept // 8,
            "BLOCK_OUT": config["block_out"],
            "BLOCK_WORDS": config["block_in"] // WORD,
            "NVIDIA": nvidia,
            "ROOM": room_ptx(config["block_out"] * config["block_in"] // WORD // 32 * REACH) if nvidia and large else "",
            "UNFOLD": unfold_ptx(problem.pattern, large) if nvidia else "",
        }
    return common | {
        "KEPT": kept,
        "CHUNK": chunk_length(kept, problem.dtype),
        "BLOCK_OUT": config["block_out"],
        "BLOCK_IN": config["block_in"],
    }


def expand(packed: PackedWeight, rows: slice, dense: Tensor, config: Config) -> Tensor:
    """Fills and returns dense ``[rows, in]`` with rows of W, bit for bit as they were packed.

    Args:
        packed: W ``[out, in]``, any pattern and dtype.
        rows: Which rows, with a step of 1.
        dense: In the weight's dtype, contiguous, at a multiple of 16 bytes.
        config: ``block_out`` rows and ``block_in`` columns a program, powers of two, 128 columns at least where ``words`` is 1, which
            unfolds whole words.
    """
    _launch(packed, rows, dense, config)
    return dense


def _launch(packed: PackedWeight, rows: slice, dense: Tensor, config: Config) -> tuple[Repeat, tuple[int, ...]] | None:
    """Fills dense, and gives the launch with its operands; None where only Triton can launch it again."""
    grid = -(-(rows.stop - rows.start) // config["block_out"]), -(-packed.in_features // config["block_in"]), 1
    # A kernel asks for OUT only to step from a word to the next.
    problem = Problem(packed.pitch, packed.in_features, packed.dtype, packed.pattern, 1)
    kernel, named, values, target = expand_kernel, _constexprs(problem, config, on_nvidia()), packed.values, dense
    if config["words"]:
        kernel, values, target = words_kernel, values.view(torch.int64), dense.view(torch.int64)
    span = rows.start, rows.stop - rows.start
    compiled = kernel[grid](packed.mask_words, values, target, *span, **named, num_warps=config["num_warps"])
    repeat = repeatable(compiled, grid, named.values(), packed.device)
    return repeat and (repeat, (packed.mask_words.data_ptr(), values.data_ptr(), dense.data_ptr(), *span))


class Expanded:
    """A packed weight times many tokens, with what its calls share: a prompt makes hundreds of products, and is not to wait for the host.

    Args:
        packed: W ``[out, in]``, any pattern and dtype; stays on its device.
        config: As in :func:`expand`, and ``piece`` rows at a time.
    """

    def __init__(self, packed: PackedWeight, config: Config):
        self._packed, self._config = packed, config
        self._dtype, self._index, self._stream_of = packed.dtype, packed.device.index, stream_of(packed.device)
        starts = range(0, packed.out_features, config["piece"])
        self._pieces = [slice(start, min(start + config["piece"], packed.out_features)) for start in starts]
        # By place of the piece, and thread whose scratch memory the dense rows are.
        self._kept: dict[tuple[int, int], _Kept] = {}

    def multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[..., out]`` = x W^T in the weight's dtype, accumulated as torch accumulates.

        Args:
            x: ``[..., in]``; multiplied in the weight's dtype, without a gradient, as by the other kernels.
            dtype: What is asked for; torch's product has no other than its operands'.
        """
        if x.requires_grad:
            x = x.detach()
        if x.dtype is not self._dtype:
            x = x.to(self._dtype)
        thread = get_ident()
        if len(self._pieces) == 1:
            return F.linear(x, self._rows(0, thread))
        y = x.new_empty(*x.shape[:-1], self._packed.out_features)
        rows, found = x.reshape(-1, x.shape[-1]), y.view(-1, self._packed.out_features)
        for place, piece in enumerate(self._pieces):
            torch.mm(rows, self._rows(place, thread).T, out=found[:, piece])
        return y

    def _rows(self, place: int, thread: int) -> Tensor:
        """Dense rows of a piece, until the thread's next launch."""
        kept, mask, values = self._kept.get((place, thread)), self._packed.mask_words, self._packed.values
        # Weights that were moved, or became rows of a stack, are not where the kernel was told.
        if (
            kept is not None
            and (dense := kept.dense()) is not None
            and kept.stream == self._stream_of(self._index)
            and kept.operands[0] == mask.data_ptr()
            and kept.operands[1] == values.data_ptr()
            and kept.pitch == mask.stride(0)
        ):
            kept.repeat(*kept.operands, stream=kept.stream)
            return dense
        return self._look_up(place, thread)

    def _look_up(self, place: int, thread: int) -> Tensor:
        packed, piece = self._packed, self._pieces[place]
        dense = scratch("expanded rows", (piece.stop - piece.start, packed.in_features), packed.dtype, packed.device)
        launch = _launch(packed, piece, dense, self._config)
        if launch:
            self._kept[place, thread] = _Kept(*launch, packed.pitch, self._stream_of(self._index), ref(dense))
        return dense


def launch(packed: PackedWeight, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """``[tokens, out]`` = x W^T, not in y; see :class:`Expanded`."""
    return Expanded(packed, config).multiply(x, y.dtype)


def pieces(packed: PackedWeight) -> int:
    """Into how many pieces a weight's dense rows fall."""
    return -(-packed.out_features // _piece(packed.in_features, packed.dtype))


def _piece(in_features: int, dtype: torch.dtype) -> int:
    """Rows of ``PIECE_BYTES``, whole 128-row tiles of the product."""
    return max(128, PIECE_BYTES // (in_features * dtype.itemsize) // 128 * 128)


def default(problem: Problem) -> Config:
    """Pieces of ``PIECE_BYTES``, or one of the whole matrix."""
    words = int(chunk_constraint(problem) is None)
    piece = min(_piece(problem.in_features, problem.dtype), problem.out_features)
    return {"words": words, "block_out": 16, "block_in": 256, "num_warps": 4, "piece": piece}


def space(problem: Problem) -> list[Config]:
    """A thread a mask word, and tiles of 2048 columns where each has a load of its own; one piece or several."""
    tiles = [(0, block_out, block_in, num_warps) for block_out, block_in in ((8, 256), (16, 128), (32, 64)) for num_warps in (4, 8)]
    if chunk_constraint(problem) is None:
        tiles += [(1, 16, 128, 2), (1, 32, 128, 4), (1, 64, 128, 8), (1, 16, 256, 4), (1, 32, 256, 8), (1, 16, 512, 8), (1, 64, 128, 4)]
    pieces = {default(problem)["piece"], problem.out_features}
    return [
        {"words": words, "block_out": block_out, "block_in": block_in, "num_warps": num_warps, "piece": piece}
        for words, block_out, block_in, num_warps in tiles
        for piece in sorted(pieces)
    ]


def compile_source(problem: Problem, config: Config) -> CompileSource:
    """For a compile-only check."""
    pointer = "*i64" if config["words"] else pointer_type(problem.dtype)
    signature = {"mask_ptr": "*i32", "values_ptr": pointer, "dense_ptr": pointer, "first_row": "i32", "rows": "i32"}
    return CompileSource(
        words_kernel if config["words"] else expand_kernel, signature, _constexprs(problem, config, True), config["num_warps"]
    )


register(
    Variant(
        kernel="spmm",
        name="expand",
        summary="rows of the dense matrix into a small shared buffer, then torch's own product",
        launch=launch,
        space=space,
        default=default,
        compile_source=compile_source,
        tokens=(2, None),
        bind=lambda packed, config: Expanded(packed, config).multiply,
    )
)
