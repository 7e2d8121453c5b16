"""Packed N:M weights: the form that kernels read and the form that checkpoints store.

Kernel form (built at load, on the device). One 32-bit mask word stands for 32 columns and S = 32*N/M kept values; a lane is a row:

* ``mask_words`` int32 ``[in/32, out]``: bit b of word w set where column 32*w + b is kept;
* ``values`` ``[in/32, S/C, out, C]``: the kept values of one word in *descending* column order, C of them (at most 16 bytes) side by side.

Both may be slices along ``out`` of larger tensors, which hold the rows of several weights (:func:`stack_rows`); kernels step from a word to
the next by ``pitch``.

Storage form (safetensors), the bitmask layout of the old 2:4 checkpoints generalised to N:M: see :class:`StoredWeight`.

A width that is a multiple of M but not of 32 is padded with whole groups: their first N columns count as kept and hold 0, so that every
word has S values; kernels never read x there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from sdbench.errors import CheckFailed, SdbenchError
from sdbench.pattern import WORD, Pattern
from sdbench.words import counted

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_VECTOR_BYTES = 16
_BLOCK_ELEMENTS = 1 << 26


def chunk_length(kept_per_word: int, dtype: torch.dtype) -> int:
    """Values that lie side by side for one row: the largest power of two that divides S and fits 16 bytes.

    Args:
        kept_per_word: S, values of one mask word.
        dtype: The weight's dtype.
    """
    length = _VECTOR_BYTES // dtype.itemsize
    while kept_per_word % length:
        length //= 2
    return length


@dataclass(frozen=True)
class StoredWeight:
    """One packed weight as a checkpoint holds it.

    Attributes:
        compressed: ``[out, in*N/M]`` in the weight's dtype, kept values in ascending column order.
        bitmask: uint8 ``[out, ceil(in/8)]``, little-endian bits as ``numpy.packbits(..., bitorder="little")`` writes them.
        shape: int64 ``[2, 1]``: out_features, in_features.
    """

    compressed: Tensor
    bitmask: Tensor
    shape: Tensor


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """An N:M weight in kernel form; make one with :func:`pack` or :meth:`from_stored`.

    Attributes:
        pattern: N kept of M along in_features.
        out_features: Rows of the dense matrix.
        in_features: Columns of the dense matrix, without padding.
        mask_words: int32 ``[words, out]``, words = ceil(in/32).
        values: bf16, fp16 or fp32 ``[words, S/C, out, C]``, descending columns.
    """

    pattern: Pattern
    out_features: int
    in_features: int
    mask_words: Tensor
    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """``(out_features, in_features)`` of the dense matrix."""
        return self.out_features, self.in_features

    @property
    def words(self) -> int:
        """Mask words along a row, the padded tail included."""
        return self.mask_words.shape[0]

    @property
    def pitch(self) -> int:
        """Rows that lie in memory between a word and the next one: ``out``, or more for some of a stack's rows."""
        # Of a single word the stride means nothing, and a copy keeps the stack's.
        return self.mask_words.stride(0) if self.values.shape[1] == 1 else self.values.stride(1) // self.values.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.values.device

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """What the weight is made of."""
        return self.mask_words, self.values

    @property
    def nbytes(self) -> int:
        """Bytes of the mask and the values: what one product reads of the weight."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The same weight on another device."""
        return PackedWeight(self.pattern, *self.shape, self.mask_words.to(device), self.values.to(device))

    def clone(self) -> "PackedWeight":
        """A copy in memory of its own (cold-cache timing rotates over copies)."""
        copies = (tensor.clone(memory_format=torch.contiguous_format) for tensor in self.tensors)
        return PackedWeight(self.pattern, *self.shape, *copies)

    def keep(self) -> Tensor:
        """The stored keep mask: bool ``[out, in]``."""
        keep = torch.empty(self.shape, dtype=torch.bool, device=self.device)
        for rows in _row_blocks(*self.shape):
            keep[rows] = _rows_first(self._bits(rows))[:, : self.in_features]
        return keep

    def unpack(self) -> Tensor:
        """The dense pruned matrix ``[out, in]``, bit for bit as it was packed."""
        dense = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for rows in _row_blocks(*self.shape):
            bits = self._bits(rows)
            ascending = self.values[:, :, rows].transpose(1, 2).reshape(*bits.shape[:2], -1).flip(-1)
            tiles = torch.zeros(bits.shape, dtype=self.dtype, device=self.device).masked_scatter_(bits, ascending)
            dense[rows] = _rows_first(tiles)[:, : self.in_features]
        return dense

    @cached_property
    def columns(self) -> Tensor:
        """Column of every value, laid out as ``values``: int32; columns of the padding are clamped to 0 (their value is 0)."""
        chunks, length = self.values.shape[1], self.values.shape[3]
        columns = torch.empty(self.values.shape, dtype=torch.int32, device=self.device)
        first = torch.arange(self.words, device=self.device, dtype=torch.int32)[:, None, None] * WORD
        for rows in _row_blocks(*self.shape):
            bits = self._bits(rows)
            block = bits.nonzero()[:, 2].view(*bits.shape[:2], -1).flip(-1).int() + first
            columns[:, :, rows] = block.view(*bits.shape[:2], chunks, length).transpose(1, 2)
        return columns.masked_fill_(columns >= self.in_features, 0)

    def _bits(self, rows: slice) -> Tensor:
        """Keep bits with the padding: bool ``[words, rows, 32]``."""
        lanes = torch.arange(WORD, device=self.device, dtype=torch.int32)
        return ((self.mask_words[:, rows, None] >> lanes) & 1).bool()

    def to_stored(self) -> StoredWeight:
        """The storage form, on the CPU."""
        keep = self.keep().cpu()
        bitmask = torch.from_numpy(np.packbits(keep.numpy(), axis=-1, bitorder="little"))
        compressed = self.unpack().cpu()[keep].view(self.out_features, -1)
        return StoredWeight(compressed, bitmask, torch.tensor([[self.out_features], [self.in_features]]))

    @classmethod
    def from_stored(
        cls, stored: StoredWeight, pattern: Pattern, device: torch.device | str = "cpu", layer: str = "weight"
    ) -> "PackedWeight":
        """Builds the kernel form; the bitmask is trusted for where, never the values.

        Args:
            stored: The three tensors of the storage form.
            pattern: The pattern that the checkpoint names.
            device: Where to build.
            layer: Name for messages.

        Raises:
            CheckFailed: Sizes do not agree with one another, or the mask does not keep exactly N of every M.
        """
        out_features, in_features = (int(n) for n in stored.shape.flatten())
        wanted = {
            "bitmask": (stored.bitmask, (out_features, -(-in_features // 8))),
            "compressed": (stored.compressed, (out_features, in_features * pattern.keep // pattern.group)),
        }
        for name, (tensor, shape) in wanted.items():
            if tuple(tensor.shape) != shape:
                raise CheckFailed(f"layer {layer}: {name} is {tuple(tensor.shape)}, but shape and pattern {pattern} ask for {shape}")
        bits = np.unpackbits(stored.bitmask.cpu().numpy(), axis=-1, count=in_features, bitorder="little")
        keep = torch.from_numpy(bits).bool().to(device)
        require_exact(keep, pattern, layer)
        dense = torch.zeros(out_features, in_features, dtype=stored.compressed.dtype, device=device)
        dense.masked_scatter_(keep, stored.compressed.to(device))
        return pack(dense, keep, pattern, layer)


def stack_rows(weights: Sequence[PackedWeight]) -> PackedWeight:
    """One packed weight with the rows of several, in their order, whose tensors become views of its own: nothing is kept twice.

    What neighbours in one stack already stays where it is. A CUDA graph that was captured on the weights before must not be replayed after.

    Args:
        weights: Of one pattern, dtype, device and number of columns.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if any((w.pattern, w.in_features, w.dtype) != (first.pattern, first.in_features, first.dtype) for w in weights):
        raise SdbenchError("packed weights of different patterns, widths or dtypes cannot be stacked")
    mask_words, values = joined([w.mask_words for w in weights], 1), joined([w.values for w in weights], 2)
    return PackedWeight(first.pattern, mask_words.shape[1], first.in_features, mask_words, values)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """One tensor of which the parts become consecutive slices along ``dim``: the one of which they are such slices already, else a new one.

    Args:
        parts: Alike but for their size along ``dim``; of a new one they take the memory.
        dim: Where they follow one another.

    Returns:
        The shape of a part, with the sum of their sizes along ``dim``.
    """
    first, sizes = parts[0], [part.shape[dim] for part in parts]
    shape = [*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :]]
    strides = torch.empty(shape, device="meta").stride()
    starts = [first.data_ptr() + place * strides[dim] * first.itemsize for place in accumulate(sizes, initial=0)]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(storages) == 1 and all(
        part.stride() == strides and part.data_ptr() == start for part, start in zip(parts, starts[:-1], strict=True)
    ):
        return first.as_strided(shape, strides)
    whole = torch.cat(list(parts), dim)
    for part, rows in zip(parts, whole.split(sizes, dim), strict=True):
        part.data = rows
    return whole


def pack(weight: Tensor, keep: Tensor, pattern: Pattern, layer: str = "weight") -> PackedWeight:
    """Packs a weight under a keep mask; values outside the mask are dropped whatever they are.

    Args:
        weight: ``[out, in]``, bf16, fp16 or fp32. A kept weight may be 0.0.
        keep: bool ``[out, in]``, exactly N true in every group of M.
        pattern: N kept of M.
        layer: Name for messages.

    Returns:
        The kernel form, on the weight's device.

    Raises:
        UsageError: ``in`` is not a multiple of M.
        CheckFailed: The mask does not keep exactly N of every M.
        SdbenchError: Another dtype or shape, or a kept weight that is NaN or Inf.
    """
    if weight.dim() != 2 or keep.shape != weight.shape or keep.dtype != torch.bool:
        raise SdbenchError(
            f"layer {layer}: pack needs a 2-D weight and a bool mask of its shape, "
            f"not {tuple(weight.shape)} and {keep.dtype} {tuple(keep.shape)}"
        )
    if weight.dtype not in DTYPES:
        raise SdbenchError(f"layer {layer}: dtype {weight.dtype} has no packed form; use bf16, fp16 or fp32")
    out_features, in_features = weight.shape
    pattern.require_width(in_features, layer)
    require_exact(keep, pattern, layer)
    require_finite(torch.where(keep, weight, 0), layer, "weight", "the checkpoint is damaged; download or convert it again")

    kept = pattern.kept_per_word
    words, length = -(-in_features // WORD), chunk_length(pattern.kept_per_word, weight.dtype)
    mask_words = torch.empty(words, out_features, dtype=torch.int32, device=weight.device)
    values = torch.empty(words, kept // length, out_features, length, dtype=weight.dtype, device=weight.device)
    for rows in _row_blocks(out_features, in_features):
        mask_words[:, rows], ascending = _pack_rows(weight[rows], keep[rows], pattern)
        values[:, :, rows] = ascending.flip(-1).view(words, -1, kept // length, length).transpose(1, 2)
    return PackedWeight(pattern, out_features, in_features, mask_words, values)


def _pack_rows(weight: Tensor, keep: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Mask words int32 ``[words, rows]`` and kept values in ascending column order ``[words, rows, S]``, padding included."""
    rows, in_features = weight.shape
    padding = -in_features % WORD
    if padding:
        group = (torch.arange(pattern.group, device=keep.device) < pattern.keep).repeat(padding // pattern.group)
        keep = torch.cat([keep, group.expand(rows, -1)], 1)
        weight = torch.cat([weight, weight.new_zeros(rows, padding)], 1)
    words = weight.shape[1] // WORD
    bits = keep.view(rows, words, WORD).transpose(0, 1)
    lanes = torch.arange(WORD, device=keep.device, dtype=torch.int64)
    # Summed as int64 and wrapped by the narrowing cast, since bit 31 is the sign of an int32.
    mask_words = (bits.long() << lanes).sum(-1).to(torch.int32)
    return mask_words, weight.view(rows, words, WORD).transpose(0, 1)[bits].view(words, rows, pattern.kept_per_word)


def _row_blocks(out_features: int, in_features: int) -> Iterator[slice]:
    """Slices of rows that bound the working memory of packing, and the element counts that index operations can take."""
    step = max(1, _BLOCK_ELEMENTS // in_features)
    return (slice(start, min(start + step, out_features)) for start in range(0, out_features, step))


def require_exact(keep: Tensor, pattern: Pattern, layer: str = "weight") -> None:
    """Refuses a mask that does not keep exactly N of every M.

    Args:
        keep: bool ``[out, in]``, in a multiple of M.
        pattern: N kept of M.
        layer: Name for the message.

    Raises:
        UsageError: The width is not a multiple of M.
        CheckFailed: Names the first group that is wrong.
    """
    pattern.require_width(keep.shape[1], layer)
    counts = keep.view(keep.shape[0], -1, pattern.group).sum(-1)
    wrong = counts != pattern.keep
    if wrong.any():
        row, group = (int(n) for n in wrong.nonzero()[0])
        raise CheckFailed(
            f"layer {layer}: row {row}, columns {group * pattern.group} to {(group + 1) * pattern.group - 1} keep "
            f"{int(counts[row, group])} weights, pattern {pattern} keeps exactly {pattern.keep} ({counted(int(wrong.sum()), 'such group')})"
        )


def require_finite(values: Tensor, layer: str, what: str, hint: str) -> None:
    """Refuses NaN and Inf, naming the first one.

    Args:
        values: Any shape and floating dtype.
        layer: Layer name for the message.
        what: What the tensor is: ``"weight"``, ``"sum_sq"``.
        hint: What the user can do about it.

    Raises:
        SdbenchError: A value is NaN or Inf.
    """
    finite = values.isfinite()
    if bool(finite.all()):
        return
    index = (~finite).nonzero()[0].tolist()
    raise SdbenchError(f"layer {layer}: {what}{index} is {values[tuple(index)].item()}; {hint}")


def _rows_first(tiles: Tensor) -> Tensor:
    """``[words, out, 32]`` -> ``[out, words*32]``."""
    return tiles.transpose(0, 1).reshape(tiles.shape[1], -1)
