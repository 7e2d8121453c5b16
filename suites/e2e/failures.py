"""What an arm may fail by alone: it is a row with its outcome, and the others are judged on the model as it was."""

import gc
from collections.abc import Mapping

import torch
from torch import nn
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from sdbench.errors import one_line

FAILURES = (torch.OutOfMemoryError, TritonError)
"""No memory, or a kernel that does not compile or has no room on the GPU."""


def failure_of(error: Exception) -> dict[str, str]:
    """Outcome and reason of what could not run, as rows of ``sdbench decode`` have them."""
    room = isinstance(error, torch.OutOfMemoryError | OutOfResources)
    return {"outcome": "out_of_resources" if room else "compile_error", "reason": one_line(error, 200)}


def free_memory() -> None:
    """Gives back what an attempt held, cycles and the allocator's cache too; to be called once its exception is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def put_back(linears: Mapping[str, nn.Linear], places: Mapping[str, torch.device]) -> None:
    """Has weights lie where they did: as an arm failed, there may have been no room for originals that had waited in main memory."""
    for name, linear in linears.items():
        linear.weight.data = linear.weight.data.to(places[name])
