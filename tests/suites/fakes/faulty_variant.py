"""A variant whose configs go wrong in every way, and a timer that believes what a config says of itself; any process can import both."""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence

import torch
import triton

from sdbench.kernels.registry import Config, Problem, Variant, register
from sdbench.timing import Times

RIGHT, WRONG, NAN, NO_COMPILE, NO_MEMORY, RAISES, DIES, HANGS = range(8)

SPACE: list[Config] = []
DEFAULT: Config = {"kind": RIGHT, "us": 100}
LAUNCHED: list[Config] = []
"""Every config that was launched in this process, in order."""


def launch(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:
    LAUNCHED.append(config)
    kind = config["kind"]
    sys.stdout.write("noise on stdout\n")
    sys.stdout.flush()
    if kind == NO_COMPILE:
        raise triton.CompilationError(None, None, "no such instruction")
    if kind == NO_MEMORY:
        raise torch.OutOfMemoryError("out of memory")
    if kind == RAISES:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if kind == DIES:
        os._exit(7)
    if kind == HANGS:
        time.sleep(600)
    y.copy_(weight @ x)
    if kind == WRONG:
        y += 1
    if kind == NAN:
        y[0] = math.nan
    return y


def times(calls: Sequence[Callable[[], object]], *, replays: int) -> Times:
    """As fast as the config's ``us`` says; a short timing is 1% off."""
    for call in calls:
        call()
    us = LAUNCHED[-1]["us"] * (1 if replays == 20 else 1.01)
    return Times(us - 0.1, us, us + 0.1)


def _space(problem: Problem) -> list[Config]:
    return SPACE


VARIANT = register(
    Variant(
        kernel="faulty",
        name="faulty",
        summary="for tests",
        launch=launch,
        space=_space,
        default=lambda problem: DEFAULT,
        constraint=lambda problem: "takes four rows or more" if problem.out_features < 4 else None,
        needs="torch",
    )
)
