"""Device and number type by the names that the command line takes; needs torch and nothing else."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sdbench.errors import SdbenchError, UsageError
from sdbench.words import counted

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def resolve_device(text: str | None) -> torch.device:
    """The device of ``--device``: ``auto`` (or None), ``cpu``, ``cuda`` or ``cuda:N``; a GPU becomes the current one.

    Raises:
        UsageError: Not such a name.
        SdbenchError: CUDA was asked for and there is none, or not that many.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text in (None, "auto"):
        text = "cuda" if found else "cpu"
    if text == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", str(text))
    if match is None:
        raise UsageError(f"device {text!r}: use auto, cpu, cuda or cuda:N")
    if not found:
        raise SdbenchError(f"device {text!r} was asked for, but torch {torch.__version__} finds no CUDA GPU; use --device cpu")
    index = int(match[1]) if match[1] else torch.cuda.current_device()
    if index >= found:
        raise SdbenchError(f"device {text!r} was asked for, but the last of {counted(found, 'CUDA GPU')} is cuda:{found - 1}")
    # Streams, events and Triton's launches are of the current device.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def require_gpu(device: torch.device, asked: str, why: str) -> None:
    """Refuses what needs a GPU, before anything runs.

    Args:
        device: The resolved device.
        asked: The text of ``--device``.
        why: What needs a GPU, and what to do without one.

    Raises:
        UsageError: The device is a CPU, as asked for.
        SdbenchError: There is no GPU.
    """
    if device.type == "cuda":
        return
    raise UsageError(f"--device {asked}: {why}") if asked == "cpu" else SdbenchError(f"no CUDA device: {why}")


def devices_of(model: Any) -> list[torch.device]:
    """The devices that a model's parameters are on, in the model's order."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters()))


def elsewhere(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU that is not the current one."""
    return tensor.is_cuda and tensor.get_device() != torch.cuda.current_device()


def at_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """A block in which a tensor's GPU is the current one; where it is already, nothing is done, which takes less time."""
    return torch.cuda.device_of(tensor) if elsewhere(tensor) else nullcontext()


def map_devices(model: Any, strategy: str) -> dict[str, torch.device]:
    """Devices of a model's parts by dotted name, by accelerate: all GPUs that are visible, and nothing else.

    Args:
        model: A transformers model, its weights anywhere (on the meta device, say).
        strategy: A name in `DEVICE_MAPS`.

    Raises:
        SdbenchError: The GPUs are too small for the model, or all of it is for one GPU that is not the current one.
    """
    from accelerate.utils import get_balanced_memory, infer_auto_device_map

    whole = list(model._no_split_modules or ())
    balanced = {"no_split_module_classes": whole, "low_zero": strategy == "balanced_low_0"}
    memory = None if strategy == "sequential" else get_balanced_memory(model, **balanced)
    found = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)
    if elsewhere := [name for name, place in found.items() if not isinstance(place, int)]:
        count = torch.cuda.device_count()
        parts = f"{elsewhere[0] or 'the model'} and {counted(len(elsewhere) - 1, 'more part')}"
        raise SdbenchError(
            f"--device-map {strategy}: {parts} find no room on the {counted(count, 'GPU')}; use more of them, or a smaller model"
        )
    places = {name: torch.device("cuda", place) for name, place in found.items()}
    alone = next(iter(places.values()))
    # Triton launches on the current device, which a model on one GPU leaves to --device.
    if set(places.values()) == {alone} and alone.index != torch.cuda.current_device():
        raise SdbenchError(f"--device-map {strategy} finds room for the whole model on {alone} alone; use --device {alone} in its place")
    return places


def resolve_dtype(text: str | None, device: torch.device) -> torch.dtype:
    """The number type of ``--dtype``: ``bf16``, ``fp16``, ``fp32``, or ``auto`` (or None): bf16 on CUDA, fp32 on the CPU.

    Raises:
        UsageError: Not such a name.
    """
    if text in (None, "auto"):
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if text not in DTYPES:
        raise UsageError(f"dtype {text!r}: use auto, {', '.join(DTYPES)}")
    return DTYPES[str(text)]


def unhook_linears(model: Any, places: Mapping[str, torch.device]) -> None:
    """Takes accelerate's hooks off linears inside a part, which brings their input already: packed ones have none, and would gain by it.

    Args:
        model: Spread over devices.
        places: Devices of its parts by dotted name.
    """
    from accelerate.hooks import remove_hook_from_module

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in places:
            remove_hook_from_module(module)
