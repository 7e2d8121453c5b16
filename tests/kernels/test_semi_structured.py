"""cuSPARSELt: what it refuses and how it is called anywhere; its results where it runs."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from sdbench.kernels import registry
from sdbench.kernels.registry import Problem
from sdbench.kernels.semi_structured.cusparselt import SemiStructuredWeight
from sdbench.pattern import Pattern
from sdbench.suites.kernels.operands import make_operand
from sdbench.timing import TOLERANCE, relative_error, within

TAKEN = Problem(64, 4112, torch.bfloat16, Pattern(2, 4), 132, 90)


def cusparselt() -> registry.Variant:
    return registry.find("semi_structured", "cusparselt")


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pattern": Pattern(16, 32)}, "takes 2:4, .* not 16:32"),
        ({"pattern": Pattern(1, 4)}, "takes 2:4, .* not 1:4"),
        ({"dtype": torch.float32}, "takes bf16 and fp16, not torch.float32"),
        ({"out_features": 72}, "multiples of 16, not 72x4112"),
        ({"in_features": 4120}, "multiples of 16, not 64x4120"),
        ({"capability": 75}, "sm_80 or newer"),
        ({"capability": 0}, "sm_80 or newer"),
    ],
)
def test_what_it_cannot_take_is_refused_with_the_reason(change: dict[str, Any], why: str, available: None) -> None:
    assert re.search(why, cusparselt().constraint(replace(TAKEN, **change)) or "")


def test_what_it_takes(available: None) -> None:
    for change in ({}, {"dtype": torch.float16}, {"capability": 80}, {"capability": 100}):
        assert cusparselt().constraint(replace(TAKEN, **change)) is None


def test_a_torch_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    assert "built with cuSPARSELt" in (cusparselt().constraint(TAKEN) or "")


def test_a_clone_has_memory_of_its_own() -> None:
    weight = SemiStructuredWeight(torch.arange(9, dtype=torch.bfloat16), 3)
    copy = weight.clone()
    assert torch.equal(copy.packed, weight.packed) and copy.algorithm == 3
    assert copy.packed.data_ptr() != weight.packed.data_ptr()
    assert weight.nbytes == 18


def test_how_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the library: the pruned matrix, 8 equal columns, the algorithm asked for, and the first column back."""
    algorithms = []

    def product(packed: torch.Tensor, columns: torch.Tensor, alg_id: int = 0) -> torch.Tensor:
        assert columns.shape == (32, 8) and columns.stride() == (1, 32)
        assert bool((columns == columns[:, :1]).all())
        algorithms.append(alg_id)
        return packed @ columns

    def search(packed: torch.Tensor, columns: torch.Tensor) -> int:
        assert columns.shape == (32, 8) and columns.stride() == (1, 32)
        return 5

    monkeypatch.setattr(torch, "_cslt_compress", lambda pruned: pruned.clone())
    monkeypatch.setattr(torch, "_cslt_sparse_mm", product)
    monkeypatch.setattr(torch, "_cslt_sparse_mm_search", search)
    operand = make_operand((16, 32), torch.float32, Pattern(2, 4), torch.device("cpu"), 0, cusparselt().prepare)
    assert bool((operand.dense.view(16, 8, 4).count_nonzero(-1) == 2).all())
    x = torch.randn(32, generator=torch.Generator().manual_seed(0))
    for config in cusparselt().space(operand.problem):
        y = cusparselt().launch(operand.weight, x, torch.empty(16), config)
        assert y.shape == (16,)
        assert within(relative_error(y, operand.dense.double() @ x.double()), 1e-5)
    assert algorithms == [0, 5]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 2560), (2560, 4096), (16, 32)])
def test_results(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    """Every config, on the weight and on a copy of it, in and out of a CUDA graph."""
    device = torch.device("cuda")
    operand = make_operand((out_features, in_features), dtype, Pattern(2, 4), device, 0, cusparselt().prepare)
    refusal = cusparselt().constraint(operand.problem)
    if refusal:
        pytest.skip(refusal)
    # Values are half of the matrix, and two bits a kept value say where it was.
    assert operand.nbytes >= out_features * in_features * 9 // 8
    x = torch.randn(in_features, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
    y = torch.empty(out_features, device=device)
    want = operand.dense.double() @ x.double()
    for config in cusparselt().space(operand.problem):
        for weight in (operand.weight, operand.weight.clone()):
            got = cusparselt().launch(weight, x, y, config)
            assert got.shape == (out_features,) and within(relative_error(got, want), TOLERANCE[dtype]), config
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = cusparselt().launch(operand.weight, x, y, config)
        graph.replay()
        assert within(relative_error(got, want), TOLERANCE[dtype]), config
