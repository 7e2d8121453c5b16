"""CUDA events as pytest-benchmark's clock: a round is a replay of a CUDA graph of many calls, its figure one call's time on the device."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import pytest
import torch

from sdbench import environment, timing

ROUNDS = 20


class Moment:
    """A point of the current stream's work. The difference of two is seconds on the device a call.

    Subtracted, not read: reading the first one would wait for the device, and the round would begin with an idle one.
    """

    def __init__(self, calls: int):
        self._calls = calls
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, earlier: Self) -> float:
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3 / self._calls


@pytest.fixture
def time_calls(request: pytest.FixtureRequest) -> Callable[[Sequence[Callable[[], object]], str], dict[str, Any]]:
    """``time_calls(calls, group)`` times calls as ``sdbench kernels`` does, and returns the benchmark's ``extra_info``.

    Each call should read a weight copy of its own. Takes the place of pytest-benchmark's ``benchmark``.
    """

    def run(calls: Sequence[Callable[[], object]], group: str) -> dict[str, Any]:
        def cuda_events() -> Moment:
            return Moment(len(calls))

        graph = timing.capture(calls)
        request.node.add_marker(pytest.mark.benchmark(group=group, timer=cuda_events))
        benchmark = request.getfixturevalue("benchmark")
        benchmark.pedantic(graph.replay, rounds=ROUNDS, warmup_rounds=1)
        return benchmark.extra_info

    return run


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """The GPU, its driver and its clocks' limits; a comparison with a run on another one warns."""
    described = environment.describe()
    machine_info |= {name: described[name] for name in ("gpu", "cuda", "torch", "triton")}
