"""A stand-in for a kernel, which tells how it was launched."""

from collections.abc import Callable
from typing import Any

import torch
from triton.compiler import CompiledKernel


class Launches(CompiledKernel):
    """A kernel, and what Triton compiles of it."""

    def __init__(self) -> None:
        self.module = None
        self.seen: list[tuple[Any, ...]] = []
        self.looked_up = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CompiledKernel]:
        def launch(*operands: Any, num_warps: int | None = None, **named: Any) -> CompiledKernel:
            self.looked_up += num_warps is not None
            pointers = [operand.data_ptr() if isinstance(operand, torch.Tensor) else operand for operand in operands]
            assert named.pop("stream", 0) == 0
            named.pop("launch_pdl", None)
            self.seen.append((grid, *pointers, *named.values()))
            return self

        return launch
