"""Where a step's time goes: device time by kind of kernel."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity

KINDS = {
    "lane_row_kernel": "pruned products",
    "portable_kernel": "pruned products",
    "gemv_kernel": "dense products",
    "gemm": "dense products",
    "nvjet": "dense products",
    "gemv": "dense products",
    "attention_kernel": "attention",
    "merge_kernel": "attention",
    "norm_kernel": "norms",
    "gate_kernel": "gate",
    "head_kernel": "lm_head and argmax",
    "advance_kernel": "lm_head and argmax",
}
"""Part of a kernel's name -> what it does; the first that matches holds."""


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    return next((kind for part, kind in KINDS.items() if part in kernel), "other")


def profile(steps: Callable[[], object], count: int) -> dict[str, dict[str, float]]:
    """Device microseconds and launches a step, by kind.

    Kernels that overlap by dependent launch wait inside one another's time, so that the sum may exceed the step's own.

    Args:
        steps: Runs ``count`` decode steps on a CUDA device.
        count: How many.
    """
    steps()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps()
        torch.cuda.synchronize()
    found: dict[str, dict[str, float]] = {}
    for event in profiler.key_averages():
        if event.self_device_time_total:
            entry = found.setdefault(kind_of(event.key), {"us": 0.0, "launches": 0.0})
            entry["us"] += event.self_device_time_total / count
            entry["launches"] += event.count / count
    return dict(sorted(found.items(), key=lambda item: -item[1]["us"]))
