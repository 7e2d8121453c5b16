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
def gather(x_ptr, position, limit, GUARD: tl.constexpr):
    """x at bit positions of each lane's word, as float32; 0 past ``limit`` where GUARD is set.

    An ordinary load: marked pure, inline PTX would be moved above a dependent launch's wait and read a stale x.
    """
    if GUARD:
        x = tl.load(x_ptr + position, mask=position < limit, other=0.0)
    else:
        x = tl.load(x_ptr + position)
    return x.to(tl.float32)
