"""Attention of one new token a sequence over a static cache: query and key norm, rotary embedding, cache write, softmax in one kernel.

    q, k, v = r (sum over splits of sums[split]) + bias;   q, k <- rope(norm(q)), rope(norm(k))
    y = softmax(q K^T scale) V over the positions before and the new one

A program takes one key-value head, all of its query heads, and one slice of the positions; with several slices a second kernel merges them,
in a fixed order. The first tile of keys and values is on its way before the previous kernel has ended: every position but the new one was
written in an earlier step, and steps don't overlap. Queries are repeated to fill the rows that a matrix unit takes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.decode.norm import root
from sdbench.kernels.launching import uses_kernels

_MATRIX_ROWS = 16
"""Fewest rows that a matrix unit takes."""

_WARPS = 4


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
def _halves(ptr, at, HALF: tl.constexpr, SOME: tl.constexpr):
    """Both halves of a head's parameters as float32; zeros where the model has none."""
    if SOME:
        a, b = tl.load(ptr + at).to(tl.float32), tl.load(ptr + at + HALF).to(tl.float32)
    else:
        a, b = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
    return a, b


@triton.jit
def _summed(sums_ptr, at, some, STRIDE: tl.constexpr, SPLITS: tl.constexpr, HALF: tl.constexpr):
    """Both halves of heads, their splits added in order."""
    a = tl.load(sums_ptr + at, mask=some, other=0.0)
    b = tl.load(sums_ptr + at + HALF, mask=some, other=0.0)
    for split in tl.static_range(1, SPLITS):
        a += tl.load(sums_ptr + split * STRIDE + at, mask=some, other=0.0)
        b += tl.load(sums_ptr + split * STRIDE + at + HALF, mask=some, other=0.0)
    return a, b


@triton.jit
def _turned(a, b, gamma_a, gamma_b, cos, sin, HALF: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr):
    """The norm over each head, if there is one, and the rotary embedding."""
    if NORM:
        inverse = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + EPS)
        a *= inverse[:, None] * gamma_a
        b *= inverse[:, None] * gamma_b
    return a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :]


@triton.jit
def _rows(x, GROUP: tl.constexpr):
    """As many rows as a matrix unit takes, each one repeated."""
    HEADS: tl.constexpr = x.shape[0]
    repeated = tl.broadcast_to(tl.expand_dims(x, 1), [HEADS, GROUP // HEADS, x.shape[1]])
    return tl.reshape(repeated, [GROUP, x.shape[1]])


@triton.jit
def _tile(ptr, positions, end, SIZE: tl.constexpr, HALF: tl.constexpr):
    """Both halves of keys or values at positions before ``end``, zeros elsewhere."""
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
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr, SPLITS: tl.constexpr, BATCH: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_CEIL: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    PER_CEIL: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SLICES: tl.constexpr, SHORT: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (key-value heads, slices, sequences); the cache's length is no constant, so that caches of other lengths need no compilation.

    SHORT: a slice is one tile at any position.
    """
    HALF: tl.constexpr = SIZE // 2
    PER: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    REPEATS: tl.constexpr = GROUP // PER_CEIL
    kv = tl.program_id(0)
    part = tl.program_id(1)
    if BATCH > 1:
        sequence = tl.program_id(2)
        sums_ptr += sequence * ROWS
        squares_ptr += sequence * BLOCKS
        position_ptr += sequence
        keys_ptr += sequence.to(tl.int64) * KV_HEADS * length * SIZE
        values_ptr += sequence.to(tl.int64) * KV_HEADS * length * SIZE
        y_ptr += sequence * HEADS * SIZE
        largest_ptr += sequence * HEADS * SLICES
        weight_ptr += sequence * HEADS * SLICES
        part_ptr += sequence * HEADS * SLICES * SIZE
    if PDL:
        gdc_launch_dependents()
    position = tl.load(position_ptr)
    half = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + position * HALF + half)
    sin = tl.load(sin_ptr + position * HALF + half)
    keys_ptr += kv.to(tl.int64) * length * SIZE
    values_ptr += kv.to(tl.int64) * length * SIZE
    if SHORT:
        chunk = TILE
    else:
        chunk = tl.cdiv(tl.cdiv(position, SLICES), TILE) * TILE
    first = part * chunk
    end = tl.minimum(position, first + chunk)
    at = first + tl.arange(0, TILE)
    # The tiles of a short cache lie where they lie: they are asked for before the position is known.
    known = length if SHORT else end
    k1, k2 = _tile(keys_ptr, at, known, SIZE, HALF)
    v1, v2 = _tile(values_ptr, at, known, SIZE, HALF)
    head = kv * PER + tl.minimum(tl.arange(0, PER_CEIL), PER - 1)
    at_q = (head * SIZE)[:, None] + half[None, :]
    at_n = ((HEADS + kv) * SIZE + half)[None, :]
    at_w = at_n + KV_HEADS * SIZE
    gamma_q1, gamma_q2 = _halves(query_gamma_ptr, half[None, :], HALF, NORM)
    gamma_n1, gamma_n2 = _halves(key_gamma_ptr, half[None, :], HALF, NORM)
    bias_q1, bias_q2 = _halves(bias_ptr, at_q, HALF, BIAS)
    bias_n1, bias_n2 = _halves(bias_ptr, at_n, HALF, BIAS)
    bias_w1, bias_w2 = _halves(bias_ptr, at_w, HALF, BIAS)
    # The last slice is the shortest, so that the new position is no burden on the longest.
    newest = part == SLICES - 1
    # The same as a block, which is what the interpreter takes as a mask.
    own = at_n * 0 + part == SLICES - 1
    if PDL:
        gdc_wait()
    # All that the kernel before wrote is asked for at once: what follows waits for memory one time.
    q1, q2 = _summed(sums_ptr, at_q, at_q >= 0, BATCH * ROWS, SPLITS, HALF)
    n1, n2 = _summed(sums_ptr, at_n, own, BATCH * ROWS, SPLITS, HALF)
    w1, w2 = _summed(sums_ptr, at_w, own, BATCH * ROWS, SPLITS, HALF)
    r = root(squares_ptr, HIDDEN, BLOCKS, BLOCKS_CEIL, EPS)
    q1, q2 = _turned(q1 * r + bias_q1, q2 * r + bias_q2, gamma_q1, gamma_q2, cos, sin, HALF, EPS, NORM)
    q1, q2 = _rows(q1.to(k1.dtype), GROUP), _rows(q2.to(k1.dtype), GROUP)
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP], tl.float32)
    o1 = tl.zeros([GROUP, HALF], tl.float32)
    o2 = tl.zeros([GROUP, HALF], tl.float32)
    if newest:
        key1, key2 = _turned(n1 * r + bias_n1, n2 * r + bias_n2, gamma_n1, gamma_n2, cos, sin, HALF, EPS, NORM)
        key1, key2 = key1.to(k1.dtype), key2.to(k1.dtype)
        value1, value2 = (w1 * r + bias_w1).to(k1.dtype), (w2 * r + bias_w2).to(k1.dtype)
        here = position * SIZE + half[None, :]
        tl.store(keys_ptr + here, key1)
        tl.store(keys_ptr + here + HALF, key2)
        tl.store(values_ptr + here, value1)
        tl.store(values_ptr + here + HALF, value2)
        z = tl.sum(q1.to(tl.float32) * key1.to(tl.float32), 1) + tl.sum(q2.to(tl.float32) * key2.to(tl.float32), 1)
        largest = z * SCALE
        weight = tl.full([GROUP], 1.0, tl.float32)
        o1 += value1.to(tl.float32)
        o2 += value2.to(tl.float32)
    if SHORT:
        # What an earlier reply left behind may be no number, and that times 0 is none either.
        v1 = tl.where((at < end)[:, None], v1, 0.0)
        v2 = tl.where((at < end)[:, None], v2, 0.0)
    largest, weight, o1, o2 = _add_tile(largest, weight, o1, o2, q1, q2, k1, k2, v1, v2, at < end, SCALE)
    if not SHORT:
        for start in tl.range(first + TILE, end, TILE, num_stages=STAGES):
            at = start + tl.arange(0, TILE)
            k1, k2 = _tile(keys_ptr, at, end, SIZE, HALF)
            v1, v2 = _tile(values_ptr, at, end, SIZE, HALF)
            largest, weight, o1, o2 = _add_tile(largest, weight, o1, o2, q1, q2, k1, k2, v1, v2, at < end, SCALE)
    row = tl.arange(0, GROUP)
    # One of the rows that repeat a head; the heads that fill PER up to a power of two are none.
    real = (row % REPEATS == 0) & (row // REPEATS < PER)
    out = kv * PER + row // REPEATS
    column = half[None, :]
    if SLICES == 1:
        at_y = y_ptr + out[:, None] * SIZE + column
        tl.store(at_y, o1 / weight[:, None], mask=real[:, None])
        tl.store(at_y + HALF, o2 / weight[:, None], mask=real[:, None])
    else:
        place = out * SLICES + part
        tl.store(largest_ptr + place, largest, mask=real)
        tl.store(weight_ptr + place, weight, mask=real)
        at_part = part_ptr + place[:, None] * SIZE + column
        tl.store(at_part, o1, mask=real[:, None])
        tl.store(at_part + HALF, o2, mask=real[:, None])


@triton.jit
def merge_kernel(largest_ptr, weight_ptr, part_ptr, y_ptr, SIZE: tl.constexpr, SLICES: tl.constexpr, CEIL: tl.constexpr, PDL: tl.constexpr):
    """One query head of a sequence a program."""
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
        keys: ``[batch, key_value, length, size]``, the cache, in the dtype that scores are multiplied in.
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
        self._short = slices * tile >= keys.shape[2]
        # Three tiles of keys and values in flight where shared memory has room for them.
        self._stages = 3 if heads.size * keys.element_size() <= 256 else 2
        batch = len(keys)
        self._largest, self._weight = (torch.empty(batch, heads.query, slices, device=keys.device) for _ in range(2))
        self._part = torch.empty(batch, heads.query, slices, heads.size, device=keys.device)

    def __call__(self, sums: Tensor, squares: Tensor, hidden: int, eps: float, position: Tensor, y: Tensor) -> None:
        """Writes each sequence's position into the cache, and y.

        Args:
            sums: float32 ``[splits, batch, heads.rows]``.
            squares: float32 ``[batch, blocks]``, of the norm before the product.
            hidden: Size of that norm.
            eps: Epsilon of all norms.
            position: int32 ``[batch]``, of the new tokens.
            y: ``[batch, query * size]``, any float dtype.
        """
        if not uses_kernels(y.device):
            total = sums.sum(0) * torch.rsqrt(squares.sum(1, keepdim=True) / hidden + eps)
            for sequence, place in enumerate(position.tolist()):
                self._reference(total[sequence], eps, self.keys[sequence], self.values[sequence], place, y[sequence])
            return
        heads, parts, slices = self._heads, self._parts, self._slices
        normed = parts.query_gamma is not None
        per = triton.next_power_of_2(heads.query // heads.key_value)
        batch, blocks = squares.shape
        attention_kernel[heads.key_value, slices, batch](
            sums, y if parts.bias is None else parts.bias, squares,
            parts.query_gamma if normed else y, parts.key_gamma if normed else y,
            self._cos, self._sin, self.keys, self.values, position, y, self._largest, self._weight, self._part,
            self.keys.shape[2], heads.query, heads.key_value, heads.size, heads.scale, sums.shape[0], batch,
            hidden, blocks, triton.next_power_of_2(blocks), eps, parts.bias is not None, normed,
            per, max(_MATRIX_ROWS, per), self._tile, slices, self._short, self._stages, self._dependent,
            num_warps=_WARPS, launch_pdl=self._dependent,
        )  # fmt: skip
        if slices > 1:
            merge_kernel[(batch * heads.query,)](
                self._largest, self._weight, self._part, y, heads.size, slices, triton.next_power_of_2(slices), self._dependent,
                num_warps=4, launch_pdl=self._dependent,
            )  # fmt: skip

    def _reference(self, total: Tensor, eps: float, keys: Tensor, values: Tensor, position: int, y: Tensor) -> None:
        """One sequence's, from its sums ``[heads.rows]`` and its cache."""
        heads, parts = self._heads, self._parts
        if parts.bias is not None:
            total = total + parts.bias.float()
        q, k, v = total.view(-1, heads.size).split([heads.query, heads.key_value, heads.key_value])
        q, k = (self._turned(part, gamma, eps, position) for part, gamma in ((q, parts.query_gamma), (k, parts.key_gamma)))
        keys[:, position], values[:, position] = k, v
        keys, values = (cache[:, : position + 1].float() for cache in (keys, values))
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
    """As many slices as give an SM two programs at most, and none less than a tile at the longest context.

    Args:
        longest: Positions of the cache.
        key_value: Key-value heads, of all sequences together.
        sm_count: Multiprocessors of the device.
        tile: Positions a step.
    """
    return max(1, min(2 * sm_count // key_value, -(-longest // tile)))
