"""Storage form of a pruned matrix without the kernel form in between."""

import numpy as np
import pytest
import torch

from sdbench.calibrate.magnitude import keep_mask
from sdbench.checkpoints import stored
from sdbench.packing import pack
from sdbench.pattern import Pattern


@pytest.mark.parametrize("columns", [1, 7, 8, 33, 256])
def test_bits_are_numpys(columns: int, device: torch.device) -> None:
    keep = torch.rand(5, columns, generator=torch.Generator().manual_seed(columns)) < 0.5
    want = torch.from_numpy(np.packbits(keep.numpy(), axis=-1, bitorder="little"))
    assert torch.equal(stored.little_endian(keep.to(device)).cpu(), want)


@pytest.mark.parametrize("text", ["2:4", "16:32"])
def test_the_same_as_by_way_of_the_kernel_form(text: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows at a time, and one in the end."""
    monkeypatch.setattr(stored, "BLOCK_ELEMENTS", 2 * 96)
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    keep = keep_mask(weight, Pattern.parse(text))
    found, want = stored.to_stored(weight, keep), pack(weight, keep, Pattern.parse(text)).to_stored()
    for part in ("compressed", "bitmask", "shape"):
        one, other = getattr(found, part), getattr(want, part)
        assert one.dtype == other.dtype and torch.equal(one, other.cpu()), part
    assert torch.equal(stored.to_dense(found), torch.where(keep, weight, 0).cpu())
