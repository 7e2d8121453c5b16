"""Products of a weight on a GPU that is not the current one: Triton launches on the current one, torch on its operands'."""

import pytest
import torch

from sdbench.kernels import registry
from sdbench.kernels.finish import Epilogue
from sdbench.kernels.spmm import BoundSpmm, spmm
from sdbench.kernels.spmv import bind, spmv
from sdbench.pattern import Pattern
from sdbench.timing import relative_error, within

from .problems import problem


def test_launches_are_on_the_weights_gpu(launched: list[str]) -> None:
    """Those of a config's check too, with an epilogue, and a second time."""
    packed, pruned = problem(16, 64, Pattern(2, 4), torch.bfloat16, torch.device("cpu"))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = x.double() @ pruned.double().T
    for name in ("reference", "lane_row"):
        bound = bind(packed, name)
        for y in (spmv(packed, x[0], name), bound(x[0]), bound(x[0]), bound(x[0], epilogue=Epilogue(bias=torch.zeros(16)))):
            assert within(relative_error(y, want[0]), 5e-3)
        assert launched == ["config", "config", *[f"spmv/{name}"] * 4]
        launched.clear()
    for name in ("reference", "expand", "tile"):
        several = BoundSpmm(packed, name)
        for y in (spmm(packed, x, name), several.multiply(x), several.multiply(x)):
            assert within(relative_error(y, want), 5e-3)
        assert [step for step in launched if step != "config"] == [f"spmm/{name}"] * 3
        launched.clear()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kernel", ["spmv", "spmm"])
def test_on_the_second_of_two_gpus(kernel: str) -> None:
    """Every variant, with configs that ship where some do, by the public call and by a bound weight again and again."""
    device, current = torch.device("cuda", 1), torch.cuda.current_device()
    packed, pruned = problem(2560, 4096, Pattern(2, 4), torch.bfloat16, device)
    x = torch.randn(1 if kernel == "spmv" else 8, 4096, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    want = x.double() @ pruned.double().T
    for name in ("auto", *(variant.name for variant in registry.variants(kernel))):
        product = bind(packed, name) if kernel == "spmv" else BoundSpmm(packed, name).multiply
        once = (spmv if kernel == "spmv" else spmm)(packed, x, name)
        for y in (once, *(product(x) for _ in range(3))):
            assert y.device == device and within(relative_error(y, want), 5e-3), name
    if kernel == "spmv":
        assert within(relative_error(spmv(packed, x, epilogue=Epilogue(bias=torch.ones(2560, device=device))), want + 1), 5e-3)
    assert torch.cuda.current_device() == current
