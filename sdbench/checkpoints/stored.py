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

    The values are picked where the weight lies: on a GPU that takes a few milliseconds, on the CPU about a second for a large matrix.
    """
    mask = torch.from_numpy(np.packbits(keep.cpu().numpy(), axis=-1, bitorder="little"))
    rows = max(1, BLOCK_ELEMENTS // weight.shape[1])
    values = [part[kept].cpu() for part, kept in zip(weight.split(rows), keep.split(rows), strict=True)]
    return StoredWeight(torch.cat(values).view(len(weight), -1), mask, torch.tensor([[n] for n in weight.shape]))


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
