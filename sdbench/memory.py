"""Memory that a region of the program needed: GPU memory from torch's allocator, main memory from the kernel's accounts."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

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
