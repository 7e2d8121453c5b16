"""Reads out of a transformers model what the fused step needs, by its modules and config and not by its name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sdbench.devices import devices_of
from sdbench.engine.packed_linear import PackedLinear
from sdbench.errors import SdbenchError
from sdbench.kernels.decode.attention import Heads, Parts
from sdbench.kernels.decode.norm import MOST_BLOCKS, blocks

Linear = nn.Linear | PackedLinear


class Unfusable(SdbenchError):
    """The model is not built as the fused step is; says what is different."""


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One decoder layer.

    Attributes:
        input_gamma: ``[hidden]`` of the norm before attention.
        qkv: Linears of queries, keys and values.
        attention: Their norms and bias.
        o: The linear after attention.
        post_gamma: ``[hidden]`` of the norm before the MLP.
        gate_up: Gate and up linears.
        down: The linear after them.
    """

    input_gamma: Tensor
    qkv: tuple[Linear, ...]
    attention: Parts
    o: Linear
    post_gamma: Tensor
    gate_up: tuple[Linear, ...]
    down: Linear


@dataclass(frozen=True, eq=False)
class Plan:
    """A model as the fused step sees it.

    Attributes:
        layers: Its decoder layers.
        heads: Sizes of attention, the same in every layer.
        hidden: Width of the residual.
        intermediate: Width of the MLP.
        eps: Epsilon of every norm.
        embedding: ``[vocabulary, hidden]``.
        final_gamma: ``[hidden]`` of the last norm.
        head: ``[vocabulary, hidden]`` of lm_head.
        rotary: The rotary module: cos and sin of position ids.
        dtype: Of weights and cache.
        device: Where they are.
    """

    layers: Sequence[LayerPlan]
    heads: Heads
    hidden: int
    intermediate: int
    eps: float
    embedding: Tensor
    final_gamma: Tensor
    head: Tensor
    rotary: nn.Module
    dtype: torch.dtype
    device: torch.device

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 ``[length, size / 2]``, with the model's own scaling.

        Raises:
            Unfusable: Only a part of a head is turned.
        """
        positions = torch.arange(length, device=self.device)[None]
        cos, sin = self.rotary(torch.zeros(1, 1, dtype=torch.float32, device=self.device), positions)
        _refuse(cos.shape[-1] != self.heads.size, f"its rotary embedding turns {cos.shape[-1]} of the {self.heads.size} elements of a head")
        half = self.heads.size // 2
        return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()


def plan(model: Any) -> Plan:
    """Looks at every layer.

    Args:
        model: A transformers causal language model in eval mode, packed linears in place where it is pruned.

    Raises:
        Unfusable: Something is not as the fused step computes it.
    """
    config = model.config.get_text_config()
    _refuse(len(devices_of(model)) > 1, f"it is spread over {', '.join(map(str, devices_of(model)))}")
    _refuse(getattr(config, "hidden_act", None) != "silu", f"its activation is {getattr(config, 'hidden_act', None)}, not silu")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    _refuse(kinds != {"full_attention"}, f"it has layers of type {', '.join(sorted(kinds - {'full_attention'}))}")
    _refuse(bool(getattr(config, "sliding_window", None)) and not hasattr(config, "layer_types"), "its attention has a sliding window")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", "default")
    _refuse(kind in ("dynamic", "longrope"), f"its rotary embedding is {kind}, which depends on the length")
    try:
        base = model.model
        heads = _heads(base.layers[0].self_attn, config)
        layers = [_layer(layer, heads) for layer in base.layers]
        found = Plan(
            layers=layers,
            heads=heads,
            hidden=config.hidden_size,
            intermediate=_rows([layers[0].gate_up[0]]),
            eps=float(config.rms_norm_eps),
            embedding=base.embed_tokens.weight.detach(),
            final_gamma=base.norm.weight.detach(),
            head=model.lm_head.weight.detach(),
            rotary=base.rotary_emb,
            dtype=model.dtype,
            device=model.device,
        )
    except (AttributeError, IndexError) as error:
        raise Unfusable(f"no fused step for {type(model).__name__}: {error}") from error
    _refuse(model.lm_head.bias is not None, "its lm_head has a bias")
    _refuse(blocks(found.hidden) > MOST_BLOCKS, f"its hidden size is {found.hidden}")
    widths = {_rows(layer.qkv) for layer in layers} | {found.heads.rows}
    _refuse(len(widths) > 1, "its layers differ in their heads")
    _refuse({_rows(layer.gate_up) for layer in layers} != {2 * found.intermediate}, "its layers differ in their MLP")
    return found


def _heads(attention: Any, config: Any) -> Heads:
    size = int(attention.head_dim)
    heads = Heads(_rows([attention.q_proj]) // size, _rows([attention.k_proj]) // size, size, float(attention.scaling))
    _refuse(size < 32 or size & (size - 1) != 0, f"its heads have {size} elements")
    return heads


def _layer(layer: Any, heads: Heads) -> LayerPlan:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    _refuse(not getattr(attention, "use_rope", True), "some of its layers have no rotary embedding")
    for linear in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        _refuse(linear.bias is not None, "a linear outside q, k and v has a bias")
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    _refuse((query_norm is None) != (key_norm is None), "it norms only one of queries and keys")
    if query_norm is not None:
        _refuse(query_norm.weight.numel() != heads.size, "its query norm does not go over one head")
    biases = [linear.bias for linear in qkv]
    _refuse(any(bias is None for bias in biases) != all(bias is None for bias in biases), "only some of q, k and v have a bias")
    parts = Parts(
        query_gamma=None if query_norm is None else query_norm.weight.detach(),
        key_gamma=None if key_norm is None else key_norm.weight.detach(),
        bias=None if biases[0] is None else torch.cat([bias.detach() for bias in biases]),
    )
    return LayerPlan(
        input_gamma=layer.input_layernorm.weight.detach(),
        qkv=qkv,
        attention=parts,
        o=attention.o_proj,
        post_gamma=layer.post_attention_layernorm.weight.detach(),
        gate_up=(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
    )


def _rows(linears: Sequence[Linear]) -> int:
    return sum(int(linear.out_features) for linear in linears)


def _refuse(wrong: bool, reason: str) -> None:
    if wrong:
        raise Unfusable(f"no fused step: {reason}")
