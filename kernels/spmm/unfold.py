"""A mask word and its packed values as 32 columns of the dense row, four an int64: what ``tile`` multiplies and ``expand`` writes."""

import triton
import triton.language as tl


@triton.jit
def _pieces(a, b, c, CHUNKS: tl.constexpr):
    """Four values each, two pieces a chunk; chunks that a word does not have repeat others."""
    first = tl.split(a)
    second = first
    third = first
    if CHUNKS > 1:
        second = tl.split(b)
    if CHUNKS > 2:
        third = tl.split(c)
    return first[0], first[1], second[0], second[1], third[0], third[1]


@triton.jit
def _unfold_plain(mask, p0, p1, p2, p3, p4, p5):
    """The values as one long register: a kept column takes its lowest 16 bits and shifts it."""
    quads = ()
    low = tl.full(mask.shape, (1 << 48) - 1, tl.int64)
    for quad in tl.static_range(8):
        columns = tl.zeros(mask.shape, tl.int64)
        for column in tl.static_range(4):
            kept = ((mask >> (31 - 4 * quad - column)) & 1) != 0
            columns = (columns << 16) | tl.where(kept, p0 & 65535, 0)
            p0 = tl.where(kept, ((p0 >> 16) & low) | (p1 << 48), p0)
            p1 = tl.where(kept, ((p1 >> 16) & low) | (p2 << 48), p1)
            p2 = tl.where(kept, ((p2 >> 16) & low) | (p3 << 48), p2)
            p3 = tl.where(kept, ((p3 >> 16) & low) | (p4 << 48), p3)
            p4 = tl.where(kept, ((p4 >> 16) & low) | (p5 << 48), p4)
            p5 = tl.where(kept, p5 >> 16, p5)
        # Triton's tuples grow by addition alone, each time into another type.
        quads = (columns,) + quads  # type: ignore[assignment]  # noqa: RUF005
    return quads


@triton.jit
def room_of(lane, PTX: tl.constexpr):
    """Where each lane may spread a word, from ``permutes.room_ptx``; anything where a program needs no room."""
    if PTX == "":
        room = lane
    else:
        room = tl.inline_asm_elementwise(PTX, "=r,r", [lane], dtype=tl.int32, is_pure=True, pack=1)
    return room


@triton.jit
def unfold(mask, a, b, c, room, CHUNKS: tl.constexpr, PTX: tl.constexpr, NVIDIA: tl.constexpr):
    """The columns of each lane's mask word.

    Args:
        mask: uint32 mask words; 0 with zeros for values gives zeros.
        a: int64 ``[lanes, 2]``, the word's first eight values (descending columns).
        b: The next eight, used where CHUNKS > 1.
        c: The last eight, used where CHUNKS > 2.
        room: From :func:`room_of`.
        CHUNKS: Chunks of eight values a word: 1, 2 or 3.
        PTX: From ``permutes.unfold_ptx``.
        NVIDIA: Use it; else plain arithmetic.

    Returns:
        Eight int64 tiles, lowest columns first, each four 16-bit values, the lowest column in the lowest bits.
    """
    p0, p1, p2, p3, p4, p5 = _pieces(a, b, c, CHUNKS)
    if NVIDIA:
        if CHUNKS == 1:
            quads = tl.inline_asm_elementwise(
                PTX, "=l,=l,=l,=l,=l,=l,=l,=l,r,r,l,l", [room, mask, p0, p1],
                dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64), is_pure=True, pack=1,
            )  # fmt: skip
        elif CHUNKS == 2:
            quads = tl.inline_asm_elementwise(
                PTX, "=l,=l,=l,=l,=l,=l,=l,=l,r,r,l,l,l,l", [room, mask, p0, p1, p2, p3],
                dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            quads = tl.inline_asm_elementwise(
                PTX, "=l,=l,=l,=l,=l,=l,=l,=l,r,r,l,l,l,l,l,l", [room, mask, p0, p1, p2, p3, p4, p5],
                dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64), is_pure=True, pack=1,
            )  # fmt: skip
    else:
        quads = _unfold_plain(mask, p0, p1, p2, p3, p4, p5)
    return quads
