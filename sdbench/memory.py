"""Memory that a region of the program needed, or that is in use: of a GPU from torch's allocator and the driver, else from the kernel."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from sdbench import nvml

NO_GPU = "no GPU: main memory holds the program and the original weights too"
"""Why there is no account of the weights' memory on a CPU."""

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"
_SLACK = 16 << 20
"""The kernel counts resident pages in batches per thread, so peak and present size differ by a little even right after a reset."""


@dataclass
class Peak:
    """The most memory in use at any moment of a region, filled in when the region ends.

    Args:
        bytes: Peak in bytes, what was there before the region included; None when it cannot be had.
        reason: Why there is no figure; None when there is one.
    """

    bytes: int | None = None
    reason: str | None = "the region has not ended"


@contextmanager
def peak_memory(device: torch.device, *others: torch.device) -> Iterator[Peak]:
    """Measures the peak of the ``with`` block; regions must not be nested, each resets the one account that there is.

    On CUDA this is the allocator's peak on ``device``; on the CPU the peak resident set of the process (Linux's VmHWM, after a reset).

    Args:
        device: CUDA or CPU device.
        others: Further GPUs, whose peaks are added.
    """
    peak = Peak()
    if device.type == "cuda":
        devices = dict.fromkeys((device, *others))
        for one in devices:
            torch.cuda.reset_peak_memory_stats(one)
        yield peak
        peak.bytes, peak.reason = sum(map(torch.cuda.max_memory_allocated, devices)), None
        return
    reason = _reset_peak_resident()
    yield peak
    peak.bytes, peak.reason = (None, reason) if reason else (_status_bytes("VmHWM"), None)


def resident_bytes(device: torch.device, *others: torch.device) -> int:
    """Bytes in use now: allocated by torch on a CUDA ``device`` and on other GPUs, or the resident set of the process for the CPU."""
    if device.type != "cuda":
        return psutil.Process().memory_info().rss
    return sum(map(torch.cuda.memory_allocated, dict.fromkeys((device, *others))))


@dataclass(frozen=True)
class InUse:
    """GPU memory in use at one moment, by three accounts; None where one cannot be had.

    Attributes:
        allocated: Bytes by torch's allocator.
        process: Bytes by the driver's account of this process: what the allocator took, and what CUDA and its kernels did.
        process_reason: Why there is no such account.
        gpu: Bytes in use on the whole GPU, by whatever process.
    """

    allocated: int | None = None
    process: int | None = None
    process_reason: str | None = NO_GPU
    gpu: int | None = None


def in_use(device: torch.device) -> InUse:
    """GPU memory that this process needs now: what the allocator merely keeps for later is given back first."""
    if device.type != "cuda":
        return InUse()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    process, reason = nvml.ask(uuid, lambda library, gpu: _of_this_process(library.nvmlDeviceGetComputeRunningProcesses(gpu)))
    if process is None and reason is None:
        reason = "NVML gives no memory of this process (in a container it may not see it)"
    return InUse(torch.cuda.memory_allocated(device), process, reason, total - free)


def _of_this_process(running: list[Any]) -> int | None:
    """Bytes of this process among those that NVML sees.

    A container numbers its processes anew; but one that is alone on the GPU is this one, which has a context there.
    """
    ours = [one for one in running if one.pid == os.getpid()] or (running if len(running) == 1 else [])
    return ours[0].usedGpuMemory if ours else None


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory that tensors hold, views of one memory once."""
    return sum({storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}.values())


def _reset_peak_resident() -> str | None:
    """Makes the kernel forget the process's peak; returns why it couldn't."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        kept = _status_bytes("VmHWM") - _status_bytes("VmRSS")
    except (OSError, ValueError) as error:
        return f"this system does not let a process reset its peak resident set ({error})"
    # Some sandboxes take the write and do nothing; an earlier peak would then pass for this region's.
    return f"this system kept an earlier peak {kept} bytes above the present size" if kept > _SLACK else None


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"no {field} in {_STATUS}")
    return int(match[1]) * 1024
