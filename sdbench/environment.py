"""What machine and software this is, in terms that say nothing about whose it is: no host name, user name, path or serial number."""

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

from sdbench import __version__, nvml
from sdbench.versions import NO_COMMIT, git_state, package_version


def describe(device: torch.device | None = None) -> dict[str, Any]:
    """Describes machine and software for result files; holds only what stays the same between two runs on one machine.

    Args:
        device: The GPU to describe; None for torch's current one.

    Returns:
        JSON-ready fields. What can't be had is None: ``gpu`` without CUDA, a package that is not installed, ``git`` where no
        commit is known.
    """
    git = git_state()
    system = " ".join([platform.system(), platform.machine(), *platform.libc_ver()]).strip()
    return {
        "sdbench": __version__,
        "git": git,
        "git_reason": None if git else NO_COMMIT,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "transformers": package_version("transformers"),
        "platform": system,
        "cpu": {"model": _cpu_model(), "count": _usable_cpus(), "memory_bytes": psutil.virtual_memory().total},
        "cuda": torch.version.cuda,
        "gpu_count": torch.cuda.device_count(),
        "gpu": _gpu(device) if torch.cuda.is_available() else None,
    }


def _gpu(device: torch.device | None) -> dict[str, Any]:
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        **_driver(str(properties.uuid)),
    }


def _driver(uuid: str) -> dict[str, Any]:
    """Driver version and limits."""
    names = ("driver", "max_sm_mhz", "max_memory_mhz", "power_limit_watts")
    values, reason = nvml.ask(
        uuid,
        lambda library, gpu: (
            library.nvmlSystemGetDriverVersion(),
            library.nvmlDeviceGetMaxClockInfo(gpu, library.NVML_CLOCK_SM),
            library.nvmlDeviceGetMaxClockInfo(gpu, library.NVML_CLOCK_MEM),
            library.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
        ),
    )
    return dict(zip(names, values, strict=True)) if values else dict.fromkeys(names) | {"driver_reason": reason}


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None) or platform.processor() or None


def _usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
