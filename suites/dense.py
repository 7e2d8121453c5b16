"""The dense model of a pruning run: loaded whole or streamed, looked at in every tensor, and hashed."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sdbench.calibrate.numerics import require_weight
from sdbench.calibrate.select import select_linears
from sdbench.calibrate.sequential import find_blocks
from sdbench.calibrate.stages import Stages
from sdbench.checkpoints.layout import GUARD
from sdbench.checkpoints.provenance import Source, state_sha256
from sdbench.devices import devices_of
from sdbench.errors import SdbenchError
from sdbench.models import LoadedModel, load_model, open_model, weight_bytes
from sdbench.packing import require_finite
from sdbench.progress import Progress, Task
from sdbench.streaming import unique_state
from sdbench.suites.e2e.options import CalibrationOptions

DAMAGED = "the checkpoint is damaged; download or convert it again"


def load_dense(options: CalibrationOptions, progress: Progress, *, stream: bool) -> tuple[LoadedModel, dict[str, nn.Linear]]:
    """The dense model and its linears that will be pruned.

    Args:
        options: The run.
        progress: Where to report.
        stream: Have no more of it in memory than what lies outside of its blocks.

    Raises:
        UsageError: A pattern or width that doesn't fit.
        SdbenchError: A model that cannot be loaded, or does not fit.
    """
    what = options.spec, options.device, options.dtype, progress.note
    if not (stream or options.device_map):
        _require_room(options, progress)
    loaded = open_model(*what) if stream else load_model(*what, options.device_map)
    linears = select_linears(loaded.model, options.targets, options.ignore)
    for name, linear in linears.items():
        options.pattern.require_width(linear.in_features, name)
    if loaded.stream:
        loaded.stream.keep_outside(find_blocks(loaded.model, linears))
    return loaded, linears


def source_of(options: CalibrationOptions, loaded: LoadedModel, linears: Mapping[str, nn.Linear], progress: Progress) -> Source:
    """Which model it is, down to its weights, each of which is looked at.

    Args:
        options: The run.
        loaded: The dense model.
        linears: Layers that will be pruned.
        progress: Where to report; a streamed model's weights are read or drawn for this alone.

    Raises:
        SdbenchError: A damaged model: NaN or Inf, in whatever tensor.
    """
    parts = loaded.stream.parts() if loaded.stream else [unique_state(loaded.model)]

    def sound(task: Task) -> Iterator[dict[str, Tensor]]:
        for state in parts:
            for name, tensor in state.items():
                layer, _, what = name.rpartition(".")
                if layer in linears and what == GUARD:
                    require_weight(tensor, layer)
                elif tensor.is_floating_point():
                    require_finite(tensor, layer, what, DAMAGED)
            yield state
            task.advance()

    with progress.task("hashing weights", 1 + len(loaded.stream.blocks) if loaded.stream else 1) as task:
        sha256 = state_sha256(sound(task))
    return Source(
        model=options.spec.name,
        kind=options.spec.kind,
        revision=loaded.spec.revision,
        dtype=str(options.dtype).removeprefix("torch."),
        sha256=sha256,
    )


def places(options: CalibrationOptions, loaded: LoadedModel) -> list[torch.device]:
    """The run's device, and others that the model is spread over; a streamed one is on the meta device for the most part."""
    return list(dict.fromkeys((options.device, *(device for device in devices_of(loaded.model) if device.type != "meta"))))


def streamed(loaded: LoadedModel, stages: Stages) -> dict[str, Any] | None:
    """What streaming took: the number of blocks, bytes of the largest, the most bytes of weights at once, and the hidden states between
    blocks.
    """
    if loaded.stream is None:
        return None
    largest = max(sum(tensor.nbytes for tensor in unique_state(block).values()) for block in loaded.stream.blocks.values())
    return {
        "blocks": len(loaded.stream.blocks),
        "block_bytes": largest,
        "peak_weight_bytes": loaded.stream.peak_bytes,
        "hidden_states": stages.hidden,
    }


def _require_room(options: CalibrationOptions, progress: Progress) -> None:
    """Refuses a model whose weights alone are larger than what is free on the GPU, before they are read.

    Raises:
        SdbenchError: It does not fit.
    """
    if options.device.type != "cuda" or options.spec.kind == "gguf":
        return
    nbytes = weight_bytes(options.spec, options.dtype, progress.note)
    free, _ = torch.cuda.mem_get_info(options.device)
    if nbytes > free:
        raise SdbenchError(
            f"{options.spec.name} takes {nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB of {options.device} are free; --stream prunes "
            "it with one block in memory at a time"
        )
