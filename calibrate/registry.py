"""Look-ups by name that answer a misspelling with the nearest names."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from sdbench.errors import UsageError

Entry = TypeVar("Entry")

FEW = 20
"""Names that a line may list."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the names closest to ``name``; where none is close every name, or the nearest where those are many."""
    names = list(dict.fromkeys(known))
    if close := difflib.get_close_matches(name, names, n=3, cutoff=0.6):
        return f"did you mean {' or '.join(close)}?"
    if len(names) > FEW:
        return f"the nearest of {len(names)}: {', '.join(difflib.get_close_matches(name, names, n=3, cutoff=0))}"
    return f"known: {', '.join(names) or 'none'}"


def lookup(kind: str, name: str, registry: Mapping[str, Entry]) -> Entry:
    """The registry's entry of that name.

    Args:
        kind: What the registry holds, for the message: ``"method"``, ``"calibration source"``.
        name: Name as the user wrote it.
        registry: Entries by name.

    Raises:
        UsageError: No entry has this name.
    """
    if name not in registry:
        raise UsageError(f"unknown {kind} {name!r}; {did_you_mean(name, registry)}")
    return registry[name]
