"""How a packed checkpoint is laid out: tensor names, the quantisation entry of ``config.json``, and the tensors of one layer.

A pruned linear ``<name>`` is stored as ``<name>.compressed``, ``<name>.bitmask`` and ``<name>.shape`` (see
:class:`sdbench.packing.StoredWeight`), and as ``<name>.weight`` with no element. Without the last one transformers, when it does not know
the format, would fill the linears that it misses with random numbers and go on; a weight of the wrong size stops it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sdbench.checkpoints.stored import to_dense
from sdbench.errors import SdbenchError, UsageError
from sdbench.packing import StoredWeight
from sdbench.pattern import Pattern

QUANT_METHOD = "sdbench"
VERSION = 1
PARTS = ("compressed", "bitmask", "shape")
GUARD = "weight"

Format = Literal["packed", "dense"]


def quantization_config(pattern: Pattern, layers: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a packed checkpoint's ``config.json``."""
    return {"quant_method": QUANT_METHOD, "version": VERSION, "pattern": str(pattern), "layers": list(layers)}


def read_quantization_config(entry: Mapping[str, Any]) -> tuple[Pattern, list[str]]:
    """Pattern and packed layers of a ``quantization_config``.

    Raises:
        SdbenchError: A version that this sdbench does not read, or an entry that is damaged.
    """
    if entry.get("version") != VERSION:
        raise SdbenchError(
            f"packed checkpoint of format version {entry.get('version')!r}, and this sdbench reads version {VERSION}; "
            "use the sdbench that wrote it, or prune again"
        )
    layers = entry.get("layers")
    if not isinstance(layers, list) or not layers or not all(isinstance(name, str) for name in layers):
        raise SdbenchError("config.json: quantization_config.layers is no list of layer names; the checkpoint is damaged")
    try:
        return Pattern.parse(str(entry.get("pattern"))), layers
    except UsageError as error:
        raise SdbenchError(f"config.json: quantization_config.pattern: {error}") from error


def stored_shapes(out_features: int, in_features: int, pattern: Pattern) -> dict[str, tuple[int, ...]]:
    """Shape of each stored tensor of a layer, the guard included."""
    return {
        "compressed": (out_features, in_features * pattern.keep // pattern.group),
        "bitmask": (out_features, -(-in_features // 8)),
        "shape": (2, 1),
        GUARD: (0,),
    }


def layer_tensors(name: str, stored: StoredWeight, kind: Format) -> dict[str, Tensor]:
    """A pruned layer's tensors by their names in the checkpoint.

    Args:
        name: The linear's dotted name.
        stored: Its weight.
        kind: ``"packed"``, or ``"dense"`` for the one matrix with zeros.
    """
    if kind == "dense":
        return {f"{name}.{GUARD}": to_dense(stored, name)}
    parts = {f"{name}.{part}": getattr(stored, part) for part in PARTS}
    return parts | {f"{name}.{GUARD}": torch.empty(0, dtype=stored.compressed.dtype)}
