"""lm_head with the argmax in it, and the end of a step: the token goes back to its place, the position moves on.

Greedy is argmax of the raw logits, the lowest id among equals. A logit and its id make one 64-bit key whose integer order is that of
(logit, lower id first), so that the maximum over programs does not depend on their order. The norm's scalar is positive and leaves the
argmax alone; logits are written where they are asked for, with the scalar applied. Of several sequences lm_head is a product like others,
whose argmax a kernel of its own finds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.decode.norm import root
from sdbench.kernels.launching import uses_kernels

SLOTS = 64
"""Places that programs spread their maxima over: one would take them one after the other."""

LOWEST = -(2**63)
_BROKEN = 2**31 - 1
_BLOCK = 1024


@triton.jit
def _greatest(logits, rows):
    """The greatest key of a block of logits."""
    # Both zeros become the positive one.
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    # Anything that is not finite outranks every number, and is told by its place.
    order = tl.where(tl.abs(logits) < float("inf"), order, 2147483647)
    return tl.max((order.to(tl.int64) << 32) | (2147483647 - rows).to(tl.int64), 0)


@triton.jit
def head_kernel(
    w_ptr, x_ptr, squares_ptr, keys_ptr, logits_ptr,
    OUT: tl.constexpr, IN: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_CEIL: tl.constexpr, EPS: tl.constexpr, LOGITS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_OUT logits a program; rows past OUT repeat the last one, which changes no maximum."""
    rows = tl.minimum(tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), OUT - 1)
    columns = tl.arange(0, BLOCK_K)
    w_ptr += rows.to(tl.int64)[:, None] * IN + columns[None, :]
    total = tl.zeros([BLOCK_OUT, BLOCK_K], tl.float32)
    if PDL:
        gdc_launch_dependents()
    tile = tl.load(w_ptr, mask=(columns < IN)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    for start in range(BLOCK_K, IN, BLOCK_K):
        w_ptr += BLOCK_K
        following = tl.load(w_ptr, mask=(columns + start < IN)[None, :], other=0.0, eviction_policy="evict_first")
        total += tile.to(tl.float32) * tl.load(x_ptr + columns + (start - BLOCK_K)).to(tl.float32)[None, :]
        tile = following
    last: tl.constexpr = (IN - 1) // BLOCK_K * BLOCK_K
    total += tile.to(tl.float32) * tl.load(x_ptr + columns + last, mask=columns + last < IN, other=0.0).to(tl.float32)[None, :]
    logits = tl.sum(total, 1)
    if LOGITS:
        tl.store(logits_ptr + rows, logits * root(squares_ptr, IN, BLOCKS, BLOCKS_CEIL, EPS))
    tl.atomic_max(keys_ptr + tl.program_id(0) % SLOTS, _greatest(logits, rows), sem="relaxed")


@triton.jit
def pick_kernel(
    products_ptr, squares_ptr, keys_ptr, logits_ptr,
    OUT: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_CEIL: tl.constexpr, EPS: tl.constexpr, LOGITS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK logits of a sequence a program; grid (blocks, sequences); rows past OUT repeat the last one."""
    sequence = tl.program_id(1)
    rows = tl.minimum(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), OUT - 1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logits = tl.load(products_ptr + sequence * OUT + rows)
    if LOGITS:
        r = root(squares_ptr + sequence * BLOCKS, SIZE, BLOCKS, BLOCKS_CEIL, EPS)
        tl.store(logits_ptr + sequence * OUT + rows, logits * r)
    tl.atomic_max(keys_ptr + sequence * SLOTS + tl.program_id(0) % SLOTS, _greatest(logits, rows), sem="relaxed")


@triton.jit
def advance_kernel(keys_ptr, token_ptr, position_ptr, ids_ptr, count_ptr, most, SLOTS: tl.constexpr, PDL: tl.constexpr):
    """The token of a sequence's greatest key; keys are emptied for the next step; grid (sequences,)."""
    sequence = tl.program_id(0)
    keys_ptr += sequence * SLOTS
    token_ptr += sequence
    position_ptr += sequence
    ids_ptr += sequence * most
    count_ptr += sequence
    slot = tl.arange(0, SLOTS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    keys = tl.load(keys_ptr + slot)
    key = tl.max(keys, 0)
    tl.store(keys_ptr + slot, tl.full([SLOTS], -9223372036854775808, tl.int64))
    token = 2147483647 - (key & 0xFFFFFFFF)
    broken = (key >> 32) == 2147483647
    count = tl.load(count_ptr)
    tl.store(ids_ptr + count, tl.where(broken, -1 - token, token))
    tl.store(token_ptr, token)
    tl.store(count_ptr, count + 1)
    tl.store(position_ptr, tl.load(position_ptr) + 1)


def head(
    weight: Tensor, x: Tensor, squares: Tensor, eps: float, keys: Tensor, logits: Tensor | None, block_out: int, dependent: bool
) -> None:
    """Puts the key of one sequence's greatest logit into ``keys``.

    Args:
        weight: ``[vocabulary, in]``, contiguous, any float dtype.
        x: ``[1, in]``, any float dtype, times gamma and without the norm's scalar.
        squares: float32 ``[1, blocks]``, of that norm.
        eps: Its epsilon.
        keys: int64 ``[1, SLOTS]``, all ``LOWEST``.
        logits: float32 ``[1, vocabulary]`` to write, or None.
        block_out: Rows a program.
        dependent: Programmatic dependent launch.
    """
    if not uses_kernels(x.device):
        _pick((weight.float() @ x[0].float())[None], squares, weight.shape[1], eps, keys, logits)
        return
    (out, size), blocks = weight.shape, squares.shape[1]
    block_k = min(512, triton.next_power_of_2(size))
    head_kernel[(triton.cdiv(out, block_out),)](
        weight, x, squares, keys, x if logits is None else logits,
        out, size, blocks, triton.next_power_of_2(blocks), eps, logits is not None, SLOTS, block_out, block_k, dependent,
        num_warps=max(1, min(4, block_k // 256)), launch_pdl=dependent,
    )  # fmt: skip


def pick(products: Tensor, squares: Tensor, size: int, eps: float, keys: Tensor, logits: Tensor | None, dependent: bool) -> None:
    """Puts the key of each sequence's greatest logit into ``keys``.

    Args:
        products: float32 ``[batch, vocabulary]``, contiguous: lm_head times x, without the norm's scalar.
        squares: float32 ``[batch, blocks]``, of that norm.
        size: Of the norm.
        eps: Its epsilon.
        keys: int64 ``[batch, SLOTS]``, all ``LOWEST``.
        logits: float32 ``[batch, vocabulary]`` to write, or None.
        dependent: Programmatic dependent launch.
    """
    if not uses_kernels(products.device):
        _pick(products, squares, size, eps, keys, logits)
        return
    (batch, out), blocks = products.shape, squares.shape[1]
    pick_kernel[triton.cdiv(out, _BLOCK), batch](
        products, squares, keys, products if logits is None else logits,
        out, size, blocks, triton.next_power_of_2(blocks), eps, logits is not None, SLOTS, _BLOCK, dependent, launch_pdl=dependent,
    )  # fmt: skip


def advance(keys: Tensor, token: Tensor, position: Tensor, ids: Tensor, count: Tensor, dependent: bool) -> None:
    """Ends a step.

    Args:
        keys: int64 ``[batch, SLOTS]``; emptied.
        token: int64 ``[batch]``, the next step's input; written.
        position: int32 ``[batch]``; one more.
        ids: int64 ``[batch, most]``: the token at ``count``; ``-1 - id`` where a logit was not finite.
        count: int32 ``[batch]``; one more.
        dependent: Programmatic dependent launch.
    """
    batch, most = ids.shape
    if not uses_kernels(keys.device):
        for sequence, key in enumerate(keys.max(1).values.tolist()):
            chosen = 2**31 - 1 - (key & 0xFFFFFFFF)
            ids[sequence, int(count[sequence])] = -1 - chosen if key >> 32 == _BROKEN else chosen
            token[sequence] = chosen
        keys.fill_(LOWEST)
        count.add_(1)
        position.add_(1)
        return
    advance_kernel[(batch,)](keys, token, position, ids, count, most, SLOTS, dependent, num_warps=1, launch_pdl=dependent)


def _pick(products: Tensor, squares: Tensor, size: int, eps: float, keys: Tensor, logits: Tensor | None) -> None:
    if logits is not None:
        torch.mul(products, torch.rsqrt(squares.sum(1, keepdim=True) / size + eps), out=logits)
    keys.fill_(LOWEST)
    for sequence, row in enumerate(products):
        keys[sequence, 0] = _key_of(row)


def _key_of(logits: Tensor) -> int:
    broken = (~logits.isfinite()).nonzero()
    if len(broken):
        return (_BROKEN << 32) | (2**31 - 1 - int(broken[0]))
    chosen = int(logits.argmax())
    bits = int(logits[chosen].view(torch.int32))
    return ((bits ^ 0x7FFFFFFF if bits < 0 else bits) << 32) | (2**31 - 1 - chosen)
