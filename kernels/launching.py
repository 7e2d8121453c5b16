"""What launchers share: which Triton back end is here, and sums that need a device's properties."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import get_ident
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

Repeat = Callable[..., object]


def interpreted() -> bool:
    """True where Triton runs kernels in its interpreter (``TRITON_INTERPRET=1`` before the first import)."""
    return bool(triton.knobs.runtime.interpret)


def runs_triton(device: torch.device) -> bool:
    """True where Triton kernels can run: on a GPU, or in the interpreter."""
    return device.type == "cuda" or interpreted()


def on_nvidia() -> bool:
    """True where kernels may use PTX: compiled, and not for another maker's GPU."""
    return not interpreted() and torch.version.hip is None


def uses_kernels(device: torch.device) -> bool:
    """True where a decode step launches its kernels: a CPU takes their torch references, since the interpreter is for checks."""
    return device.type == "cuda"


def can_run(needs: str, device: torch.device) -> str | None:
    """Why a variant with these needs cannot run on the device, or None.

    Args:
        needs: ``Variant.needs``.
        device: Where the operands live.
    """
    if needs == "torch" or runs_triton(device):
        return None
    return "needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)"


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def capability(device: torch.device) -> int:
    """Compute capability of an NVIDIA device, 90 for 9.0; 0 elsewhere."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


_TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


def pointer_type(dtype: torch.dtype) -> str:
    """Triton's name of a pointer to a torch dtype, for compile-only checks."""
    return "*" + _TRITON_TYPES[dtype]


def stream_of(device: torch.device) -> Callable[[int | None], int]:
    """What gives the number of the current stream of a device's index; always 0, the default one, on a CPU."""
    if device.type != "cuda":
        return lambda index: 0
    # Triton's way takes a tenth of the time of torch's public one.
    found: Callable[[int | None], int] = triton.runtime.driver.active.get_current_stream
    return found


def repeatable(compiled: object, grid: tuple[int, int, int], constexprs: Iterable[Any], device: torch.device) -> Repeat | None:
    """What launches a kernel again without Triton's look-up, which takes several times as long as the launch; None where Triton has to.

    It is called with the operands that are no compile-time values, addresses in place of tensors (of a tensor, Triton would ask the driver
    each time), aligned as those that the kernel was compiled for, and with ``stream``, that of the device's current stream.

    Args:
        compiled: What the launch of a ``@triton.jit`` function returned.
        grid: Of that launch.
        constexprs: Values of its compile-time arguments, which are its last, in order.
        device: Of its operands.
    """
    # The interpreter compiles nothing, and kernels that are compiled side by side come later; one belongs to the GPU that was current.
    if not isinstance(compiled, CompiledKernel) or device.index != torch.cuda.current_device():
        return None
    run, last = compiled[grid], tuple(constexprs)
    return lambda *operands, stream: run(*operands, *last, stream=stream)


_SCRATCH: dict[tuple[str, torch.device, int, int, torch.dtype], dict[tuple[int, int], Tensor]] = {}
_KEPT: ContextVar[bool] = ContextVar("sdbench_scratch_kept", default=True)


@contextmanager
def unkept_scratch() -> Iterator[None]:
    """Inside, a thread's scratch memory is new each time and freed with the tensor, for what allocates in a pool that is not its own.

    torch.compile runs and captures a step in a pool of its CUDA graphs, where nothing may stay but the step's results.
    """
    token = _KEPT.set(False)
    try:
        yield
    finally:
        _KEPT.reset(token)


def scratch(use: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of one launch, shared by a thread's launches on a stream, which run one after the other; uninitialised.

    Another thread's launches on that stream may come between the one that writes and the one that reads it. What is there outlives its
    thread, whose captured CUDA graph may hold its address, until a thread of the same identity takes it over. What became too small is kept
    for such a graph too: not on the default stream, which cannot be captured.

    Args:
        use: What for; uses do not share.
        shape: Of the result, contiguous.
        dtype: Of the result.
        device: Where.
    """
    if not _KEPT.get():
        return torch.empty(shape, dtype=dtype, device=device)
    stream = stream_of(device)(device.index)
    views = _SCRATCH.setdefault((use, device, stream, get_ident(), dtype), {})
    found = views.get(shape)
    if found is None:
        largest = max(views.values(), key=lambda view: view.untyped_storage().nbytes(), default=None)
        if largest is None or largest.untyped_storage().nbytes() < shape[0] * shape[1] * dtype.itemsize:
            if not stream:
                views.clear()
            found = torch.empty(shape, dtype=dtype, device=device)
        else:
            found = largest.as_strided(shape, (shape[1], 1))
        views[shape] = found
    return found
