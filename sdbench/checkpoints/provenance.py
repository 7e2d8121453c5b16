"""``sdbench.json``: where a pruned checkpoint comes from, and the hashes by which it can be told from any other."""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from sdbench import __version__
from sdbench.checkpoint_files import PROVENANCE_FILE
from sdbench.checkpoints.layout import Format
from sdbench.errors import CheckFailed
from sdbench.results import strict_json
from sdbench.versions import package_version

SCHEMA: Literal["sdbench.checkpoint/1"] = "sdbench.checkpoint/1"
_BLOCK = 1 << 24
HASH_THREADS = 8
"""Tensors that are hashed at once, each by blocks of `_BLOCK` elements."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Source(_Record):
    """The dense model; ``sha256`` is over all of its tensors as they were loaded, see `state_sha256`."""

    model: str
    kind: str
    revision: str | None
    dtype: str
    sha256: str


class Example(_Record):
    """One calibration example, by its id and the hash of the prompt's token ids."""

    id: str
    prompt_hash: str


class Rows(_Record):
    """Rows (token positions) that the layers saw in calibration: of the layer with the fewest, and of that with the most."""

    min: int
    max: int


class Calibration(_Record):
    """What the pruning method was given; ``report`` tells how the texts came about, ``arguments`` every option of the command."""

    source: str | None
    examples: list[Example]
    rows: Rows | None
    report: dict[str, Any]
    arguments: dict[str, Any]


class Layer(_Record):
    """One pruned linear: its dense shape [out, in] and the method's report."""

    shape: tuple[int, int]
    report: dict[str, Any]


class Origin(_Record):
    """What is known before the files are written."""

    schema_: Literal["sdbench.checkpoint/1"] = Field(default=SCHEMA, alias="schema")
    method: str
    pattern: str
    seed: int
    source: Source
    calibration: Calibration
    layers: dict[str, Layer]


class Provenance(Origin):
    """The contents of ``sdbench.json``.

    ``tensors`` has the SHA-256 of every tensor's bytes, ``files`` that of every file beside this one, and ``sha256`` that of this document
    without the field itself.
    """

    format: Format
    created: str
    versions: dict[str, str | None]
    tensors: dict[str, str]
    files: dict[str, str]
    sha256: str = ""

    def digest(self) -> str:
        """SHA-256 of the document without ``sha256``."""
        return hashlib.sha256(strict_json(self.model_dump(by_alias=True, exclude={"sha256"})).encode()).hexdigest()


def make_provenance(origin: Origin, kind: Format, tensors: Mapping[str, str], files: Mapping[str, str]) -> Provenance:
    """Completes the record of a checkpoint whose files are written."""
    found = Provenance(
        **{name: getattr(origin, name) for name in Origin.model_fields},
        format=kind,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"sdbench": __version__, **{name: package_version(name) for name in ("torch", "transformers")}},
        tensors=dict(tensors),
        files=dict(files),
    )
    return found.model_copy(update={"sha256": found.digest()})


def read_provenance(folder: Path) -> Provenance | None:
    """The checkpoint's record; None where there is no ``sdbench.json``.

    Raises:
        CheckFailed: The file is no such record, or was changed after it was written.
    """
    file = folder / PROVENANCE_FILE
    if not file.is_file():
        return None
    try:
        found = Provenance.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "the file"
        raise CheckFailed(f"{file} is no {SCHEMA} record ({where}: {problem['msg']})") from error
    if found.sha256 != found.digest():
        raise CheckFailed(f"{file} was changed after it was written: its own sha256 does not fit")
    return found


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's elements as they lie in memory, row by row.

    Args:
        tensor: Any shape, dtype and device.
    """
    digest = hashlib.sha256()
    for block in tensor.detach().reshape(-1).split(_BLOCK):
        digest.update(block.contiguous().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def state_sha256(parts: Iterable[Mapping[str, Tensor]]) -> str:
    """One SHA-256 for a model: over name, dtype, shape and content of each tensor, in the order of the names.

    Args:
        parts: The model's tensors by name, some at a time: not all of a streamed model are in memory at once.
    """
    lines: dict[str, str] = {}
    # SHA-256 leaves the interpreter's lock: one thread would take longer over a model than reading it.
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        for state in parts:
            for (name, tensor), found in zip(state.items(), pool.map(tensor_sha256, state.values()), strict=True):
                lines[name] = f"{name} {tensor.dtype} {list(tensor.shape)} {found}\n"
    return hashlib.sha256("".join(lines[name] for name in sorted(lines)).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
