import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdbench.errors import CheckFailed, SdbenchError, UsageError
from sdbench.packing import DTYPES, PackedWeight, pack
from sdbench.pattern import GROUPS, Pattern

PATTERNS = st.sampled_from(GROUPS).flatmap(lambda group: st.builds(Pattern, st.integers(1, group - 1), st.just(group)))


def random_weight(
    out_features: int, in_features: int, pattern: Pattern, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    scores = torch.rand(out_features, in_features // pattern.group, pattern.group, generator=generator)
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(pattern.keep, -1).indices, True)
    return weight, keep.view(out_features, in_features)


@given(PATTERNS, st.integers(1, 40), st.integers(1, 5), st.sampled_from(DTYPES), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_round_trips_are_exact(pattern: Pattern, out_features: int, groups: int, dtype: torch.dtype, seed: int) -> None:
    weight, keep = random_weight(out_features, groups * pattern.group, pattern, dtype, seed)
    pruned = torch.where(keep, weight, 0)
    packed = pack(weight, keep, pattern)
    assert torch.equal(packed.unpack(), pruned)
    assert torch.equal(packed.keep(), keep)
    again = PackedWeight.from_stored(packed.to_stored(), pattern)
    assert torch.equal(again.mask_words, packed.mask_words)
    assert torch.equal(again.values, packed.values)


def test_a_kept_weight_may_be_zero() -> None:
    weight = torch.tensor([[0.0, 0.0, 5.0, 7.0]])
    keep = torch.tensor([[True, False, True, False]])
    packed = pack(weight, keep, Pattern(2, 4))
    assert torch.equal(packed.keep(), keep)
    assert packed.unpack().tolist() == [[0.0, 0.0, 5.0, 0.0]]


def test_storage_form_is_the_bitmask_layout() -> None:
    weight = torch.arange(1.0, 17.0, dtype=torch.bfloat16).view(2, 8)
    keep = torch.tensor([[1, 1, 0, 0, 0, 1, 0, 1], [0, 0, 1, 1, 1, 0, 1, 0]]).bool()
    stored = pack(weight, keep, Pattern(2, 4)).to_stored()
    assert stored.compressed.tolist() == [[1, 2, 6, 8], [11, 12, 13, 15]]
    assert stored.compressed.dtype == torch.bfloat16
    assert stored.bitmask.tolist() == [[0b10100011], [0b01011100]]
    assert np.array_equal(stored.bitmask.numpy(), np.packbits(keep.numpy(), axis=-1, bitorder="little"))
    assert stored.shape.tolist() == [[2], [8]]


def test_kernel_form_by_hand() -> None:
    """Bit b of a word is column b, values run from the highest kept column down, the padding keeps N per group and holds 0."""
    keep = torch.tensor([[1, 0, 0, 1]]).bool()
    packed = pack(torch.tensor([[2.0, 3.0, 4.0, 5.0]], dtype=torch.bfloat16), keep, Pattern(2, 4))
    assert packed.mask_words.shape == (1, 1)
    assert packed.mask_words.item() & 0xFFFFFFFF == 0b0011_0011_0011_0011_0011_0011_0011_1001
    assert packed.values.shape == (1, 2, 1, 8)
    assert packed.values.flatten().tolist() == [0.0] * 14 + [5.0, 2.0]
    assert packed.columns.flatten().tolist() == [0] * 14 + [3, 0]


@pytest.mark.parametrize(("text", "bits"), [("2:4", 9.0), ("16:32", 9.0), ("1:4", 5.0), ("3:4", 13.0), ("1:8", 3.0)])
def test_bytes_are_values_and_one_bit_a_weight(text: str, bits: float) -> None:
    """2:4 in bf16 is 9 bits a weight, 0.5625 of dense."""
    pattern = Pattern.parse(text)
    weight, keep = random_weight(64, 128, pattern, torch.bfloat16, 0)
    assert pack(weight, keep, pattern).nbytes * 8 / weight.numel() == bits


def test_refuses_a_mask_that_is_not_exact() -> None:
    weight = torch.ones(2, 8)
    keep = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0, 0, 0]]).bool()
    with pytest.raises(CheckFailed, match=r"k_proj: row 1, columns 4 to 7 keep 1"):
        pack(weight, keep, Pattern(2, 4), "k_proj")


def test_refuses_widths_and_values_that_have_no_packed_form() -> None:
    """CASES 6 and 12."""
    with pytest.raises(UsageError, match=r"v_proj.*10.*M=4"):
        pack(torch.ones(1, 10), torch.ones(1, 10).bool(), Pattern(2, 4), "v_proj")
    keep = torch.tensor([[1, 1, 0, 0]]).bool()
    with pytest.raises(SdbenchError, match=r"v_proj.*\[0, 0\].*nan"):
        pack(torch.tensor([[float("nan"), 1, 2, 3]]), keep, Pattern(2, 4), "v_proj")
    with pytest.raises(SdbenchError, match="int32"):
        pack(torch.ones(1, 4, dtype=torch.int32), keep, Pattern(2, 4))
    # A NaN that is pruned away is gone.
    assert pack(torch.tensor([[0.0, 1, float("nan"), 3]]), keep, Pattern(2, 4)).unpack().isfinite().all()


def test_damaged_storage_is_refused() -> None:
    weight, keep = random_weight(4, 16, Pattern(2, 4), torch.float16, 1)
    stored = pack(weight, keep, Pattern(2, 4)).to_stored()
    with pytest.raises(CheckFailed, match="compressed"):
        PackedWeight.from_stored(stored, Pattern(1, 4))
    stored.bitmask[2, 1] = 255
    with pytest.raises(CheckFailed, match="row 2, columns 8 to 11 keep 4"):
        PackedWeight.from_stored(stored, Pattern(2, 4))
