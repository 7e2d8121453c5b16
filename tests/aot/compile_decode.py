"""Compiles the kernels of a decode step as a step launches them, for a GPU that need not be there; a JSON object a kernel and line.

The step runs on the meta device, where tensors have types and sizes and no contents, and each launch is recorded in the kernel's place:
what is compiled is what the launchers pass, and no copy of it. A script like ``compile_variants.py``, for the same reason.

    python compile_decode.py qwen3-4b 90
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from sdbench.engine.fused import launches as fused_launches
from sdbench.engine.fused import products, step
from sdbench.engine.fused.plan import plan
from sdbench.kernels import launching
from sdbench.kernels.decode import attention, gate, head, norm
from sdbench.kernels.dense import gemv
from sdbench.kernels.registry import CompileSource

sys.path.insert(0, str(Path(__file__).parent))
from compile_variants import SM_COUNT, compile_for, facts

_QWEN3_4B = Qwen3Config(
    vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip

MODELS: dict[str, tuple[PretrainedConfig, torch.dtype, int, int]] = {
    "qwen3-4b": (_QWEN3_4B, torch.bfloat16, 4096, 1),
    "qwen3-4b-short": (_QWEN3_4B, torch.bfloat16, 384, 1),
    "qwen3-4b-batch": (_QWEN3_4B, torch.bfloat16, 384, 4),
    "small-with-biases": (
        Qwen2Config(
            vocab_size=1000, hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1
        ),
        torch.float32,
        32,
        1,
    ),
}  # fmt: skip
"""Config, dtype, positions of the cache (slices of many tiles, of one each, and a single slice) and sequences."""

KERNELS = ((norm, "norm_kernel"), (gate, "gate_kernel"), (attention, "attention_kernel"), (attention, "merge_kernel"),
           (head, "head_kernel"), (head, "pick_kernel"), (head, "advance_kernel"))  # fmt: skip

Launch = tuple[CompileSource, bool]


class Recorder:
    """Takes a kernel's launches and makes none."""

    def __init__(self, kernel: Any, launches: list[Launch]):
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *values: Any, num_warps: int = 4, launch_pdl: bool = False) -> None:
        arguments = list(zip(self._kernel.params, values, strict=True))
        constexprs = {parameter.name: value for parameter, value in arguments if parameter.is_constexpr}
        signature = {
            parameter.name: launching.pointer_type(value.dtype) if isinstance(value, Tensor) else "i32"
            for parameter, value in arguments
            if not parameter.is_constexpr
        }
        self._launches.append((CompileSource(self._kernel, signature, constexprs, num_warps), launch_pdl))


@contextmanager
def recorded(capability: int) -> Iterator[list[Launch]]:
    """Launches of the block, on what looks like a GPU."""
    launches: list[Launch] = []
    with ExitStack() as stack:
        for module, name in KERNELS:
            stack.enter_context(patch.object(module, name, Recorder(getattr(module, name), launches)))
        # The products are compiled with the other variants.
        stack.enter_context(patch.object(gemv, "gemv_kernel"))
        # What lies nowhere cannot be compared.
        stack.enter_context(patch.object(fused_launches, "trouble", lambda *arguments, **others: None))
        for module in (norm, gate, attention, head, products):
            stack.enter_context(patch.object(module, "uses_kernels", lambda device: True))
        for module in (step, products):
            stack.enter_context(patch.object(module, "capability", lambda device: capability))
            stack.enter_context(patch.object(module, "sm_count", lambda device: SM_COUNT[capability]))
        yield launches


def main(model: str, capability: int) -> None:
    """Each distinct kernel once, in the order of its first launch."""
    config, dtype, length, batch = MODELS[model]
    with recorded(capability) as launches, torch.device("meta"):
        step.FusedStep(plan(AutoModelForCausalLM.from_config(config, dtype=dtype)), length, length, batch=batch).run()
    for source, dependent in {repr(launch): launch for launch in launches}.values():
        compiled = compile_for(source, capability)
        row = {"kernel": source.function.__name__, "constexprs": source.constexprs, "dependent": dependent}
        row |= {"shared": compiled.metadata.shared, "launches_next": compiled.asm["ptx"].count("griddepcontrol.launch_dependents")}
        sys.stdout.write(json.dumps(row | facts(compiled)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
