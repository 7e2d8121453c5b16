"""Every registered SpMV and dense variant against the float64 product: on a GPU where there is one, else in Triton's interpreter."""

import math

import pytest
import torch

from sdbench.calibrate.magnitude import keep_mask
from sdbench.errors import SdbenchError, UsageError
from sdbench.kernels import registry
from sdbench.kernels.launching import can_run
from sdbench.kernels.spmv import auto_variant, problem_of, spmv
from sdbench.packing import PackedWeight, pack
from sdbench.pattern import Pattern
from sdbench.timing import relative_error, within

from .problems import problem

VARIANTS = [variant.name for variant in registry.variants("spmv")]
TRITON = [name for name in VARIANTS if name != "reference"]


def poisoned(in_features: int, device: torch.device) -> torch.Tensor:
    """x as a slice whose memory on both sides holds NaN."""
    memory = torch.full((in_features + 128,), math.nan, device=device)
    memory[64 : 64 + in_features] = torch.randn(in_features, generator=torch.Generator().manual_seed(in_features)).to(device)
    return memory[64 : 64 + in_features]


def refuses(name: str, packed: PackedWeight) -> bool:
    variant = registry.find("spmv", name)
    return bool(can_run(variant.needs, packed.device) or variant.constraint(problem_of(packed)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (7, 40), (33, 96)])
def test_odd_shapes_and_x_beside_nan(variant: str, out_features: int, in_features: int, device: torch.device) -> None:
    """CASES 11: widths that are no multiple of 32, few and odd rows, NaN behind x."""
    packed, pruned = problem(out_features, in_features, Pattern(2, 4), torch.bfloat16, device)
    x = poisoned(in_features, device)
    y = spmv(packed, x, variant)
    assert within(relative_error(y, pruned.double() @ x.double()), 1e-5)


@pytest.mark.parametrize("text", ["1:4", "3:4", "3:8", "16:32", "5:32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_patterns(variant: str, text: str, device: torch.device) -> None:
    pattern = Pattern.parse(text)
    packed, pruned = problem(9, 64, pattern, torch.bfloat16, device)
    x = poisoned(64, device)
    if refuses(variant, packed):
        with pytest.raises(SdbenchError, match=variant):
            spmv(packed, x, variant)
        return
    assert within(relative_error(spmv(packed, x, variant), pruned.double() @ x.double()), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dtypes(variant: str, dtype: torch.dtype, device: torch.device) -> None:
    packed, pruned = problem(5, 64, Pattern(2, 4), dtype, device)
    x = poisoned(64, device)
    if not refuses(variant, packed):
        assert within(relative_error(spmv(packed, x, variant), pruned.double() @ x.double()), 1e-5)


@pytest.mark.parametrize("variant", TRITON)
@pytest.mark.parametrize(
    "config",
    [
        {"block_out": 16, "block_words": 2, "splits": 3, "depth": 1, "pdl": 0},
        {"block_out": 32, "block_words": 4, "splits": 1, "depth": 2, "pdl": 0},
        {"block_out": 4, "block_words": 4, "splits": 2, "depth": 2, "pdl": 0},
        {"block_out": 4, "block_words": 8, "splits": 2, "depth": 1, "pdl": 0},
    ],
)
def test_configs_leave_nothing_behind(variant: str, config: dict[str, int], device: torch.device) -> None:
    """CASES 8: the first and the second call of each config equal the reference, and repeats are bit-equal (split sums in fixed order)."""
    packed, pruned = problem(20, 192, Pattern(2, 4), torch.bfloat16, device)
    x = poisoned(192, device)
    first, second = spmv(packed, x, variant, config), spmv(packed, x, variant, config)
    assert within(relative_error(first, pruned.double() @ x.double()), 1e-5)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("text", "splits", "block_words", "depth"),
    [("2:4", 1, 4, 1), ("2:4", 1, 4, 2), ("2:4", 2, 4, 2), ("2:4", 2, 8, 2), ("1:4", 2, 4, 1), ("3:4", 1, 8, 2), ("16:32", 1, 4, 2)],
)
def test_tails_of_a_split(text: str, splits: int, block_words: int, depth: int, device: torch.device) -> None:
    """CASES 11: a last step that is too long for its split, with x at column 0 not finite where no row keeps it."""
    pattern = Pattern.parse(text)
    weight = torch.randn(8, 32 * 10, generator=torch.Generator().manual_seed(0)).to(device).bfloat16()
    weight[:, 0] = 1e-30
    keep = keep_mask(weight, pattern)
    assert not keep[:, 0].any()
    x = torch.randn(320, generator=torch.Generator().manual_seed(1)).to(device)
    want = torch.where(keep, weight, 0).double() @ x.double()
    x[0] = math.inf
    packed = pack(weight, keep, pattern)
    for name in ("lane_row", "lane_row_nibble"):
        if not refuses(name, packed):
            chosen = {"block_out": 8, "block_words": block_words, "splits": splits, "depth": depth, "pdl": 0}
            assert within(relative_error(spmv(packed, x, name, chosen), want), 1e-5)


@pytest.mark.parametrize("splits", [1, 3])
def test_partial_sums_add_up(splits: int, device: torch.device) -> None:
    packed, pruned = problem(20, 192, Pattern(2, 4), torch.bfloat16, device)
    x = poisoned(192, device)
    for variant in registry.variants("spmv_partial"):
        config = {**variant.default(problem_of(packed)), "splits": splits}
        sums = variant.launch(packed, x, torch.empty(20, device=device), config)
        assert sums.shape == (splits, 20)
        per_split = 192 // splits
        for split, part in enumerate(sums):
            columns = slice(split * per_split, (split + 1) * per_split)
            assert within(relative_error(part, pruned[:, columns].double() @ x[columns].double()), 1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_products_by_hand(variant: str, device: torch.device) -> None:
    """CASES 7: bf16 [1, 2, 3, 4] . [1, -1, 2, .5] is 7.0, in Triton's interpreter too."""
    keep = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 0]]).bool()
    weight = torch.tensor([[1.0, 2, 9, 9, 3, 4, 9, 9]]).bfloat16()
    x = torch.tensor([1.0, -1, 9, 9, 2, 0.5, 9, 9]).bfloat16()
    assert spmv(pack(weight, keep, Pattern(2, 4)).to(device), x.to(device), variant, out_dtype=torch.float32).item() == 7.0


@pytest.mark.parametrize("variant", [v for v in registry.variants("dense") if v.serves(1)], ids=lambda variant: variant.name)
def test_dense_variants(variant: registry.Variant, device: torch.device) -> None:
    """CASES 7 and 11 for the dense baselines."""
    weight, x = torch.tensor([[1.0, 2, 3, 4]], device=device), torch.tensor([1.0, -1, 2, 0.5], device=device)
    described = registry.Problem(1, 4, torch.float32, None, 1)
    y = torch.full((1,), math.nan, device=device)
    assert variant.launch(weight, x, y, variant.default(described)).item() == 7.0
    weight, x = torch.randn(33, 96, generator=torch.Generator().manual_seed(0)).to(device), poisoned(96, device)
    described = registry.Problem(33, 96, torch.float32, None, 1)
    y = torch.full((33,), math.nan, device=device)
    assert within(relative_error(variant.launch(weight, x, y, variant.default(described)), weight.double() @ x.double()), 1e-5)


def test_y_takes_the_dtype_and_the_leading_dimensions_of_x(device: torch.device) -> None:
    packed, pruned = problem(6, 32, Pattern(2, 4), torch.bfloat16, device)
    x = torch.randn(1, 1, 32, device=device).bfloat16()
    y = spmv(packed, x)
    assert y.shape == (1, 1, 6)
    assert y.dtype == torch.bfloat16
    assert within(relative_error(y.flatten(), pruned.double() @ x.double().flatten()), 5e-3)


def test_refusals_say_what_and_why() -> None:
    packed, _ = problem(6, 32, Pattern(2, 4), torch.bfloat16, torch.device("cpu"))
    with pytest.raises(UsageError, match="did you mean 'lane_row'"):
        spmv(packed, torch.ones(32), "lane_rov")
    with pytest.raises(SdbenchError, match=r"one vector of 32.*\(33,\)"):
        spmv(packed, torch.ones(33))
    with pytest.raises(SdbenchError, match="one vector"):
        spmv(packed, torch.ones(2, 32))
    assert auto_variant(packed) == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", TRITON)
def test_offsets_past_int32(variant: str) -> None:
    """CASES 21: 319 x 7,864,320 elements."""
    device, pattern = torch.device("cuda"), Pattern(2, 4)
    out_features, in_features = 319, 7_864_320
    weight = torch.zeros(out_features, in_features, dtype=torch.bfloat16, device=device)
    keep = torch.zeros_like(weight, dtype=torch.bool)
    keep[:, 0::4] = True
    keep[:, 1::4] = True
    weight[:, 0::4] = 1.0
    weight[-1, -3] = 64.0
    packed = pack(weight, keep, pattern)
    del weight, keep
    x = torch.full((in_features,), 2.0**-10, device=device)
    want = torch.full((out_features,), in_features / 4 * 2.0**-10, dtype=torch.float64, device=device)
    want[-1] += 64.0 * 2.0**-10
    assert within(relative_error(spmv(packed, x, variant), want), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", TRITON)
def test_configs_all_over_the_space_are_right(variant: str) -> None:
    """On an even shape and on one with a ragged edge in both directions; a search checks every config that it times."""
    chosen, device = registry.find("spmv", variant), torch.device("cuda")
    for out_features, in_features in ((2561, 4140), (2560, 2560)):
        packed, pruned = problem(out_features, in_features, Pattern(2, 4), torch.bfloat16, device)
        x = poisoned(in_features, device)
        want = pruned.double() @ x.double()
        space = chosen.space(problem_of(packed))
        for config in space[:: max(1, len(space) // 12)]:
            assert within(relative_error(spmv(packed, x, variant, config), want), 1e-5), config
