"""Known model architectures: what ``config.json`` of each says, so that shapes and random models need no download.

Plain data, no torch and no transformers: the fields are transformers' config fields, ``models.py`` makes a config of them.
Sources are the ``config.json`` and ``generation_config.json`` files of the named hub repositories.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from sdbench.errors import UsageError

Shape = tuple[int, int]
"""(out_features, in_features) of a Linear, the shape of its weight."""


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Args:
        name: The short name that the command line takes.
        hub_ids: Hub repositories with exactly this config.
        config: Fields of the transformers config, ``model_type`` among them.
    """

    name: str
    hub_ids: tuple[str, ...]
    config: Mapping[str, Any]


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool, **others: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": [151645, 151643],
    } | others


def _llama3(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
    }


_QWEN3_4B_2507 = _qwen3(
    2560, 9728, 36, 32, tied=True, max_position_embeddings=262144, rope_parameters={"rope_type": "default", "rope_theta": 5e6}
)

_SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES: dict[str, Architecture] = {
    known.name: known
    for known in (
        Architecture("qwen3-0.6b", ("Qwen/Qwen3-0.6B",), _qwen3(1024, 3072, 28, 16, tied=True)),
        Architecture("qwen3-1.7b", ("Qwen/Qwen3-1.7B",), _qwen3(2048, 6144, 28, 16, tied=True)),
        Architecture("qwen3-4b", ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Thinking-2507"), _QWEN3_4B_2507),
        Architecture("qwen3-8b", ("Qwen/Qwen3-8B",), _qwen3(4096, 12288, 36, 32, tied=False)),
        Architecture("qwen3-14b", ("Qwen/Qwen3-14B",), _qwen3(5120, 17408, 40, 40, tied=False)),
        Architecture("qwen3-32b", ("Qwen/Qwen3-32B",), _qwen3(5120, 25600, 64, 64, tied=False)),
        Architecture(
            "llama-3.1-8b",
            ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
            _llama3(4096, 14336, 32, 32),
        ),
        Architecture("llama-3.3-70b", ("meta-llama/Llama-3.3-70B-Instruct",), _llama3(8192, 28672, 80, 64)),
        Architecture("smollm2-135m", ("HuggingFaceTB/SmolLM2-135M-Instruct",), _SMOLLM2_135M),
    )
}
"""Short name -> architecture, smallest of each family first."""


def find_architecture(text: str) -> Architecture | None:
    """The architecture of a short name or hub id, upper and lower case alike; None when it is not a known one."""
    wanted = text.lower()
    for known in ARCHITECTURES.values():
        if wanted == known.name or wanted in (hub_id.lower() for hub_id in known.hub_ids):
            return known
    return None


def linear_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of one decoder layer's Linears, unfused.

    Args:
        config: Fields of a transformers config of the Llama kind (Llama, Qwen3, ...), for example ``model.config.to_dict()``.

    Returns:
        Linear name -> (out_features, in_features), in the order of the forward.
    """
    hidden, intermediate, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }


def fused_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of one decoder layer's matrices with q/k/v and gate/up each stacked into one.

    Args:
        config: Fields of a transformers config, as for :func:`linear_shapes`.

    Returns:
        ``qkv``, ``o``, ``gate_up``, ``down`` -> (out_features, in_features).
    """
    shapes = linear_shapes(config)
    stacks = {"qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",), "gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
    return {name: (sum(shapes[part][0] for part in parts), shapes[parts[0]][1]) for name, parts in stacks.items()}


def named_shapes(name: str) -> dict[str, Shape]:
    """The four fused shapes of a known architecture, by short name or hub id.

    Raises:
        UsageError: The name is unknown; the message holds the closest one and all of them.
    """
    known = find_architecture(name)
    if known is None:
        raise unknown_architecture(name)
    return fused_shapes(known.config)


def unknown_architecture(name: str) -> UsageError:
    """The error for a name outside the table, with the closest name in it."""
    short = {hub_id.lower(): known.name for known in ARCHITECTURES.values() for hub_id in known.hub_ids}
    close = get_close_matches(name.lower(), [*ARCHITECTURES, *short], n=1, cutoff=0.5)
    hint = f"did you mean {short.get(close[0], close[0])!r}? " if close else ""
    return UsageError(f"unknown architecture {name!r}: {hint}known: {', '.join(ARCHITECTURES)}")
