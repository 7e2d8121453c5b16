"""Dependent launch is checked where it can go wrong: in a chain whose inputs change, not on an x that stays the same."""

from dataclasses import replace

import pytest
import torch

from sdbench.kernels import registry
from sdbench.kernels.registry import Problem, Variant
from sdbench.pattern import Pattern
from sdbench.suites.kernels.operands import make_operand
from sdbench.timing import relative_error, within

SIZE, LINKS = 2560, 12


def chain(variant: Variant, device: torch.device, tokens: int = 1, **config: int) -> None:
    """Of one token in float32; of several in bf16, which the products take without a kernel of torch between them."""
    dtype = torch.float32 if tokens == 1 else torch.bfloat16
    pattern = Pattern(2, 4) if variant.kernel in ("spmv", "spmm") else None
    operands = [make_operand((SIZE, SIZE), torch.bfloat16, pattern, device, seed, variant.prepare) for seed in range(LINKS)]
    # Scaled so that the vector keeps its size along the chain.
    scale = (operands[0].dense.double().norm() / SIZE**0.5).item()
    shape = operands[0].x_shape(tokens)
    x = torch.empty(shape, dtype=dtype, device=device)
    ys = [torch.empty_like(x) for _ in operands]

    def run() -> None:
        source = x
        for operand, y in zip(operands, ys, strict=True):
            variant.launch(operand.weight, source, y, {**variant.default(replace(operand.problem, tokens=tokens)), **config})
            source = y.div_(scale) if operand is operands[LINKS // 2] else y

    x.normal_()
    run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    for seed in range(20):
        x.normal_(generator=torch.Generator(device).manual_seed(seed))
        graph.replay()
        want = x.double()
        for operand in operands:
            want = want @ operand.dense.double().T
            want = (want / scale if operand is operands[LINKS // 2] else want).to(dtype).double()
        assert within(relative_error(ys[-1], want), 1e-5 if tokens == 1 else 3e-2), seed


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [1, 2])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("variant", registry.variants("spmv"), ids=lambda variant: variant.name)
def test_sparse_chain(variant: Variant, splits: int, pdl: int) -> None:
    if variant.needs == "torch" or (pdl > 1 and "lane_row" not in variant.name):
        return
    for depth in (1, 2):
        chain(variant, torch.device("cuda"), splits=splits, depth=depth, pdl=pdl)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "variant"), [("dense", "gemv"), ("quantized", "int8"), ("quantized", "fp8")])
def test_unpruned_chain(kernel: str, variant: str) -> None:
    for pdl, depth in ((1, 1), (1, 2), (2, 1), (2, 2)):
        chain(registry.find(kernel, variant), torch.device("cuda"), depth=depth, pdl=pdl)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [1, 2])
@pytest.mark.parametrize(("splits", "arranged"), [(1, 0), (1, 1), (8, 0), (8, 1)])
def test_sparse_chain_of_several_tokens(splits: int, arranged: int, pdl: int) -> None:
    chain(registry.find("spmm", "tile"), torch.device("cuda"), tokens=4, splits=splits, arranged=arranged, pdl=pdl)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
def test_unpruned_chain_of_several_tokens(splits: int) -> None:
    chain(registry.find("dense", "gemm"), torch.device("cuda"), tokens=4, splits=splits, pdl=1)


def test_dependent_launch_is_for_hopper_and_newer() -> None:
    for capability, expected in ((0, 0), (80, 0), (90, 1), (100, 1)):
        problem = Problem(SIZE, SIZE, torch.bfloat16, Pattern(2, 4), 132, capability)
        assert {config["pdl"] for config in registry.find("spmv", "lane_row").space(problem)} == ({0, 1, 2} if expected else {0})
        assert {config["pdl"] for config in registry.find("dense", "gemv").space(problem)} == ({1, 2} if expected else {0})
