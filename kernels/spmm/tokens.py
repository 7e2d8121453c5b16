"""Where the warps of ``tile`` find x: 64 neighbouring bytes of a token a lane, read where they lie or put in the order of reading first."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.launching import scratch
from sdbench.pattern import WORD

WARP_WORDS, TILE_TOKENS = 4, 8
"""What a warp multiplies in one step: words of a row, and tokens of a matrix instruction."""


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
def load_tokens(
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


def arrange(x: Tensor, tiles: int, pdl: int) -> Tensor:
    """x in the order in which warps read it, 16 bytes a lane.

    Args:
        x: ``[tokens, in]``, 16-bit, contiguous, at an address that 16 divides.
        tiles: Of eight tokens each; those that x does not have are zeros.
        pdl: 0 for an ordinary launch, else a dependent one.

    Returns:
        ``[tiles, 8 * columns]`` of x's dtype, columns rounded up to a multiple of 128; the next call of the stream takes it again.
    """
    tokens, in_features = x.shape
    quads = triton.cdiv(triton.cdiv(in_features, WORD), WARP_WORDS)
    fragments = scratch("tokens of spmm/tile", (tiles, quads * 128 * 8), x.dtype, x.device)
    arrange_kernel[quads, tiles](
        x.view(torch.int64), fragments.view(torch.int64), tokens, in_features, in_features % (WARP_WORDS * WORD) != 0, pdl,
        num_warps=4, launch_pdl=bool(pdl),
    )  # fmt: skip
    return fragments
