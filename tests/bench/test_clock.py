"""The benchmarks' clock and report, without a GPU: pytest-benchmark itself runs on a device clock that a test moves."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sdbench import environment

CONFTEST = Path(__file__).with_name("conftest.py")

FAKES = '''
import pytest, torch
from sdbench import timing

class Event:
    """Of a device that works while the host goes on: its time is known once it was waited for."""
    now, running = 100.0, []
    def __init__(self, enable_timing):
        assert enable_timing
    def record(self):
        Event.running.append(self)
        self.at = None
    def synchronize(self):
        for event in Event.running:
            if isinstance(event, float):
                Event.now += event
            else:
                event.at = Event.now
        Event.running.clear()
    def elapsed_time(self, end):
        return end.at - self.at

class Graph:
    def __init__(self, calls):
        self.calls, self.replays = calls, 0
    def replay(self):
        self.replays += 1
        for call in self.calls:
            Event.running.append(1e3 if self.replays == 1 else call())

@pytest.mark.parametrize("us", [3, 30])
def test_product(us, time_calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "capture", Graph)
    time_calls([lambda: (us - 1) / 1e3, lambda: us / 1e3, lambda: (us + 1) / 1e3], "o 8x32")["calls"] = 3
'''


@pytest.mark.slow
def test_a_round_is_the_device_time_of_one_call(tmp_path: Path) -> None:
    """CASES 18: warm-up apart, completion included; with ``--benchmark-save`` and ``--benchmark-compare``."""
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_fakes.py").write_text(FAKES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(*arguments: str) -> str:
        # Under xdist, which this test may run in, pytest-benchmark measures nothing.
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-storage=file://kept", *arguments]
        done = subprocess.run(call, cwd=tmp_path, env=outside, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("--benchmark-save=first")
    (saved,) = (tmp_path / "kept").rglob("*_first.json")
    whole = json.loads(saved.read_text())
    assert {"gpu", "torch", "triton"} <= set(whole["machine_info"])
    for benchmark, us in zip(whole["benchmarks"], (3, 30), strict=True):
        assert benchmark["group"] == "o 8x32"
        assert benchmark["extra_info"] == {"calls": 3}
        assert benchmark["options"]["timer"].endswith("cuda_events")
        stats = benchmark["stats"]
        assert stats["rounds"] == 20
        assert [stats[name] for name in ("min", "median", "max")] == pytest.approx([us * 1e-6] * 3)
    compared = run("--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert "(NOW)" in compared and "(0001_first)" in compared


def test_the_machine_is_described_by_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "NVIDIA H200", "driver": "580.1", "max_sm_mhz": 1980, "max_memory_mhz": 3201}
    described = environment.describe() | {"gpu": gpu}
    monkeypatch.setattr(environment, "describe", lambda: described)
    info = {"node": "kept"}
    runpy.run_path(str(CONFTEST))["pytest_benchmark_update_machine_info"](machine_info=info)
    assert info["node"] == "kept" and info["gpu"] == gpu
