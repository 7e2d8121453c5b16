"""Attention of one new token over a static cache: query and key norm, rotary embedding, cache write and softmax in one kernel.

    q, k, v = r (sum over splits of sums[split]) + bias;   q, k <- rope(norm(q)), rope(norm(k))
    y = softmax(q K^T scale) V over the positions before and the new one

A program takes one key-value head, all of its query heads, and one slice of the positions; with several slices a second kernel merges them,
in a fixed order. The first tile of keys and values is on its way before the previous kernel has ended: every position but the new one was
written in an earlier step, and steps don't overlap. Queries are padded to the 16 rows that a matrix unit takes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.decode.norm import root
from sdbench.kernels.launching import uses_kernels


@dataclass(frozen=True)
class Heads:
    """Sizes of an attention layer.

    Attributes:
        query: Query heads.
        key_value: Key-value heads, a divisor of ``query``.
        size: Elements a head, a power of two, at least 32.
        scale: Factor of the scores.
    """

    query: int
    key_value: int
    size: int
    scale: float

    @property
    def rows(self) -> int:
        """Rows of the product that gives queries, keys and values, in this order."""
        return (self.query + 2 * self.key_value) * self.size


@dataclass(frozen=True, eq=False)
class Parts:
    """What a layer's attention has besides its product.

    Attributes:
        query_gamma: ``[size]`` of the query norm, or None.
        key_gamma: ``[size]`` of the key norm; None together with the other.
        bias: ``[heads.rows]``, or None.
    """

    query_gamma: Tensor | None = None
    key_gamma: Tensor | None = None
    bias: Tensor | None = None


@triton.jit
def _head(
    sums_ptr, bias_ptr, gamma_ptr, start, cos, sin, r,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Both halves ``[heads, HALF]`` of the heads whose first rows are ``start``."""
    at = start[:, None] + tl.arange(0, HALF)[None, :]
    a = tl.zeros([start.shape[0], HALF], tl.float32)
    b = tl.zeros([start.shape[0], HALF], tl.float32)
    for split in tl.static_range(SPLITS):
        a += tl.load(sums_ptr + split * ROWS + at)
        b += tl.load(sums_ptr + split * ROWS + at + HALF)
    a *= r
    b *= r
    if BIAS:
        a += tl.load(bias_ptr + at).to(tl.float32)
        b += tl.load(bias_ptr + at + HALF).to(tl.float32)
    if NORM:
        inverse = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + EPS)
        a *= inverse[:, None] * tl.load(gamma_ptr + tl.arange(0, HALF)).to(tl.float32)[None, :]
        b *= inverse[:, None] * tl.load(gamma_ptr + HALF + tl.arange(0, HALF)).to(tl.float32)[None, :]
    if ROPE:
        turned = a * cos[None, :] - b * sin[None, :]
        b = b * cos[None, :] + a * sin[None, :]
        a = turned
    return a, b


@triton.jit
def _tile(ptr, positions, end, SIZE: tl.constexpr, HALF: tl.constexpr):
    at = ptr + positions[:, None] * SIZE + tl.arange(0, HALF)[None, :]
    inside = (positions < end)[:, None]
    return tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)


@triton.jit
def _add_tile(largest, weight, o1, o2, q1, q2, k1, k2, v1, v2, inside, SCALE: tl.constexpr):
    """Online softmax over one tile of positions."""
    z = tl.dot(q1, tl.trans(k1), input_precision="ieee") + tl.dot(q2, tl.trans(k2), input_precision="ieee")
    z = tl.where(inside[None, :], z * SCALE, float("-inf"))
    new = tl.maximum(largest, tl.max(z, 1))
    # Before the first position that counts the maximum is -inf, and so is its difference from itself.
    shift = tl.where(new == float("-inf"), 0.0, new)
    fade = tl.exp(largest - shift)
    p = tl.exp(z - shift[:, None])
    weight = weight * fade + tl.sum(p, 1)
    p = p.to(v1.dtype)
    o1 = o1 * fade[:, None] + tl.dot(p, v1, input_precision="ieee")
    o2 = o2 * fade[:, None] + tl.dot(p, v2, input_precision="ieee")
    return new, weight, o1, o2


@triton.jit
def attention_kernel(
    sums_ptr, bias_ptr, squares_ptr, query_gamma_ptr, key_gamma_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, position_ptr,
    y_ptr, largest_ptr, weight_ptr, part_ptr, length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr, SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_CEIL: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (key-value heads, slices); the cache's length is no constant, so that caches of other lengths need no compilation."""
    HALF: tl.constexpr = SIZE // 2
    PER: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    kv = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    position = tl.load(position_ptr)
    cos = tl.load(cos_ptr + position * HALF + tl.arange(0, HALF))
    sin = tl.load(sin_ptr + position * HALF + tl.arange(0, HALF))
    keys_ptr += kv.to(tl.int64) * length * SIZE
    values_ptr += kv.to(tl.int64) * length * SIZE
    chunk = tl.cdiv(tl.cdiv(position, SLICES), TILE) * TILE
    first = part * chunk
    end = tl.minimum(position, first + chunk)
    at = first + tl.arange(0, TILE)
    k1, k2 = _tile(keys_ptr, at, end, SIZE, HALF)
    v1, v2 = _tile(values_ptr, at, end, SIZE, HALF)
    if PDL:
        gdc_wait()
    r = root(squares_ptr, HIDDEN, BLOCKS, BLOCKS_CEIL, EPS)
    # Rows past the group repeat its last head; their results are dropped.
    head = kv * PER + tl.minimum(tl.arange(0, GROUP), PER - 1)
    q1, q2 = _head(sums_ptr, bias_ptr, query_gamma_ptr, head * SIZE, cos, sin, r, ROWS, SPLITS, HALF, EPS, BIAS, NORM, True)
    q1 = q1.to(k1.dtype)
    q2 = q2.to(k1.dtype)
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP], tl.float32)
    o1 = tl.zeros([GROUP, HALF], tl.float32)
    o2 = tl.zeros([GROUP, HALF], tl.float32)
    # The last slice is the shortest, so that the new position is no burden on the longest.
    if part == SLICES - 1:
        own = (kv + tl.arange(0, 1)) * SIZE
        n1, n2 = _head(sums_ptr, bias_ptr, key_gamma_ptr, HEADS * SIZE + own, cos, sin, r, ROWS, SPLITS, HALF, EPS, BIAS, NORM, True)
        w1, w2 = _head(
            sums_ptr, bias_ptr, key_gamma_ptr, (HEADS + KV_HEADS) * SIZE + own, cos, sin, r, ROWS, SPLITS, HALF, EPS, BIAS, False, False
        )
        n1, n2, w1, w2 = n1.to(k1.dtype), n2.to(k1.dtype), w1.to(k1.dtype), w2.to(k1.dtype)
        here = position * SIZE + tl.arange(0, HALF)[None, :]
        tl.store(keys_ptr + here, n1)
        tl.store(keys_ptr + here + HALF, n2)
        tl.store(values_ptr + here, w1)
        tl.store(values_ptr + here + HALF, w2)
        largest = (tl.sum(q1.to(tl.float32) * n1.to(tl.float32), 1) + tl.sum(q2.to(tl.float32) * n2.to(tl.float32), 1)) * SCALE
        weight = tl.full([GROUP], 1.0, tl.float32)
        o1 += w1.to(tl.float32)
        o2 += w2.to(tl.float32)
    largest, weight, o1, o2 = _add_tile(largest, weight, o1, o2, q1, q2, k1, k2, v1, v2, at < end, SCALE)
    for start in tl.range(first + TILE, end, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        k1, k2 = _tile(keys_ptr, at, end, SIZE, HALF)
        v1, v2 = _tile(values_ptr, at, end, SIZE, HALF)
        largest, weight, o1, o2 = _add_tile(largest, weight, o1, o2, q1, q2, k1, k2, v1, v2, at < end, SCALE)
    real = tl.arange(0, GROUP) < PER
    column = tl.arange(0, HALF)[None, :]
    if SLICES == 1:
        at_y = y_ptr + head[:, None] * SIZE + column
        tl.store(at_y, o1 / weight[:, None], mask=real[:, None])
        tl.store(at_y + HALF, o2 / weight[:, None], mask=real[:, None])
    else:
        place = head * SLICES + part
        tl.store(largest_ptr + place, largest, mask=real)
        tl.store(weight_ptr + place, weight, mask=real)
        at_part = part_ptr + place[:, None] * SIZE + column
        tl.store(at_part, o1, mask=real[:, None])
        tl.store(at_part + HALF, o2, mask=real[:, None])


@triton.jit
def merge_kernel(largest_ptr, weight_ptr, part_ptr, y_ptr, SIZE: tl.constexpr, SLICES: tl.constexpr, CEIL: tl.constexpr, PDL: tl.constexpr):
    """One query head a program."""
    head = tl.program_id(0)
    part = tl.arange(0, CEIL)
    column = tl.arange(0, SIZE)
    some = part < SLICES
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    largest = tl.load(largest_ptr + head * SLICES + part, mask=some, other=float("-inf"))
    weight = tl.load(weight_ptr + head * SLICES + part, mask=some, other=0.0)
    o = tl.load(part_ptr + (head * SLICES + part)[:, None] * SIZE + column[None, :], mask=some[:, None], other=0.0)
    factor = tl.exp(largest - tl.max(largest, 0))
    tl.store(y_ptr + head * SIZE + column, tl.sum(o * factor[:, None], 0) / tl.sum(weight * factor, 0))


class Attention:
    """One layer's attention over its static cache.

    Args:
        heads: Sizes.
        parts: Norms and bias.
        keys: ``[key_value, length, size]``, the cache, in the dtype that scores are multiplied in.
        values: As ``keys``.
        cos: float32 ``[length, size / 2]``, times any attention factor.
        sin: As ``cos``.
        slices: Slices of the positions; 1 needs no second kernel.
        tile: Positions a step of a slice.
        dependent: Programmatic dependent launch.
    """

    def __init__(
        self,
        heads: Heads,
        parts: Parts,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        slices: int = 1,
        tile: int = 64,
        dependent: bool = False,
    ):
        self._heads, self._parts = heads, parts
        self.keys, self.values = keys, values
        self._cos, self._sin = cos, sin
        self._slices, self._tile, self._dependent = slices, tile, dependent
        # Three tiles of keys and values in flight where shared memory has room for them.
        self._stages = 3 if heads.size * keys.element_size() <= 256 else 2
        self._largest, self._weight = (torch.empty(heads.query, slices, device=keys.device) for _ in range(2))
        self._part = torch.empty(heads.query, slices, heads.size, device=keys.device)

    def __call__(self, sums: Tensor, squares: Tensor, hidden: int, eps: float, position: Tensor, y: Tensor) -> None:
        """Writes the position into the cache, and y.

        Args:
            sums: float32 ``[splits, heads.rows]``.
            squares: float32, of the norm before the product.
            hidden: Size of that norm.
            eps: Epsilon of all norms.
            position: int32 ``[1]``, of the new token.
            y: ``[query * size]``, any float dtype.
        """
        if not uses_kernels(y.device):
            self._reference(sums, torch.rsqrt(squares.sum() / hidden + eps), eps, int(position), y)
            return
        heads, parts, slices = self._heads, self._parts, self._slices
        normed = parts.query_gamma is not None
        attention_kernel[heads.key_value, slices](
            sums, y if parts.bias is None else parts.bias, squares,
            parts.query_gamma if normed else y, parts.key_gamma if normed else y,
            self._cos, self._sin, self.keys, self.values, position, y, self._largest, self._weight, self._part,
            self.keys.shape[1], heads.query, heads.key_value, heads.size, heads.scale, sums.shape[0],
            hidden, squares.numel(), triton.next_power_of_2(squares.numel()), eps, parts.bias is not None, normed,
            max(16, triton.next_power_of_2(heads.query // heads.key_value)), self._tile, slices, self._stages, self._dependent,
            num_warps=4, launch_pdl=self._dependent,
        )  # fmt: skip
        if slices > 1:
            merge_kernel[(heads.query,)](
                self._largest, self._weight, self._part, y, heads.size, slices, triton.next_power_of_2(slices), self._dependent,
                num_warps=4, launch_pdl=self._dependent,
            )  # fmt: skip

    def _reference(self, sums: Tensor, r: Tensor, eps: float, position: int, y: Tensor) -> None:
        heads, parts = self._heads, self._parts
        total = sums.sum(0) * r + (0.0 if parts.bias is None else parts.bias.float())
        q, k, v = total.view(-1, heads.size).split([heads.query, heads.key_value, heads.key_value])
        q, k = (self._turned(part, gamma, eps, position) for part, gamma in ((q, parts.query_gamma), (k, parts.key_gamma)))
        self.keys[:, position], self.values[:, position] = k, v
        keys, values = (cache[:, : position + 1].float() for cache in (self.keys, self.values))
        grouped = q.to(self.keys.dtype).float().view(heads.key_value, -1, heads.size)
        weights = torch.softmax(grouped @ keys.transpose(1, 2) * heads.scale, -1)
        y.copy_((weights @ values).flatten())

    def _turned(self, x: Tensor, gamma: Tensor | None, eps: float, position: int) -> Tensor:
        if gamma is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gamma.float()
        cos, sin = self._cos[position], self._sin[position]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def slices_for(longest: int, key_value: int, sm_count: int, tile: int) -> int:
    """As many slices as give no SM two programs, none shorter than two tiles at the longest context.

    Args:
        longest: Positions of the cache.
        key_value: Key-value heads.
        sm_count: Multiprocessors of the device.
        tile: Positions a step.
    """
    return max(1, min(sm_count // key_value, longest // (2 * tile)))
