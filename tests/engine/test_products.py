"""Products of a fused step: parts of a split K, and which kernel multiplies dense weights."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sdbench.engine.fused import Unfusable, launches
from sdbench.engine.fused import products as products_module
from sdbench.engine.fused.products import Product
from sdbench.engine.packed_linear import PackedLinear
from sdbench.kernels import registry
from sdbench.kernels.launching import capability, sm_count
from sdbench.kernels.registry import Problem
from sdbench.kernels.spmm import FEW_TOKENS
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


class TestTheFastestDenseProduct:
    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Stands for a GPU's: which variant it finds the fastest, and what it was asked."""
        told: dict[str, Any] = {"fastest": "linear", "asked": 0}

        def quickest(found: Any, *arguments: Any) -> Any:
            told["asked"] += 1
            told["names"] = [launch.variant.name for launch in found]
            return next((launch for launch in found if launch.variant.name == told["fastest"]), None)

        monkeypatch.setattr(launches, "_QUICKEST", {})
        monkeypatch.setattr(launches, "_quickest", quickest)
        monkeypatch.setattr(launches, "_right", lambda variant, *arguments: launches.Launch(variant, {}, torch.empty(1, 1, 1)))
        return told

    @staticmethod
    def launched(tokens: int, dtype: torch.dtype = torch.bfloat16) -> str:
        described = Problem(OUT, IN, dtype, None, 132, 90, tokens)
        return launches.launch_for(torch.empty(0), described, torch.device("cuda"), False, torch.empty).variant.name

    @pytest.mark.parametrize(("tokens", "names"), [(1, ["gemv", "linear"]), (4, ["linear", "gemm"])])
    def test_is_asked_of_the_clock_once(self, clock: dict[str, Any], tokens: int, names: list[str]) -> None:
        assert [self.launched(tokens) for _ in range(3)] == ["linear"] * 3
        assert (clock["asked"], clock["names"]) == (1, names)

    def test_is_not_settled_by_a_lack_of_room(self, clock: dict[str, Any]) -> None:
        clock["fastest"] = None
        with pytest.warns(UserWarning, match="no room to time the dense products of 48x288, 4 tokens; linear is used"):
            assert self.launched(4) == "linear"
        clock["fastest"] = "gemm"
        assert self.launched(4) == "gemm"

    def test_in_float16_is_ours(self) -> None:
        """Its x is float32, which torch does not multiply with it."""
        assert self.launched(1, torch.float16) == "gemv"

    def test_gives_way_where_it_is_wrong(self, clock: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.launched(4) == "linear"

        def right(variant: registry.Variant, *arguments: Any) -> launches.Launch:
            if variant.name == "linear":
                raise Unfusable("wrong")
            return launches.Launch(variant, {}, torch.empty(1, 1, 1))

        monkeypatch.setattr(launches, "_right", right)
        assert self.launched(4) == "gemm"


def test_more_than_a_few_prompts_are_multiplied_by_expanded_pieces() -> None:
    """As everywhere else: ``tile`` would unfold the weight once for every 32 of them."""
    described = Problem(OUT, IN, torch.bfloat16, Pattern.parse("2:4"), 132, 90, FEW_TOKENS)
    assert [variant.name for variant in launches._candidates(described, False)] == ["tile"]
    described = replace(described, tokens=FEW_TOKENS + 1)
    assert [variant.name for variant in launches._candidates(described, False)] == ["expand"]
