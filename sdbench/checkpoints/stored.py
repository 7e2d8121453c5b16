"""Between a dense matrix with its mask and the storage form, without the kernel form in between."""

import numpy as np
import torch
from torch import Tensor

from sdbench.errors import CheckFailed
from sdbench.packing import StoredWeight

BLOCK_ELEMENTS = 1 << 26
"""Elements that are picked from at a time: their positions take 16 bytes each, and no GPU lists more than 2^31."""


def to_stored(weight: Tensor, keep: Tensor) -> StoredWeight:
    """The storage form, on the CPU, of a dense weight [out, in] under a mask with equally many columns in every row.

    Values are picked and bits put together where the weight lies: a GPU takes a few milliseconds for it, and a bit is an eighth of the bool
    that would cross to the CPU.
    """
    values = torch.empty(len(weight), int(keep[0].count_nonzero()), dtype=weight.dtype)
    rows = max(1, BLOCK_ELEMENTS // weight.shape[1])
    for place, part, kept in zip(values.split(rows), weight.split(rows), keep.split(rows), strict=True):
        place.copy_(part[kept].view(place.shape))
    mask = little_endian(keep).cpu() if keep.is_cuda else torch.from_numpy(np.packbits(keep.numpy(), axis=-1, bitorder="little"))
    return StoredWeight(values, mask, torch.tensor([[n] for n in weight.shape]))


def little_endian(keep: Tensor) -> Tensor:
    """What ``numpy.packbits(keep, axis=-1, bitorder="little")`` gives, on any device: uint8 ``[rows, ceil(columns / 8)]``."""
    bytewise = torch.nn.functional.pad(keep, (0, -keep.shape[1] % 8)).view(len(keep), -1, 8)
    return (bytewise * torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=keep.device)).sum(-1, dtype=torch.uint8)


def to_dense(stored: StoredWeight, layer: str = "weight") -> Tensor:
    """The dense matrix [out, in] with its zeros, where the values lie.

    Raises:
        CheckFailed: The mask marks more or fewer values than there are.
    """
    out_features, in_features = (int(n) for n in stored.shape.flatten())
    bits = np.unpackbits(stored.bitmask.cpu().numpy(), axis=-1, count=in_features, bitorder="little").view(np.bool_)
    marked = int(np.count_nonzero(bits))
    if marked != stored.compressed.numel() or len(bits) != out_features:
        raise CheckFailed(f"layer {layer}: {stored.compressed.numel()} values are stored, but the mask marks {marked}")
    dense = torch.zeros(out_features, in_features, dtype=stored.compressed.dtype, device=stored.compressed.device)
    return dense.masked_scatter_(torch.from_numpy(bits).to(dense.device), stored.compressed)
