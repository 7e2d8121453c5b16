"""Where a step's time goes: what each kind of kernel adds to the step, kernels that overlap counted once."""

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

KINDS = {
    "lane_row_kernel": "pruned products",
    "portable_kernel": "pruned products",
    "tile_kernel": "pruned products",
    "arrange_kernel": "pruned products",
    "words_kernel": "pruned products",
    "expand_kernel": "pruned products",
    "finish_kernel": "sums of splits",
    "gemv_kernel": "dense products",
    "gemm": "dense products",
    "nvjet": "dense products",
    "splitKreduce_kernel": "dense products",
    "gemv": "dense products",
    "attention_kernel": "attention",
    "merge_kernel": "attention",
    "norm_kernel": "norms",
    "gate_kernel": "gate",
    "pick_kernel": "lm_head and argmax",
    "head_kernel": "lm_head and argmax",
    "advance_kernel": "lm_head and argmax",
}
"""Part of a kernel's name -> what it does; the first that matches holds."""


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    return next((kind for part, kind in KINDS.items() if part in kernel), "other")


def shares(spans: Iterable[tuple[str, float, float]]) -> dict[str, dict[str, float]]:
    """What each kind adds to the whole: the time from the latest end before a kernel's own to its own.

    A kernel that was launched early, by dependent launch, waits inside its own duration for the one before it: durations would count that
    time twice. These shares sum to the time from the first start to the last end.

    Args:
        spans: Name, start and end of each kernel, in any unit of time and any order.

    Returns:
        Kind -> ``us`` (the unit of the spans) and ``launches``, the largest share first.
    """
    found: dict[str, dict[str, float]] = {}
    reached: float | None = None
    for name, start, end in sorted(spans, key=lambda span: span[2]):
        entry = found.setdefault(kind_of(name), {"us": 0.0, "launches": 0.0})
        entry["us"] += end - (start if reached is None else reached)
        entry["launches"] += 1
        reached = end
    return dict(sorted(found.items(), key=lambda item: -item[1]["us"]))


def spans(steps: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds of every kernel that the steps launch on a CUDA device.

    Args:
        steps: Launches the work; called once before, untraced.
    """
    steps()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
    ]


def profile(steps: Callable[[], object], count: int) -> dict[str, dict[str, float]]:
    """Microseconds and launches a step, by kind: see :func:`shares`.

    Args:
        steps: Runs ``count`` decode steps on a CUDA device.
        count: How many.
    """
    return {kind: {name: value / count for name, value in entry.items()} for kind, entry in shares(spans(steps)).items()}
