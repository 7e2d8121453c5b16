"""Tuned configs: those that the user's own searches found, those that ship with the package, and which of them applies.

The user's cache holds one readable file a key under ``$SDBENCH_CACHE``, else ``$XDG_CACHE_HOME/sdbench``, else ``~/.cache/sdbench``. The
configs that ship lie beside this module as ``sm_<capability>.json`` and are written by ``sdbench tune --export`` on a real device alone.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError

from sdbench.errors import SdbenchError
from sdbench.kernels.registry import Config, Problem, Variant
from sdbench.kernels.tuned.choice import CHOICE_SCHEMA, DTYPE_NAMES, SET_SCHEMA, Choice, Key, Shipped, key_of
from sdbench.pattern import Pattern
from sdbench.results import strict_json, write_atomic

__all__ = [
    "CHOICE_SCHEMA", "DTYPE_NAMES", "SET_SCHEMA", "Choice", "Key", "Shipped",
    "cache_folder", "export", "fastest", "find_shipped", "key_of", "load", "lookup", "open_set", "read_shipped", "shipped", "store",
]  # fmt: skip

Source = Literal["cache", "shipped", "default"]
"""Where a config comes from."""


def cache_folder() -> Path:
    """The folder of the user's tuned configs."""
    chosen = os.environ.get("SDBENCH_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdbench"
    return base / "tuned"


def load(key: Key) -> Choice | None:
    """The user's own choice for a key; None where there is none.

    Raises:
        SdbenchError: The file cannot be read, is damaged, or holds the choice for something else.
    """
    path = cache_folder() / key.file
    try:
        choice = Choice.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SdbenchError(f"cannot read the tuned config {path}: {error.strerror}") from error
    except ValidationError as error:
        raise SdbenchError(f"the tuned config {path} is damaged ({_what(error)})") from error
    if choice.key != key:
        raise SdbenchError(f"the tuned config {path} is for something else than its name says")
    return choice


def store(choice: Choice) -> None:
    """Writes a choice into the user's cache, in place of an earlier one.

    Raises:
        SdbenchError: The folder cannot be written.
    """
    path = cache_folder() / choice.key.file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, strict_json(choice, indent=1) + "\n")
    except OSError as error:
        raise SdbenchError(f"cannot keep tuned configs in {cache_folder()}: {error.strerror}; set SDBENCH_CACHE") from error
    _choice.cache_clear()


def find_shipped(key: Key) -> Choice | None:
    """The choice that ships for a key's capability and task, whatever GPU, source and Triton it was found with.

    Without one, that of another pattern which keeps as many values a mask word: the kernels do the same with it but for where the bits are.
    """
    choices = shipped(key.capability)
    same = next((choice for choice in choices if choice.key.task == key.task), None)
    return same or next((choice for choice in choices if _alike(choice.key, key)), None)


def _alike(shipped: Key, key: Key) -> bool:
    if shipped.pattern is None or key.pattern is None or replace(shipped, pattern=key.pattern).task != key.task:
        return False
    return Pattern.parse(shipped.pattern).kept_per_word == Pattern.parse(key.pattern).kept_per_word


@cache
def shipped(capability: int) -> tuple[Choice, ...]:
    """The choices that ship for a compute capability; empty where none do.

    Raises:
        SdbenchError: The file is damaged.
    """
    found = read_shipped(Path(__file__).with_name(f"sm_{capability}.json"))
    return found.choices if found else ()


def read_shipped(path: Path) -> Shipped | None:
    """A file of the form that ships; None where there is none.

    Raises:
        SdbenchError: It cannot be read, or holds something else.
    """
    try:
        return Shipped.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SdbenchError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise SdbenchError(f"{path} is no file of tuned configs ({_what(error)})") from error


def open_set(path: Path, capability: int) -> Shipped:
    """The file that choices are to be exported to, or an empty set where there is none yet.

    Raises:
        SdbenchError: It holds something else than choices of this capability, or its folder does not exist.
    """
    present = read_shipped(path) or Shipped(schema=SET_SCHEMA, capability=capability, choices=())
    if present.capability != capability:
        raise SdbenchError(f"{path} holds configs of compute capability {present.capability}, not {capability}; choose another file")
    if not path.absolute().parent.is_dir():
        raise SdbenchError(f"cannot write {path}: its folder does not exist")
    return present


def export(path: Path, capability: int, choices: Iterable[Choice]) -> None:
    """Writes choices into a file of the form that ships, beside those of other tasks that it holds.

    Raises:
        SdbenchError: As :func:`open_set`, or the file cannot be written.
    """
    merged = open_set(path, capability).merged(choices)
    try:
        write_atomic(path, merged.dump())
    except OSError as error:
        raise SdbenchError(f"cannot write {path}: {error.strerror}") from error


def lookup(variant: Variant, problem: Problem, device: torch.device) -> tuple[Config, Source]:
    """The config of a variant for a problem, and where it comes from: the user's cache, else what ships, else the variant's default.

    A tuned config was right when it was found; who uses one checks it again first. A damaged file is a warning and counts as none.

    Args:
        variant: The variant.
        problem: What it multiplies.
        device: Where.
    """
    found = _choice(key_of(variant, problem, device), cache_folder())
    return (found[0].config, found[1]) if found else (variant.default(problem), "default")


def fastest(variants: Sequence[Variant], problem: Problem, device: torch.device) -> Variant:
    """Of several variants the one whose tuned choice was the fastest; the first where not all of them have one.

    Args:
        variants: At least one.
        problem: What they multiply.
        device: Where; a CPU has no choices.
    """
    if device.type != "cuda":
        return variants[0]
    choices = [_choice(key_of(variant, problem, device), cache_folder()) for variant in variants]
    times = [choice[0].us["p50"] if choice else None for choice in choices]
    return variants[0] if None in times else min(zip(times, variants, strict=True), key=lambda pair: pair[0] or 0.0)[1]


@cache
def _choice(key: Key, folder: Path) -> tuple[Choice, Source] | None:
    """Remembers, for the folder that it looked in: a decode step asks for hundreds of configs."""
    try:
        choice = load(key)
        if choice:
            return choice, "cache"
    except SdbenchError as error:
        warnings.warn(f"{error}; left out", stacklevel=3)
    choice = find_shipped(key)
    return (choice, "shipped") if choice else None


def _what(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]
