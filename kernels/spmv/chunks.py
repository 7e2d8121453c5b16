"""Adding a mask word's packed values times x to a lane's sums, sixteen bytes of values at a time."""

import triton
import triton.language as tl

from sdbench.kernels.registry import Config
from sdbench.kernels.spmv.bits import gather, gather_byte, low_bytes, take_highest
from sdbench.kernels.spmv.nibbles import byte_of, high_positions, low_positions, single_positions


@triton.jit
def widen(pair, HIGH: tl.constexpr, BF16: tl.constexpr):
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
def _add_four(even, odd, quad, x0, x1, x2, x3, BF16: tl.constexpr):
    """Adds four packed values (one int64) times four elements of x."""
    low = quad.to(tl.int32)
    high = (quad >> 32).to(tl.int32)
    even += widen(low, False, BF16) * x0
    odd += widen(low, True, BF16) * x1
    even += widen(high, False, BF16) * x2
    odd += widen(high, True, BF16) * x3
    return even, odd


@triton.jit
def _add_four_scanned(
    even, odd, mask, quad, x_ptr, limit, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr, ALIGNED: tl.constexpr
):
    """Four values at the four highest set bits; returns the sums and the bits that are left."""
    p0, mask = take_highest(mask, NVIDIA)
    p1, mask = take_highest(mask, NVIDIA)
    p2, mask = take_highest(mask, NVIDIA)
    p3, mask = take_highest(mask, NVIDIA)
    even, odd = _add_four(
        even, odd, quad,
        gather(x_ptr, p0, limit, GUARD, ALIGNED), gather(x_ptr, p1, limit, GUARD, ALIGNED),
        gather(x_ptr, p2, limit, GUARD, ALIGNED), gather(x_ptr, p3, limit, GUARD, ALIGNED), BF16,
    )  # fmt: skip
    return even, odd, mask


@triton.jit
def _add_chunk_scanned(
    even, odd, mask, chunk, x_ptr, limit, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr, ALIGNED: tl.constexpr
):
    """Eight values (two int64 a lane) at the eight highest set bits."""
    first, second = tl.split(chunk)
    even, odd, mask = _add_four_scanned(even, odd, mask, first, x_ptr, limit, BF16, NVIDIA, GUARD, ALIGNED)
    return _add_four_scanned(even, odd, mask, second, x_ptr, limit, BF16, NVIDIA, GUARD, ALIGNED)


@triton.jit
def _places(x_ptr, positions, GUARD: tl.constexpr, ALIGNED: tl.constexpr):
    """What ``_at`` reads by: the lowest bytes of addresses where x is aligned, else the positions themselves."""
    if ALIGNED and not GUARD:
        places = low_bytes(x_ptr, positions)
    else:
        places = positions
    return places


@triton.jit
def _at(x_ptr, places, limit, INDEX: tl.constexpr, FIRST: tl.constexpr, GUARD: tl.constexpr, ALIGNED: tl.constexpr):
    """x at the position in byte INDEX, which is within the group INDEX of the half word whose first column is FIRST."""
    if ALIGNED and not GUARD:
        x = gather_byte(x_ptr, places, INDEX, FIRST + 4 * INDEX)
    else:
        x = gather(x_ptr, byte_of(places, INDEX) + (FIRST + 4 * INDEX), limit, GUARD, ALIGNED)
    return x


@triton.jit
def _add_chunk_pairs(
    even, odd, half, chunk, x_ptr, limit,
    FIRST: tl.constexpr, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Eight values of a 2:4 word: both positions of the four nibbles in the lower half of ``half``, whose first column is FIRST."""
    first, second = tl.split(chunk)
    high = _places(x_ptr, high_positions(half, NVIDIA), GUARD, ALIGNED)
    low = _places(x_ptr, low_positions(half, NVIDIA), GUARD, ALIGNED)
    even, odd = _add_four(
        even, odd, first,
        _at(x_ptr, high, limit, 3, FIRST, GUARD, ALIGNED), _at(x_ptr, low, limit, 3, FIRST, GUARD, ALIGNED),
        _at(x_ptr, high, limit, 2, FIRST, GUARD, ALIGNED), _at(x_ptr, low, limit, 2, FIRST, GUARD, ALIGNED), BF16,
    )  # fmt: skip
    return _add_four(
        even, odd, second,
        _at(x_ptr, high, limit, 1, FIRST, GUARD, ALIGNED), _at(x_ptr, low, limit, 1, FIRST, GUARD, ALIGNED),
        _at(x_ptr, high, limit, 0, FIRST, GUARD, ALIGNED), _at(x_ptr, low, limit, 0, FIRST, GUARD, ALIGNED), BF16,
    )  # fmt: skip


@triton.jit
def _add_four_singles(
    even, odd, half, quad, x_ptr, limit,
    FIRST: tl.constexpr, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Four values of a 1:4 word: the one position of each of four nibbles."""
    at = _places(x_ptr, single_positions(half, NVIDIA), GUARD, ALIGNED)
    return _add_four(
        even, odd, quad,
        _at(x_ptr, at, limit, 3, FIRST, GUARD, ALIGNED), _at(x_ptr, at, limit, 2, FIRST, GUARD, ALIGNED),
        _at(x_ptr, at, limit, 1, FIRST, GUARD, ALIGNED), _at(x_ptr, at, limit, 0, FIRST, GUARD, ALIGNED), BF16,
    )  # fmt: skip


@triton.jit
def add_word(
    even, odd, mask, a, b, c, x_ptr, limit,
    CHUNKS: tl.constexpr, NIBBLE: tl.constexpr, BF16: tl.constexpr, NVIDIA: tl.constexpr, GUARD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Adds all values of each lane's mask word times x.

    Args:
        even: float32 sums of the values at even places; two chains of additions halve the latency.
        odd: float32 sums of the others.
        mask: uint32 mask words.
        a: int64 ``[lanes, 2]``, the word's first eight values (descending columns).
        b: The next eight, used where CHUNKS > 1.
        c: The last eight, used where CHUNKS > 2.
        x_ptr: Each lane's pointer to x at the word's first column.
        limit: Positions from here on count as 0 where GUARD is set.
        CHUNKS: Chunks of eight values a word: 1, 2 or 3.
        NIBBLE: N of an N:4 pattern whose positions are looked up; 0 where bits are scanned.
        BF16: Values are bf16; else fp16.
        NVIDIA: Use PTX.
        GUARD: Check positions against the limit.
        ALIGNED: x starts at a multiple of ``ALIGNMENT`` bytes, on an NVIDIA GPU.

    Returns:
        The new sums.
    """
    if NIBBLE == 2:
        even, odd = _add_chunk_pairs(even, odd, mask >> 16, a, x_ptr, limit, 16, BF16, NVIDIA, GUARD, ALIGNED)
        even, odd = _add_chunk_pairs(even, odd, mask, b, x_ptr, limit, 0, BF16, NVIDIA, GUARD, ALIGNED)
    elif NIBBLE == 1:
        first, second = tl.split(a)
        even, odd = _add_four_singles(even, odd, mask >> 16, first, x_ptr, limit, 16, BF16, NVIDIA, GUARD, ALIGNED)
        even, odd = _add_four_singles(even, odd, mask, second, x_ptr, limit, 0, BF16, NVIDIA, GUARD, ALIGNED)
    else:
        even, odd, mask = _add_chunk_scanned(even, odd, mask, a, x_ptr, limit, BF16, NVIDIA, GUARD, ALIGNED)
        if CHUNKS > 1:
            even, odd, mask = _add_chunk_scanned(even, odd, mask, b, x_ptr, limit, BF16, NVIDIA, GUARD, ALIGNED)
        if CHUNKS > 2:
            even, odd, mask = _add_chunk_scanned(even, odd, mask, c, x_ptr, limit, BF16, NVIDIA, GUARD, ALIGNED)
    return even, odd


def pair_warps(config: Config) -> int:
    """Warps of a program that gives each thread one (row, word) pair."""
    return max(1, config["block_out"] * config["block_words"] // 32)
