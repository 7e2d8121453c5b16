"""How fast one decode step could be: the bytes that it reads over the measured read bandwidth."""

from collections.abc import Mapping
from typing import Any

import torch

from sdbench.engine.packed_linear import PackedLinear
from sdbench.kernels.read import read_bandwidth

_PROBE_BYTES = 1 << 30


def step_bytes(model: Any, packed: Mapping[str, PackedLinear], context: int) -> int:
    """Bytes that one decode step must read.

    Every parameter once, packed linears by their mask and values; of an input embedding that is not also the output embedding, one row;
    of the KV cache, ``context`` positions.

    Args:
        model: The live transformers model, packed modules in place.
        packed: Those modules, by name.
        context: Positions in the cache.
    """
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    parameters = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    # A packed linear's matrices are buffers of the harness, not parameters, so that only its bias is counted here.
    weights = sum(parameter.nbytes for parameter in parameters.values()) + sum(module.packed.nbytes for module in packed.values())
    if table.data_ptr() != head.data_ptr():
        weights -= table.nbytes - table[0].nbytes
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return weights + 2 * config.num_hidden_layers * kv_heads * head_dim * context * table.element_size()


def ceiling(nbytes: int, device: torch.device) -> tuple[float | None, str | None]:
    """Decode steps a second at the measured read bandwidth, or None with the reason.

    Args:
        nbytes: Bytes of one step.
        device: Where it runs.
    """
    if device.type != "cuda":
        return None, "no GPU: a CPU's caches hold part of the model, so that no one bandwidth bounds it"
    return read_bandwidth(min(nbytes, _PROBE_BYTES), device) / nbytes, None
