"""Which part of generation a forward pass belongs to, said explicitly.

A forward of one position may be a decode step or the prefill of a one-token prompt, so nothing may guess the phase from shapes.
The loop that drives the model opens a phase; whatever runs inside the forward (activation hooks, packed linears) reads it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

PhaseName = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Phase:
    """The phase of the forward pass that is running.

    Args:
        name: ``prefill`` or ``decode``.
        rows: Bool [batch, positions], True for the rows that count (no padding, no finished reply), or float32 with each row's weight, 0
            for those that don't count; None when all do.
    """

    name: PhaseName
    rows: Tensor | None = None


_CURRENT: ContextVar[Phase | None] = ContextVar("sdbench_phase", default=None)


def current_phase() -> Phase | None:
    """The phase that is open, or None outside of any."""
    return _CURRENT.get()


@contextmanager
def phase(name: PhaseName, rows: Tensor | None = None) -> Iterator[Phase]:
    """Opens a phase for the forward passes inside the ``with`` block.

    Args:
        name: ``prefill`` or ``decode``.
        rows: Which rows count, as in `Phase`; None when all do.

    Raises:
        RuntimeError: A phase is open already; two loops would count the same rows.
    """
    running = _CURRENT.get()
    if running is not None:
        raise RuntimeError(f"a {name} phase inside a {running.name} phase: each forward belongs to exactly one")
    opened = Phase(name, rows)
    token = _CURRENT.set(opened)
    try:
        yield opened
    finally:
        _CURRENT.reset(token)
