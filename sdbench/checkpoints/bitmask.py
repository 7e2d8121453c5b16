"""Old compressed-tensors checkpoints of sparse weights, ``sparse-24-bitmask`` and ``sparse-bitmask``, read into our storage form.

Both hold ``<name>.compressed``, ``<name>.bitmask`` (little-endian bits) and ``<name>.shape``. ``sparse-24-bitmask`` has two values a group
of four, as a matrix; ``sparse-bitmask`` has the non-zero values in one row and ``<name>.row_offsets``, which nothing here needs. The
bitmask says where a value belongs, never the value. Early files name a weight ``<name>.weight.compressed``.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdbench.checkpoint_files import CheckpointFiles
from sdbench.checkpoints.layout import layer_tensors
from sdbench.checkpoints.stored import to_stored
from sdbench.errors import CheckFailed, SdbenchError
from sdbench.packing import require_exact
from sdbench.pattern import Pattern
from sdbench.words import counted

SPARSE_24 = "sparse-24-bitmask"
SPARSE = "sparse-bitmask"

log = logging.getLogger("sdbench")


def format_of(config: Mapping[str, Any]) -> str | None:
    """Which of the two formats a ``config.json`` names; None for neither."""
    named = (_entry(config).get("sparsity_config") or {}).get("format")
    return named if named in (SPARSE_24, SPARSE) else None


def pattern_of(config: Mapping[str, Any]) -> Pattern:
    """The pattern that the config names; 2:4 where it names none.

    Raises:
        SdbenchError: The weights are quantised as well.
    """
    entry = _entry(config)
    if entry.get("config_groups"):
        raise SdbenchError("compressed-tensors checkpoint with quantised sparse weights: only unquantised ones can be read")
    sparsity = entry["sparsity_config"]
    pruned, _, group = str(sparsity.get("sparsity_structure")).partition(":")
    if sparsity["format"] == SPARSE_24 or not (pruned.isdecimal() and group.isdecimal() and int(pruned)):
        return Pattern(2, 4)
    # There N:M counts the zeros.
    return Pattern(int(group) - int(pruned), int(group))


def read(files: CheckpointFiles) -> tuple[Pattern, list[str], dict[str, Tensor]]:
    """Reads the whole checkpoint.

    Layers of ``sparse-bitmask`` that hold no N:M pattern (an embedding, say) come back as dense weights, and the log says which.

    Returns:
        Pattern, packed layers, and every tensor by its name in our layout.

    Raises:
        CheckFailed: A damaged tensor, a ``sparse-24-bitmask`` that isn't 2:4, or no layer at all with the pattern.
        SdbenchError: The weights are quantised as well.
    """
    pattern = pattern_of(files.config)
    exact = format_of(files.config) == SPARSE_24
    layers: list[str] = []
    dense: list[str] = []
    state: dict[str, Tensor] = {}
    for stem in [name.removesuffix(".compressed") for name in files.tensors if name.endswith(".compressed")]:
        name = stem.removesuffix(".weight")
        weight, keep = read_weight(files, stem)
        if exact:
            require_exact(keep, pattern, name)
        elif keep.ndim != 2 or not fits(keep, pattern):
            dense.append(name)
            state[f"{name}.weight"] = weight
            continue
        stored = to_stored(weight, fill_up(keep, pattern))
        layers.append(name)
        state |= layer_tensors(name, stored, "packed")
    parts = (".compressed", ".bitmask", ".shape", ".row_offsets")
    state |= {name: files.tensor(name) for name in files.tensors if not name.endswith(parts)}
    if not layers:
        raise CheckFailed(f"{files.folder}: no layer holds the pattern {pattern}, so there is nothing to pack")
    if dense:
        log.warning("%s: %d layers hold no %s pattern and stay dense, %s the first", files.folder, len(dense), pattern, dense[0])
    return pattern, layers, state


def read_mask(files: CheckpointFiles, stem: str) -> Tensor:
    """The mask of a weight that is stored under ``<stem>.bitmask``, bool of the weight's shape.

    Raises:
        CheckFailed: ``<stem>.bitmask`` is not as large as ``<stem>.shape`` says, or one of the two is missing.
    """
    shape = [int(n) for n in files.tensor(f"{stem}.shape").flatten()]
    packed = files.tensor(f"{stem}.bitmask")
    if list(packed.shape) != [*shape[:-1], -(-shape[-1] // 8)] or packed.dtype != torch.uint8:
        raise CheckFailed(f"tensor {stem}.bitmask is {packed.dtype} {list(packed.shape)}, which is no bitmask of a weight {shape}")
    return torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1, count=shape[-1], bitorder="little")).bool()


def read_weight(files: CheckpointFiles, stem: str) -> tuple[Tensor, Tensor]:
    """A stored weight as a dense tensor, and its mask.

    Raises:
        CheckFailed: The three tensors don't fit together.
    """
    keep, values = read_mask(files, stem), files.tensor(f"{stem}.compressed").flatten()
    if int(keep.sum()) != len(values):
        raise CheckFailed(f"tensor {stem}.compressed has {counted(len(values), 'value')}, but {stem}.bitmask marks {int(keep.sum())}")
    return torch.zeros(keep.shape, dtype=values.dtype).masked_scatter_(keep, values), keep


def fits(keep: Tensor, pattern: Pattern) -> bool:
    """Whether no group of a mask [out, in] has more than N columns."""
    if keep.shape[1] % pattern.group:
        return False
    return bool((keep.view(len(keep), -1, pattern.group).sum(-1) <= pattern.keep).all())


def fill_up(keep: Tensor, pattern: Pattern) -> Tensor:
    """The mask [out, in] with N columns in every group: where it has fewer, a kept weight was 0, and the lowest free columns join."""
    groups = keep.view(len(keep), -1, pattern.group)
    order = groups.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(groups).scatter_(-1, order[..., : pattern.keep], True).view(keep.shape)


def _entry(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config's entry; its name has changed over time."""
    return config.get("quantization_config") or config.get("compression_config") or {}
