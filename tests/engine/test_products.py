"""A product of several tokens in a fused step: parts of a split K are left to the kernel that reads them, but for one that does not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sdbench.engine.fused import launches
from sdbench.engine.fused import products as products_module
from sdbench.engine.fused.products import Product
from sdbench.engine.packed_linear import PackedLinear
from sdbench.kernels import registry
from sdbench.kernels.launching import capability, sm_count
from sdbench.kernels.registry import Problem
from sdbench.pattern import Pattern
from sdbench.timing import relative_error
from tests.kernels.problems import problem

OUT, IN, TOKENS = 48, 288, 3


@pytest.fixture(params=["2:4", "16:32", None])
def linear(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, torch.Tensor]]:
    """A pruned or dense linear whose tuned config splits K in two, and its matrix."""
    monkeypatch.setattr(products_module, "uses_kernels", lambda device: True)
    monkeypatch.setattr(launches.tuned, "lookup", lambda variant, problem, device: ({**variant.default(problem), "splits": 2}, "cache"))
    pattern = Pattern.parse(request.param) if request.param else None
    packed, pruned = problem(OUT, IN, pattern or Pattern.parse("2:4"), torch.bfloat16, device)
    plain = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16, device=device)
    plain.weight.data = pruned.clone()
    # Torch's own product has no parts.
    of_several = Problem(OUT, IN, torch.bfloat16, None, sm_count(device), capability(device), TOKENS)
    monkeypatch.setattr(launches, "_QUICKEST", {(of_several, device): registry.find("dense", "gemm")})
    yield PackedLinear(packed, None, None) if pattern else plain, pruned


@pytest.mark.parametrize("whole", [False, True])
def test_parts_are_left_or_added(linear: tuple[Any, torch.Tensor], whole: bool, device: torch.device) -> None:
    module, pruned = linear
    product = Product([module], {}, batch=TOKENS, whole=whole)
    assert product.variant == ("tile" if product.packed else "gemm")
    assert product.sums.shape == (1 if whole else 2, TOKENS, OUT)
    x = torch.randn(TOKENS, IN, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    product.sums.fill_(torch.nan)
    found = product(x)
    assert relative_error(found.sum(0), x.double() @ pruned.double().T) < 1e-5
    # Both of them, not one and zeros.
    assert all(part.abs().max() > 0.1 for part in found)
