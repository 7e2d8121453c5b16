"""Positions inside four-column groups by table: one byte permute for four groups, where a bit scan costs one slow instruction a value.

``prmt`` picks a byte of an eight-byte table for each of four selector nibbles; a nibble of 8 or more picks the same byte as the nibble
less 8, but gives its sign bit eight times. A mask word's half *is* such a selector. The tables below are laid out for that; positions come
out one a byte, the lowest group in byte 0. ``bfind`` runs at an eighth of the rate of ``prmt`` on current NVIDIA GPUs.
"""

import triton
import triton.language as tl

# The k-th crumb (2 bits) of each constant is the position for the nibble k; nibbles that no pattern makes are filled alike.
_HIGHEST = tl.constexpr(sum((n.bit_length() - 1) << (2 * n) for n in range(1, 16)))
_LOWEST = tl.constexpr(sum(((n & -n).bit_length() - 1) << (2 * n) for n in range(1, 16)))


@triton.jit
def _look_up(half, CRUMBS: tl.constexpr):
    """The tables by shifts, for other back ends and the interpreter."""
    positions = tl.zeros_like(half)
    for group in tl.static_range(4):
        nibble = (half >> (4 * group)) & 15
        positions |= ((tl.full(half.shape, CRUMBS, tl.uint32) >> (2 * nibble)) & 3) << (8 * group)
    return positions


@triton.jit
def high_positions(half, NVIDIA: tl.constexpr):
    """Higher of the two set bits of each nibble (2:4).

    Args:
        half: uint32 tile; the lower 16 bits hold four nibbles.
        NVIDIA: Use the PTX instruction.

    Returns:
        uint32, a position a byte.
    """
    if NVIDIA:
        positions = tl.inline_asm_elementwise(
            "{ .reg .b32 t; prmt.b32 t, 0x01808000, 0x00020280, $1; and.b32 $0, t, 0x03030303; }",
            "=r,r", [half], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        positions = _look_up(half, _HIGHEST)
    return positions


@triton.jit
def low_positions(half, NVIDIA: tl.constexpr):
    """Lower of the two set bits of each nibble (2:4); arguments and result as in ``high_positions``."""
    if NVIDIA:
        positions = tl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 t, $1, 0x7777; prmt.b32 $0, 0x00010000, 0x00010002, t; }",
            "=r,r", [half], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        positions = _look_up(half, _LOWEST)
    return positions


@triton.jit
def single_positions(half, NVIDIA: tl.constexpr):
    """The one set bit of each nibble (1:4); arguments and result as in ``high_positions``."""
    if NVIDIA:
        positions = tl.inline_asm_elementwise(
            "{ .reg .b32 t; prmt.b32 t, 0x00010080, 0x00000002, $1; and.b32 $0, t, 0x03030303; }",
            "=r,r", [half], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        positions = _look_up(half, _HIGHEST)
    return positions


@triton.jit
def byte_of(positions, INDEX: tl.constexpr):
    """One byte of each word."""
    return (positions >> (8 * INDEX)) & 255
