"""The files of a checkpoint folder: its config, which file holds which tensor, and whether they are whole."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sdbench.errors import CheckFailed, UsageError
from sdbench.words import counted

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PROVENANCE_FILE = "sdbench.json"
"""Beside what ``sdbench prune`` writes, packed or dense."""


@dataclass(frozen=True)
class CheckpointFiles:
    """An opened checkpoint folder.

    Attributes:
        folder: Where it lies.
        config: Contents of ``config.json``.
        tensors: Path of the file that holds a tensor, by the tensor's name.
        shapes: Shape by the tensor's name.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def open(cls, folder: Path) -> "CheckpointFiles":
        """Reads the config and the headers of the weight files.

        Raises:
            UsageError: Not a checkpoint folder.
            CheckFailed: A weight file is missing or cut short, or lacks a tensor that the index promises.
        """
        config = _json(folder / "config.json")
        if not (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
            raise UsageError(f"{folder} has no {WEIGHTS} and no {INDEX}, so it is no checkpoint in safetensors")
        promised = _json(folder / INDEX)["weight_map"] if (folder / INDEX).is_file() else {}
        tensors: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name in sorted(set(promised.values())) or [WEIGHTS]:
            path = folder / name
            if not path.is_file():
                raise CheckFailed(f"{folder}: the weight file {name} is missing; copy or download the checkpoint again")
            with _opened(path) as file:
                for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    tensors[key], shapes[key] = path, tuple(file.get_slice(key).get_shape())
        missing = sorted(set(promised) - set(tensors))
        if missing:
            raise CheckFailed(
                f"{folder}: tensor {missing[0]} is missing from {promised[missing[0]]} ({counted(len(missing), 'such tensor')})"
            )
        return cls(folder, config, tensors, shapes)

    def tensor(self, name: str) -> Tensor:
        """Reads one tensor.

        Raises:
            CheckFailed: There is none of this name.
        """
        if name not in self.tensors:
            raise CheckFailed(f"{self.folder}: tensor {name} is missing")
        with _opened(self.tensors[name]) as file:
            return file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckFailed(f"{path} is damaged or cut short ({error}); copy or download it again") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path.parent} is no checkpoint folder: cannot read {path.name} ({error.strerror})") from error
    except ValueError as error:
        raise CheckFailed(f"{path} is no JSON ({error}); copy or download it again") from error
    if not isinstance(found, dict):
        raise CheckFailed(f"{path} holds no JSON object")
    return found
