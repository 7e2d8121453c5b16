import getpass
import json
import platform
import socket
import sys
from types import SimpleNamespace

import pytest
import torch

from sdbench import environment
from sdbench.environment import describe
from sdbench.results import strict_json

PROPERTIES = SimpleNamespace(
    name="Test GPU", major=9, minor=0, total_memory=1 << 37, multi_processor_count=132, L2_cache_size=50 << 20, uuid="1234-abcd"
)


GIT = {"commit": "0123abc", "dirty": False}


@pytest.fixture(autouse=True)
def git(monkeypatch):
    """A checkout that nobody edits meanwhile."""
    monkeypatch.setattr(environment, "git_state", lambda: GIT)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as torch describes it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or PROPERTIES)
    return asked


class FakeNvml:
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1234-abcd":
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[kind]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000


def test_says_what_runs_and_survives_json(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = describe()
    assert json.loads(strict_json(facts)) == facts
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["transformers"].startswith("5.")
    assert facts["cpu"]["count"] >= 1 and facts["cpu"]["memory_bytes"] > 1 << 28
    assert (facts["gpu"], facts["git"]) == (None, GIT)
    assert describe() == facts  # a resumed run compares it


def test_names_no_host_user_or_path(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = strict_json(describe())
    assert "/" not in text.replace("\\/", "/")
    for secret in {socket.gethostname(), getpass.getuser(), platform.release()}:
        assert f'"{secret}"' not in text and f" {secret} " not in text


def test_gpu_with_nvml(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert describe()["gpu"] == {
        "name": "Test GPU",
        "capability": "9.0",
        "memory_bytes": 1 << 37,
        "sm_count": 132,
        "l2_bytes": 50 << 20,
        "driver": "580.1",
        "max_sm_mhz": 1980,
        "max_memory_mhz": 3201,
        "power_limit_watts": 700.0,
    }
    describe(torch.device("cuda", 1))
    assert gpu == [0, 1]


@pytest.mark.parametrize(("module", "reason"), [(None, "nvidia-ml-py is not installed"), (FakeNvml(), "NVML: Not Found")])
def test_gpu_without_nvml_gives_null_and_a_reason(gpu, monkeypatch, module, reason):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(PROPERTIES, "uuid", "of a slice")
    facts = describe()["gpu"]
    assert (facts["driver"], facts["max_sm_mhz"], facts["sm_count"]) == (None, None, 132)
    assert facts["driver_reason"].startswith(reason)


def test_a_missing_package_is_null():
    assert environment.package_version("no-such-package-anywhere") is None
