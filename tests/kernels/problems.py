"""Pruned matrices that the tests of several kernels multiply."""

import torch

from sdbench.calibrate.magnitude import keep_mask
from sdbench.packing import PackedWeight, pack
from sdbench.pattern import Pattern


def problem(
    out_features: int, in_features: int, pattern: Pattern, dtype: torch.dtype, device: torch.device
) -> tuple[PackedWeight, torch.Tensor]:
    """Random weights at a pattern, packed and as a dense matrix with zeros; of one size always the same."""
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(device, dtype)
    keep = keep_mask(weight, pattern)
    return pack(weight, keep, pattern), torch.where(keep, weight, 0)
