"""Compiles the configs of a variant side by side, before any of them runs."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton import FutureKernel
from triton.runtime import JITFunction

from sdbench.errors import one_line
from sdbench.kernels.launching import interpreted
from sdbench.kernels.registry import Config, Variant
from sdbench.suites.kernels.operands import Operand


def compile_all(variant: Variant, operand: Operand, configs: Sequence[Config], tokens: int = 1) -> Iterator[str | None]:
    """Compiles what each config launches, on as many threads as there are usable CPUs; nothing runs on the device.

    Yields:
        For each config in turn, once it is compiled: None, or why it does not compile.
    """
    if variant.needs != "triton" or interpreted():
        yield from [None] * len(configs)
        return
    x = torch.zeros(operand.x_shape(tokens), dtype=operand.problem.dtype, device=operand.device)
    y = torch.empty(operand.y_shape(tokens), device=operand.device)
    verdicts: dict[int, str | None] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        launched: list[list[Any] | str] = []
        for config in configs:
            with _compile_only() as kernels:
                try:
                    variant.launch(operand.weight, x, y, config)
                    launched.append(kernels)
                except Exception as error:  # a launcher may refuse a config in any way it likes
                    launched.append(f"{type(error).__name__}: {one_line(error)}")
        for found in launched:
            if isinstance(found, str):
                yield found
            else:
                # Two configs may launch one kernel; a future that failed is asked only once.
                for kernel in found:
                    if id(kernel) not in verdicts:
                        verdicts[id(kernel)] = _verdict(kernel)
                yield next((verdicts[id(kernel)] for kernel in found if verdicts[id(kernel)]), None)


def _verdict(kernel: Any) -> str | None:
    try:
        if isinstance(kernel, FutureKernel):
            kernel.result()
    except Exception as error:  # Triton, MLIR and ptxas each have their own
        return one_line(error)
    return None


@contextmanager
def _compile_only() -> Iterator[list[Any]]:
    """Launches of Triton kernels compile and stop there; yields the list that they are added to.

    Triton's own way to do this, ``kernel.warmup``, takes a kernel's arguments, which only the variant's launcher knows.
    """
    run, kernels = JITFunction.run, []

    def warm_up(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernels.append(run(self, *args, warmup=True, **kwargs))
        return kernels[-1]

    JITFunction.run = warm_up
    try:
        yield kernels
    finally:
        JITFunction.run = run
