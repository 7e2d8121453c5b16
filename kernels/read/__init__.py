"""A kernel that only reads: the device's read bandwidth at a byte count, which every roofline is a fraction of."""

import itertools
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.kernels.launching import capability
from sdbench.timing import copies_needed, graph_times


@triton.jit
def read_kernel(source_ptr, sink_ptr, elements, per_program, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Sums a slice of int32 a program; the sum is stored so that no load can be dropped."""
    if PDL:
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * per_program
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(0, per_program, BLOCK):
        index = start + step + offsets
        total += tl.load(source_ptr + index, mask=index < elements, other=0, eviction_policy="evict_first")
    if PDL:
        # The launch before writes the same sums; its reads need not be over for these to begin.
        gdc_wait()
    tl.store(sink_ptr + tl.program_id(0), tl.sum(total, 0))


_CONFIGS = [(block, warps, steps) for block, warps in ((2048, 4), (4096, 8), (4096, 4)) for steps in (1, 2, 4)]


@cache
def read_bandwidth(nbytes: int, device: torch.device) -> float:
    """Measured read bandwidth, bytes a second: cold L2, one launch of ``nbytes``, the best of a few configs.

    The launch's fixed ramp is included, as it is in every kernel that reads as much: small matrices cannot reach what large ones do. Where
    the device has dependent launch the reads of one launch may begin before the last one ends, as those of the kernels do.

    Args:
        nbytes: Bytes of one launch.
        device: A CUDA device.

    Raises:
        RuntimeError: No config gave a time.
    """
    elements = max(1, nbytes // 4)
    buffers = [torch.randint(0, 1 << 20, (elements,), dtype=torch.int32, device=device) for _ in range(copies_needed(nbytes, device))]
    best: float | None = None
    launches = (False, True) if capability(device) >= 90 else (False,)
    for (block, warps, steps), dependent in itertools.product(_CONFIGS, launches):
        programs = triton.cdiv(elements, block * steps)
        sink = torch.empty(programs, dtype=torch.int32, device=device)

        def call(
            buffer: torch.Tensor,
            block: int = block,
            warps: int = warps,
            steps: int = steps,
            programs: int = programs,
            sink: torch.Tensor = sink,
            dependent: bool = dependent,
        ) -> None:
            read_kernel[(programs,)](buffer, sink, elements, block * steps, block, dependent, num_warps=warps, launch_pdl=dependent)

        call(buffers[0])
        if not torch.equal(sink.sum(dtype=torch.int32), buffers[0].sum(dtype=torch.int32)):
            raise RuntimeError(f"the read kernel missed some of its {nbytes} bytes")
        # Bound by default values.
        times = graph_times([lambda buffer=buffer, call=call: call(buffer) for buffer in buffers], replays=10)  # type: ignore[misc]
        if times is not None and (best is None or times.p50 < best):
            best = times.p50
    if best is None:
        raise RuntimeError("the read bandwidth could not be timed")
    return elements * 4 / (best * 1e-6)
