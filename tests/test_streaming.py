"""Weights that are in memory as long as somebody holds them."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sdbench.streaming import RandomWeights, Stream, resident


def test_a_block_that_could_not_be_read_leaves_nothing_behind() -> None:
    """Its second reader must find its weights, and not the memory that was made for them."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False))
    filled, fails = RandomWeights(model, 0), [True]

    def fill(name: str, module: nn.Module, device: torch.device) -> None:
        if name.endswith("layers.1.mlp.up_proj") and fails.pop():
            raise torch.OutOfMemoryError("no room")
        filled(name, module, device)

    stream = Stream(model, fill, torch.device("cpu"))
    stream.keep_outside({f"model.layers.{number}": block for number, block in enumerate(model.model.layers)})
    before, block = stream.bytes, model.model.layers[1]
    with pytest.raises(torch.OutOfMemoryError), resident([block]):
        pass
    assert stream.bytes == before and block.mlp.up_proj.weight.is_meta
    fails.append(False)
    with resident([block]):
        assert block.mlp.up_proj.weight.isfinite().all()
        assert stream.bytes > before
    assert stream.bytes == before
