"""Rows of a stack as weights of their own: every variant gives the same bits as on a copy of them, and nothing is kept twice."""

import math

import pytest
import torch

from sdbench.calibrate.magnitude import keep_mask
from sdbench.kernels import registry
from sdbench.kernels.launching import can_run
from sdbench.kernels.spmm import spmm
from sdbench.kernels.spmv import problem_of
from sdbench.packing import DTYPES, PackedWeight, pack, stack_rows
from sdbench.pattern import Pattern
from sdbench.timing import relative_error, within

ROWS = (12, 5, 16)
CASES = [
    (variant, tokens)
    for kernel in ("spmv", "spmv_partial", "spmm")
    for variant in registry.variants(kernel)
    for tokens in ((1,) if kernel != "spmm" else (2, 5))
]


def weights(pattern: Pattern, in_features: int, dtype: torch.dtype, device: torch.device) -> list[PackedWeight]:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(rows, in_features, generator=generator).to(device, dtype) for rows in ROWS]
    return [pack(matrix, keep_mask(matrix, pattern), pattern) for matrix in matrices]


@pytest.mark.parametrize("text", ["2:4", "16:32", "5:32"])
@pytest.mark.parametrize(("variant", "tokens"), CASES, ids=lambda value: getattr(value, "name", value))
def test_every_variant_takes_them(variant: registry.Variant, tokens: int, text: str, device: torch.device) -> None:
    parts = weights(Pattern.parse(text), 136 if text == "2:4" else 160, torch.bfloat16, device)
    alone = [part.clone() for part in parts]
    stack_rows(parts)
    generator = torch.Generator().manual_seed(1)
    for part, copy in zip(parts, alone, strict=True):
        described = problem_of(part, tokens)
        if can_run(variant.needs, device) or variant.constraint(described):
            continue
        x = torch.randn(tokens, part.in_features, generator=generator).to(device)
        y = [torch.full((tokens, part.out_features), math.nan, device=device) for _ in range(2)]
        if tokens == 1:
            x, y = x[0], [one[0] for one in y]
        config = variant.default(described)
        # A workspace's sums are overwritten by the next launch.
        got, want = (variant.launch(one, x, out, config).clone() for one, out in zip((part, copy), y, strict=True))
        assert part.pitch == sum(ROWS) and copy.pitch == copy.out_features
        assert torch.isfinite(got).all() and torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stack_holds_the_rows_and_they_are_views_of_it(dtype: torch.dtype, device: torch.device) -> None:
    parts = weights(Pattern(4, 8), 72, dtype, device)
    matrices, masks = [part.unpack() for part in parts], [part.keep() for part in parts]
    stack = stack_rows(parts)
    assert torch.equal(stack.unpack(), torch.cat(matrices)) and torch.equal(stack.keep(), torch.cat(masks))
    for name in ("mask_words", "values"):
        storages = {getattr(weight, name).untyped_storage().data_ptr() for weight in (stack, *parts)}
        assert len(storages) == 1
    assert stack.nbytes == sum(part.nbytes for part in parts)
    for part, matrix, mask in zip(parts, matrices, masks, strict=True):
        assert torch.equal(part.unpack(), matrix) and torch.equal(part.keep(), mask)
        stored, alone = part.to_stored(), pack(matrix, mask, Pattern(4, 8)).to_stored()
        assert torch.equal(stored.compressed, alone.compressed) and torch.equal(stored.bitmask, alone.bitmask)


def test_what_is_stacked_stays_where_it_is() -> None:
    parts = weights(Pattern(2, 4), 64, torch.float32, torch.device("cpu"))
    place = stack_rows(parts).values.data_ptr()
    again = stack_rows(parts)
    assert again.values.data_ptr() == place and again.values.is_contiguous() and again.pitch == sum(ROWS)
    # Others of the same stack, or in another order, are another stack.
    for chosen in (parts[:2], parts[::-1], [parts[0], parts[2]]):
        want = torch.cat([part.unpack() for part in chosen])
        other = stack_rows(chosen)
        assert other.pitch == other.out_features and torch.equal(other.unpack(), want)
    assert stack_rows(parts[:1]) is parts[0]


def test_a_copy_is_of_the_rows_alone() -> None:
    parts = weights(Pattern(2, 4), 32, torch.bfloat16, torch.device("cpu"))
    stack_rows(parts)
    copy = parts[1].clone()
    assert copy.pitch == ROWS[1] and copy.values.is_contiguous()
    assert copy.values.untyped_storage().nbytes() == copy.values.nbytes
    assert torch.equal(copy.unpack(), parts[1].unpack())


@pytest.mark.parametrize("name", ["tile", "expand"])
def test_rows_of_one_word_that_moved_out_of_a_stack(name: str, device: torch.device) -> None:
    """A copy keeps the strides of a dimension of one element, where the stack's mean nothing any more."""
    parts = weights(Pattern(2, 4), 32, torch.bfloat16, device)
    stack_rows(parts)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    for part, rows in zip(parts, ROWS, strict=True):
        for tensor in part.tensors:
            tensor.data = tensor.data.to("cpu", copy=True).to(device)
        assert part.pitch == rows
        y = spmm(part, x, name, out_dtype=torch.float32)
        assert within(relative_error(y, x.double() @ part.unpack().double().T), 5e-3)
