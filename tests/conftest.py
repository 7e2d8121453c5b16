"""Tiny random models that every part's tests share."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides at its import whether kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
# Of the terminal that the tests are started from; what they print is laid out by it.
os.environ.pop("COLUMNS", None)

from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def tuned_for_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Configs that a test finds, on a GPU that others use at the same time, are none to keep: a later run would take them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


# Wide random weights: with the usual 0.02 all logits are nearly equal, and argmax would hang on rounding.
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


def build(config: PretrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture
def tiny_qwen3() -> PreTrainedModel:
    """Qwen3, 2 layers, hidden 64, q 128 and k/v 64 wide, tied embeddings, fp32 on the CPU."""
    return build(Qwen3Config(**TINY, head_dim=32, tie_word_embeddings=True))


@pytest.fixture
def tiny_llama() -> PreTrainedModel:
    """Llama, 2 layers, hidden 64, q 64 and k/v 32 wide, separate lm_head, fp32 on the CPU."""
    return build(LlamaConfig(**TINY, head_dim=16, tie_word_embeddings=False))


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one; else the CPU, where Triton kernels run in its interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the packed products that are launched, and "config" where one is chosen, as on a GPU that is not the current one.

    Each fails unless the weight's GPU has been made the current one, as Triton launches there.
    """
    from sdbench.kernels import registry, spmv

    inside: list[bool] = []
    names: list[str] = []

    @contextmanager
    def guard(tensor: torch.Tensor) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def seen(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any) -> Any:
            assert inside, name
            names.append(name)
            return launch(*arguments)

        return guarded

    def watched(name: str, variant: registry.Variant) -> registry.Variant:
        bind = variant.bind and (lambda weight, config: seen(name, variant.bind(weight, config)))  # type: ignore[misc]  # not None
        return replace(variant, launch=seen(name, variant.launch), bind=bind)

    for kernel in ("spmv", "spmm"):
        monkeypatch.setattr(f"sdbench.kernels.{kernel}.elsewhere", lambda tensor: not inside)
        monkeypatch.setattr(f"sdbench.kernels.{kernel}.at_device_of", guard)
        monkeypatch.setattr(f"sdbench.kernels.{kernel}.choose", seen("config", spmv.choose))
        for variant in registry.variants(kernel):
            monkeypatch.setitem(registry._VARIANTS, (kernel, variant.name), watched(f"{kernel}/{variant.name}", variant))
    return names
