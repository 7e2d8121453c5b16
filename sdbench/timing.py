"""Timing: cold reads in CUDA graphs, medians with their spread, no figure where there is none; and the errors that gate a timing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

L2_TIMES = 4
"""Weight copies in a cold-cache timing exceed the L2 this many times."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""Largest relative Frobenius error of a product by the dtype of y; sums are float32 everywhere."""


@dataclass(frozen=True)
class Times:
    """Median and spread of one quantity.

    Attributes:
        p20: 20th percentile.
        p50: Median.
        p80: 80th percentile.
    """

    p20: float
    p50: float
    p80: float

    def as_dict(self) -> dict[str, float]:
        """``{"p20", "p50", "p80"}``."""
        return asdict(self)


def summarise(samples: Sequence[float]) -> Times | None:
    """Percentiles of the samples.

    Args:
        samples: Times in any one unit; samples that are not finite and positive are discarded.

    Returns:
        None where no sample is left: no figure, never 0.
    """
    good = [s for s in samples if np.isfinite(s) and s > 0]
    if not good:
        return None
    return Times(*(float(p) for p in np.percentile(good, [20, 50, 80])))


@contextmanager
def capture_stream() -> Iterator[torch.cuda.Stream]:
    """Inside, launches go where graphs are captured on the current GPU: after all that came before, and before all that follows.

    One stream serves all captures, since scratch memory and workspaces of cuBLAS stay for each stream that ever had some.
    """
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """All calls in order in one CUDA graph; each is made once before, uncaptured.

    Args:
        calls: Callables that launch on the current stream.
    """
    with capture_stream() as stream:
        # What a first call does (compile, allocate, read something back) may not happen while a graph is captured.
        for call in calls:
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def graph_times(calls: Sequence[Callable[[], object]], *, replays: int = 20) -> Times | None:
    """Microseconds a call, all calls captured in order in one CUDA graph, so that launch overhead on the host is out.

    Each call should read a weight copy of its own, enough of them to exceed the L2 (see :func:`copies_needed`).

    Args:
        calls: Callables that launch on the current stream.
        replays: Timed replays; one more before them is not timed.
    """
    graph = capture(calls)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples = []
    for replay in range(replays + 1):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay:
            samples.append(start.elapsed_time(end) * 1e3 / len(calls))
    return summarise(samples)


def copies_needed(nbytes: int, device: torch.device) -> int:
    """Weight copies of ``nbytes`` that together exceed the device's L2 several times.

    At least two, since one after itself would be warm; at least eight small ones, so that a graph holds enough calls to time.

    Args:
        nbytes: Bytes that one call reads.
        device: A CUDA device.
    """
    cold = L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size
    return max(2 if nbytes >= cold else 8, -(-cold // nbytes))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error ``|got - want| / |want|`` in float64; NaN or Inf where the output holds one.

    Args:
        got: The output under test, any float dtype.
        want: The float64 reference of the same shape, not zero.
    """
    return ((got.double() - want).norm() / want.norm()).item()


def within(error: float, tolerance: float) -> bool:
    """True only for a finite error up to the tolerance: NaN never passes."""
    return bool(np.isfinite(error)) and error <= tolerance
