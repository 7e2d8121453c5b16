"""What the weights of a live model take in memory: counted, and as torch's allocator and the driver have it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sdbench.devices import devices_of
from sdbench.engine.decoders import Decoder
from sdbench.engine.fused import FusedDecoder
from sdbench.engine.packed_linear import PackedLinear
from sdbench.memory import NO_GPU, InUse, in_use, storage_bytes
from sdbench.models import LoadedModel

SPREAD = "the model is spread over several GPUs, and these accounts are of one"
"""Why there is no account of a GPU's memory."""


def weights_memory(loaded: LoadedModel, packed: Mapping[str, PackedLinear], decoder: Decoder, rounded: bool = False) -> dict[str, Any]:
    """Bytes of the weights, once by what they hold and once by each account of the memory that is really in use.

    Args:
        loaded: The model, with its packed linears in place.
        packed: Those modules by name; empty for a dense model.
        decoder: What decodes it; its weights count where it has any of its own.
        rounded: Whether other weights stand in for the original ones, which the run keeps.

    Returns:
        ``parameters``, the model's own and what a dense prefill reads; ``packed``, packed and 8-bit weights; ``weights``, both, each
        memory once; ``cache``, keys and values of a fused step, or None; ``allocated``, ``process`` and ``gpu``: GPU memory as in
        :class:`sdbench.memory.InUse`, less what was in use before the model was loaded and less the cache, or None with a reason, so that
        they are the weights and what else decoding needs; ``originals``, where the unpruned weights of pruned or rounded linears are:
        ``"main memory"``, ``"in use"`` by a dense prefill, ``"kept"`` on the device with no use for this model; None where none are.
    """
    products = [product.weight for product in decoder.step.products()] if isinstance(decoder, FusedDecoder) else []
    prompts = [module.prefill_weight for module in packed.values() if module.prefill_weight is not None]
    dense = [*loaded.model.parameters(), *prompts, *(weight for weight in products if isinstance(weight, Tensor))]
    own = [module.packed for module in packed.values()]
    narrow = [tensor for weight in (*own, *products) if not isinstance(weight, Tensor) for tensor in weight.tensors]
    cache = decoder.step.keys.nbytes + decoder.step.values.nbytes if isinstance(decoder, FusedDecoder) else None
    memory: dict[str, Any] = {
        "parameters": storage_bytes(dense),
        "packed": storage_bytes(narrow),
        "weights": storage_bytes([*dense, *narrow]),
        "cache": cache,
        "originals": _originals(bool(prompts), bool(packed), rounded, loaded.model.device.type),
    }
    spread = len(devices_of(loaded.model)) > 1
    now, before = InUse(process_reason=SPREAD) if spread else in_use(loaded.model.device), loaded.before
    for name in ("allocated", "process", "gpu"):
        then, found = getattr(before, name), getattr(now, name)
        missing = then is None or found is None
        memory[name] = None if missing else found - then - (cache or 0)
        memory[f"{name}_reason"] = (now.process_reason if name == "process" else SPREAD if spread else NO_GPU) if missing else None
    return memory


def _originals(read: bool, pruned: bool, rounded: bool, device: str) -> str | None:
    if read:
        return "in use"
    if rounded or (pruned and device == "cpu"):
        return "kept"
    return "main memory" if pruned else None
