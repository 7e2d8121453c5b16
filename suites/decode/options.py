"""What ``sdbench decode`` is asked to time."""

from dataclasses import dataclass
from typing import Any

import torch

from sdbench.errors import UsageError
from sdbench.models import ModelSpec
from sdbench.pattern import Pattern

DENSE, INT8 = "dense", "int8"


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What to time.

    Attributes:
        spec: The model.
        device: Where it runs.
        dtype: Dtype of its weights.
        patterns: Patterns of the pruned arms.
        contexts: Prompt lengths.
        tokens: Exact length of a timed reply.
        repeats: Timed replies of each way and length; the median counts.
        warmup_tokens: Tokens decoded before, untimed.
        baselines: Also time transformers' own ways at the first context length.
        profiled: Also profile a step of each arm, by kernel; on a GPU.
        targets: Patterns of the linears to prune; none for all.
        ignore: Patterns of the linears to leave dense.
        seed: Seed of the prompts.
        device_map: How the model is spread over the GPUs, one of `sdbench.devices.DEVICE_MAPS`; None for ``device`` alone.
        batches: Prompts at once.

    Raises:
        UsageError: A number out of range.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    patterns: tuple[Pattern, ...]
    contexts: tuple[int, ...]
    tokens: int
    repeats: int
    warmup_tokens: int
    baselines: bool
    profiled: bool
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    seed: int
    device_map: str | None = None
    batches: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("context", min(self.contexts), 1),
            ("batch", min(self.batches), 1),
            ("tokens", self.tokens, 2),
            ("repeats", self.repeats, 1),
            ("warmup-tokens", self.warmup_tokens, 0),
        ):
            if value < least:
                raise UsageError(f"--{name} is {value}; it must be at least {least}")

    @property
    def longest(self) -> int:
        """Tokens of the longest reply, warm-up included."""
        return max(self.tokens, self.warmup_tokens)

    def arguments(self) -> dict[str, Any]:
        """Every option that changes a result, for the run directory."""
        return {
            "model": self.spec.name,
            "revision": self.spec.revision,
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "pattern": [str(pattern) for pattern in self.patterns],
            "context": list(self.contexts),
            "tokens": self.tokens,
            "repeats": self.repeats,
            "warmup_tokens": self.warmup_tokens,
            "baselines": self.baselines,
            "profile": self.profiled,
            "targets": list(self.targets),
            "ignore": list(self.ignore),
            "seed": self.seed,
        } | {name: value for name, value in (("device_map", self.device_map), ("batch", list(self.batches))) if value not in (None, [1])}
