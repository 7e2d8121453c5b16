"""Look-ups by name that answer a misspelling with the nearest names."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from sdbench.errors import UsageError

Entry = TypeVar("Entry")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the names closest to ``name``, or every name where none is close."""
    names = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names) or 'none'}"


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
