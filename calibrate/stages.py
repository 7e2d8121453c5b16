"""How long each stage of calibrating and pruning takes, when they take turns."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from sdbench.engine.greedy import clock

Item = TypeVar("Item")


class Stages:
    """Adds up seconds by stage; each time is taken once the device has finished.

    Args:
        device: Where the work is done.

    Attributes:
        seconds: By stage, in the order in which they first ended.
        items: How many things a stage made, where that is counted.
        hidden: Bytes of the hidden states that went from block to block, and where they lay meanwhile; None where none did.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds: dict[str, float] = {}
        self.items: dict[str, int] = {}
        self.hidden: dict[str, int | str] | None = None

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Counts the block as a part of the stage; stages don't nest."""
        start = clock(self._device)
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + clock(self._device) - start

    def timed(self, stage: str, items: Iterable[Item]) -> Iterator[Item]:
        """The items; what it takes to make them counts, and what the caller does with them does not."""
        iterator = iter(items)
        while True:
            with self(stage):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item
            # The caller may have let go of it: a Hessian, say.
            del item
