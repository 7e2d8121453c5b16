"""Walking the set bits of a mask word, highest first: two instructions on NVIDIA GPUs, plain arithmetic elsewhere."""

import triton
import triton.language as tl


@triton.jit
def take_highest(mask, NVIDIA: tl.constexpr):
    """Splits the highest set bit off each word.

    ``bfind`` gives its position and ``szext.wrap`` keeps the bits below it. The portable branch halves the word five times.
    For an empty word the position is outside 0..31 (NVIDIA) or 0 (portable): callers mask what they read with it.

    Args:
        mask: uint32 tile.
        NVIDIA: Use the PTX instructions.

    Returns:
        The positions (uint32) and the words without those bits.
    """
    if NVIDIA:
        position = tl.inline_asm_elementwise("bfind.u32 $0, $1;", "=r,r", [mask], dtype=tl.uint32, is_pure=True, pack=1)
        rest = tl.inline_asm_elementwise("szext.wrap.u32 $0, $1, $2;", "=r,r,r", [mask, position], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        position = tl.zeros_like(mask)
        left = mask
        for halving in tl.static_range(5):
            high = left >> (16 >> halving)
            position += tl.where(high != 0, 16 >> halving, 0).to(tl.uint32)
            left = tl.where(high != 0, high, left)
        rest = mask & ~(tl.full(mask.shape, 1, tl.uint32) << position)
    return position, rest


@triton.jit
def gather(x_ptr, position, limit, GUARD: tl.constexpr, ALIGNED: tl.constexpr):
    """x at bit positions of each lane's word, as float32; 0 past ``limit`` where GUARD is set.

    An ordinary load: marked pure, inline PTX would be moved above a dependent launch's wait and read a stale x. The address is another
    matter: where x is ALIGNED (and this is an NVIDIA GPU) a word's elements share the upper half of their addresses, and one 32-bit
    instruction does what a 64-bit sum takes several for.
    """
    if ALIGNED:
        if x_ptr.dtype.element_ty.primitive_bitwidth == 16:
            address = tl.inline_asm_elementwise(
                "{ .reg .b32 low, high; mov.b64 {low, high}, $1; mad.lo.u32 low, $2, 2, low; mov.b64 $0, {low, high}; }",
                "=l,l,r", [x_ptr.to(tl.int64), position], dtype=tl.int64, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            address = tl.inline_asm_elementwise(
                "{ .reg .b32 low, high; mov.b64 {low, high}, $1; mad.lo.u32 low, $2, 4, low; mov.b64 $0, {low, high}; }",
                "=l,l,r", [x_ptr.to(tl.int64), position], dtype=tl.int64, is_pure=True, pack=1,
            )  # fmt: skip
        pointer = address.to(x_ptr.dtype)
    else:
        pointer = x_ptr + position
    if GUARD:
        x = tl.load(pointer, mask=position < limit, other=0.0)
    else:
        x = tl.load(pointer)
    return x.to(tl.float32)


ALIGNMENT = 256
"""Bytes that x must be a multiple of for the short addresses: a word's 32 elements of at most 4 bytes then lie in one such block."""


@triton.jit
def low_bytes(x_ptr, positions):
    """The lowest byte of the addresses at four positions, one a byte of ``positions``, of each lane's word of an aligned x.

    Args:
        x_ptr: Each lane's pointer to x at the word's first column.
        positions: uint32, four positions below 4.
    """
    if x_ptr.dtype.element_ty.primitive_bitwidth == 16:
        scaled = positions * 2
    else:
        scaled = positions * 4
    return scaled + (x_ptr.to(tl.int64) & 255).to(tl.uint32) * 0x01010101


@triton.jit
def gather_byte(x_ptr, lows, INDEX: tl.constexpr, FIRST: tl.constexpr):
    """x at the address whose lowest byte is one of ``low_bytes``, FIRST elements on: one byte permute makes the address (NVIDIA).

    Args:
        x_ptr: Each lane's pointer to x at the word's first column.
        lows: From :func:`low_bytes`.
        INDEX: Which byte of it, 0 for the lowest.
        FIRST: First column of the group within the word.
    """
    # prmt's selector: bytes 3, 2 and 1 of the address stay, the lowest comes from the second operand.
    selector = tl.full(lows.shape, 0x3214 + INDEX, tl.uint32)
    address = tl.inline_asm_elementwise(
        "{ .reg .b32 low, high; mov.b64 {low, high}, $1; prmt.b32 low, low, $2, $3; mov.b64 $0, {low, high}; }",
        "=l,l,r,r", [x_ptr.to(tl.int64), lows, selector], dtype=tl.int64, is_pure=True, pack=1,
    )  # fmt: skip
    return tl.load(address.to(x_ptr.dtype) + FIRST).to(tl.float32)
