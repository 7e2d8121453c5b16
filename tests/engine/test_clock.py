"""CASES 18: what a timed reply's seconds are made of."""

import time
from typing import Any

import pytest
import torch

from sdbench.engine.greedy import clock


def test_completion_of_an_asynchronous_device_is_included(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch returns after 1 ms and the device works for 2 s."""
    now, pending = [0.0], [0.0]

    def launch() -> None:
        now[0] += 0.001
        pending[0] += 2.0

    def synchronize(device: Any) -> None:
        now[0] += pending[0]
        pending[0] = 0.0

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    device = torch.device("cuda")
    launch()  # what was launched before is not of the region
    start = clock(device)
    launch()
    assert clock(device) - start == pytest.approx(2.001)
