"""What only a GPU can show: configs that hang it or poison its context end one process, and a search finds and keeps a config."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from sdbench.kernels import registry, tuned
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.suites.kernels.measure import Measurement, Product, measure
from sdbench.suites.kernels.runner import Case
from sdbench.suites.kernels.search import SHORT
from sdbench.suites.kernels.worker import Worker

pytestmark = pytest.mark.gpu


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parent / "fakes")
    return importlib.import_module("faulty_triton")


def test_an_endless_loop_an_illegal_address_and_a_trap_cost_their_own_outcomes(faulty: Any) -> None:
    """CASES 10."""
    kinds = [faulty.RIGHT, faulty.ENDLESS, faulty.RIGHT, faulty.ILLEGAL, faulty.TRAP, faulty.RIGHT]
    configs = [{"kind": kind, "num_warps": 1 << number % 3} for number, kind in enumerate(kinds)]
    case = Case.of(faulty.VARIANT, (64, 64), torch.bfloat16, None, torch.device("cuda", 0), 0)
    with Worker(timeout=10) as worker:
        trials = list(worker.run(case, configs, SHORT))
    assert [trial.config for trial in trials] == configs
    assert [trial.outcome for trial in trials] == ["correct", "timeout", "correct", "crash", "crash", "correct"], trials
    assert all((trial.times is not None) == (trial.outcome == "correct") for trial in trials)
    assert torch.ones(8, device="cuda").sum().item() == 8  # this process and the device are well


def test_a_search_finds_a_config_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 9: the second run checks and times the choice of the first."""
    monkeypatch.setenv("SDBENCH_CACHE", str(tmp_path))
    device = torch.device("cuda", 0)
    lane_row, gemv = registry.find("spmv", "lane_row"), registry.find("dense", "gemv")
    products: list[Product] = [(gemv, "o", None, 1), (lane_row, "o", Pattern(2, 4), 1)]
    options = Measurement([Pattern(2, 4)], {"o": (2560, 4096)}, torch.bfloat16, device, [], 0)
    first = measure(products, options, None, Progress())
    second = measure(products, options, None, Progress())
    for product, row, again in zip(products, first, second, strict=True):
        assert (row["outcome"], row["config_source"]) == ("correct", "search") and 1 < row["configs"] <= 12
        assert (again["outcome"], again["config_source"], again["configs"]) == ("correct", "cache", 1)
        assert again["config"] == row["config"] and again["us"]["p50"] == pytest.approx(row["us"]["p50"], rel=0.2)
        assert row["us"]["p50"] > 0 and 0 < row["roofline"] < 1.5 and row["compile_seconds"] > 0
        assert tuned.lookup(product[0], options.case(product).problem, device) == (row["config"], "cache")
