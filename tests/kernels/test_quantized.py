"""Weight-only int8 and fp8 against the float64 product with the dequantised matrix: on a GPU, or in Triton's interpreter."""

import math

import pytest
import torch

from sdbench.errors import SdbenchError
from sdbench.kernels import registry
from sdbench.kernels.launching import capability, sm_count
from sdbench.kernels.quantized.weights import DTYPES, QuantizedWeight, quantize, words_of
from sdbench.kernels.registry import Config, Problem, Variant
from sdbench.timing import TOLERANCE, relative_error, within

KINDS = ["int8", "fp8"]


def problem_of(weight: QuantizedWeight) -> Problem:
    device = weight.values.device
    return Problem(*weight.shape, torch.bfloat16, None, sm_count(device), capability(device))


def random_weight(out_features: int, in_features: int, kind: str, device: torch.device) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    return quantize(torch.randn(out_features, in_features, generator=generator).to(device), kind)


def multiply(
    weight: QuantizedWeight, x: torch.Tensor, kind: str, config: Config | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    variant = registry.find("quantized", kind)
    y = torch.full((weight.shape[0],), math.nan, dtype=dtype, device=x.device)
    return variant.launch(weight, x, y, config or variant.default(problem_of(weight)))


def beside_nan(in_features: int, device: torch.device) -> torch.Tensor:
    memory = torch.full((in_features + 512,), math.nan, device=device)
    memory[64 : 64 + in_features] = torch.randn(in_features, generator=torch.Generator().manual_seed(in_features)).to(device)
    return memory[64 : 64 + in_features]


def test_int8_by_hand() -> None:
    weight = quantize(torch.tensor([[-127.0, 63.5, 0.4, 62.5], [0.0, 0, 0, 0], [3.0, 254, -1, 5.1]]), "int8")
    assert weight.scale.tolist() == [1.0, 1.0, 2.0]
    # Halves go to the even integer.
    assert weight.dequantize().tolist() == [[-127.0, 64.0, 0.0, 62.0], [0.0] * 4, [4.0, 254.0, 0.0, 6.0]]


def test_fp8_by_hand() -> None:
    """Three mantissa bits: 0.3 lies between 0.28125 and 0.3125, 17 halfway between 16 and 18; 2^-9 is the smallest subnormal."""
    weight = quantize(torch.tensor([[448.0, 0.3, 17, 0.002, 2.0**-10], [-896.0, 0.6, 34, 0.004, 2.0**-9]]), "fp8")
    assert weight.scale.tolist() == [1.0, 2.0]
    assert weight.dequantize().tolist() == [[448.0, 0.3125, 16.0, 2.0**-9, 0.0], [-896.0, 0.625, 32.0, 2.0**-8, 0.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_codes_and_scales(kind: str) -> None:
    """8 bits a weight; a width that is no multiple of 64 is padded."""
    assert random_weight(3, 128, kind, torch.device("cpu")).nbytes == 3 * 128 + 3 * 4
    assert random_weight(3, 65, kind, torch.device("cpu")).nbytes == 3 * 128 + 3 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_clone_has_memory_of_its_own(kind: str) -> None:
    weight = random_weight(3, 70, kind, torch.device("cpu"))
    copy = weight.clone()
    assert torch.equal(copy.dequantize(), weight.dequantize())
    assert copy.values.data_ptr() != weight.values.data_ptr() and copy.scale.data_ptr() != weight.scale.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_has_no_scale_is_refused(kind: str, value: float) -> None:
    with pytest.raises(SdbenchError, match=r"weight\[1, 2\] is (nan|inf)"):
        quantize(torch.tensor([[1.0, 2, 3], [4, 5, value]]), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_rows_keep_a_scale(kind: str) -> None:
    """A 127th of the smallest float32 is 0, which is no scale."""
    dense = torch.tensor([[1e-45, 0.0, -1e-45]])
    assert bool(quantize(dense, kind).dequantize().isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_decoded_exactly(kind: str, device: torch.device) -> None:
    """All 256 codes (fp8: the 254 that are numbers) in each byte of a word, times one."""
    codes = (torch.arange(256)[:, None] + 5 * torch.arange(64)).to(torch.uint8)
    if kind == "fp8":
        codes[(codes & 127) == 127] = 0
    # Byte j of word c is column 16 j + c.
    values = codes.view(256, 4, 16).transpose(1, 2).contiguous().view(DTYPES[kind])
    weight = QuantizedWeight(values.to(device), torch.ones(256, device=device), 64)
    want = codes.view(DTYPES[kind]).double().to(device)
    assert torch.equal(weight.dequantize(), want)
    config = {"block_out": 64, "block_words": 128, "num_warps": 1, "depth": 1, "pdl": 0}
    for column in (0, 17, 42, 63):
        x = torch.zeros(64, device=device)
        x[column] = 1.0
        assert torch.equal(multiply(weight, x, kind, config).double(), want[:, column])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (7, 40), (33, 96), (5, 1030), (9, 2560)])
def test_odd_shapes_and_x_beside_nan(kind: str, out_features: int, in_features: int, device: torch.device) -> None:
    """CASES 11: widths that are no multiple of 64, few and odd rows, NaN behind x."""
    weight, x = random_weight(out_features, in_features, kind, device), beside_nan(in_features, device)
    assert within(relative_error(multiply(weight, x, kind), weight.dequantize() @ x.double()), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("x_dtype", "y_dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)])
def test_dtypes(kind: str, x_dtype: torch.dtype, y_dtype: torch.dtype, device: torch.device) -> None:
    weight, x = random_weight(6, 64, kind, device), beside_nan(64, device).to(x_dtype)
    y = multiply(weight, x, kind, dtype=y_dtype)
    assert y.dtype == y_dtype
    assert within(relative_error(y, weight.dequantize() @ x.double()), TOLERANCE[y_dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("depth", "num_warps"), [(1, 2), (2, 1), (2, 2), (2, 8)])
@pytest.mark.parametrize("in_features", [2048, 2304, 2300])
def test_configs(kind: str, in_features: int, depth: int, num_warps: int, device: torch.device) -> None:
    """Whole tiles, a part of one at the end, a padded row; one to five steps; twice, so that nothing is left behind (CASES 8)."""
    config = {"block_out": 8, "block_words": 128 * num_warps, "num_warps": num_warps, "depth": depth, "pdl": 0}
    weight, x = random_weight(8, in_features, kind, device), beside_nan(in_features, device)
    first, second = multiply(weight, x, kind, config), multiply(weight, x, kind, config)
    assert within(relative_error(first, weight.dequantize() @ x.double()), 1e-5)
    assert torch.equal(first, second)


@pytest.mark.parametrize("variant", registry.variants("quantized"), ids=lambda variant: variant.name)
def test_spaces_and_defaults_fit_the_kernel(variant: Variant) -> None:
    for out_features, in_features in ((19456, 2560), (2560, 4096), (2560, 9728), (64, 64)):
        for gpu in (80, 90):
            problem = Problem(out_features, in_features, torch.bfloat16, None, 132, gpu)
            configs = variant.space(problem)
            assert {config["pdl"] for config in configs} <= ({0, 1, 2} if gpu >= 90 else {0})
            for config in (*configs, variant.default(problem)):
                # Four words a lane: else x would pass through shared memory at every step.
                assert config["block_words"] == 128 * config["num_warps"]
                assert config["num_warps"] == 1 or config["block_words"] < 2 * words_of(in_features)


def test_variants_share_operands_only_where_they_read_the_same() -> None:
    dense = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for kind in KINDS:
        operand, exact = registry.find("quantized", kind).prepare(dense, None, None)
        assert operand.values.dtype == DTYPES[kind]
        assert torch.equal(exact, operand.dequantize())
    assert len({variant.prepare for variant in registry.variants("quantized")}) == 2
    assert len({variant.prepare for kernel in ("spmv", "dense") for variant in registry.variants(kernel)}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_whole_search_space_is_right(kind: str) -> None:
    """Every config of the space, on a shape with a ragged edge in both directions and on one without."""
    device = torch.device("cuda")
    for out_features, in_features in ((2561, 4140), (2560, 4096)):
        weight, x = random_weight(out_features, in_features, kind, device), beside_nan(in_features, device)
        want = weight.dequantize() @ x.double()
        for config in registry.find("quantized", kind).space(problem_of(weight)):
            assert within(relative_error(multiply(weight, x, kind, config), want), 1e-5), config


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_past_int32(kind: str) -> None:
    """CASES 21: 1100 x 8,388,608 codes, which are more than 2^31 words."""
    device, in_features, out_features = torch.device("cuda"), 8_388_608, 1100
    values = torch.zeros(out_features, in_features // 4, 4, dtype=torch.int8, device=device)
    values[-1, -1, 3] = torch.tensor([1.0]).to(DTYPES[kind]).view(torch.int8).item()
    weight = QuantizedWeight(values.view(DTYPES[kind]), torch.ones(out_features, device=device), in_features)
    x = torch.zeros(in_features, device=device)
    x[-1] = 3.0
    assert multiply(weight, x, kind).tolist() == [0.0] * (out_features - 1) + [3.0]
