"""What the lines of a run directory must hold to be read back: checked where they are read, so that the rest may rely on it.

A line may hold more, and of a kind of row that is not named here only the attempt counts. A figure that was not to be had is null, never
left out.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sdbench.results import Fault, first_fault

KEYS = {
    "result": ("kernel", "variant", "pattern", "layer", "of_shape", "dtype", "tokens"),
    "chain": ("kernel", "variant", "pattern", "layers"),
    "arm": ("arm", "pattern", "method"),
    "decode": ("arm", "path", "context"),
    "batch": ("arm", "path", "context", "batch"),
    "fidelity": ("arm", "prefill", "example"),
    "layer": ("arm", "layer"),
}
"""Kind of row -> the fields that say what was measured."""

Number = int | float


class _Line(BaseModel):
    model_config = ConfigDict(strict=True)

    attempt: int = 1


class Spread(BaseModel):
    """A median and its spread; a percentile that was NaN is null."""

    model_config = ConfigDict(strict=True)

    p20: Number | None
    p50: Number
    p80: Number | None


class Trial(_Line):
    """A config that was tried."""

    config: dict[str, int]
    outcome: str
    error: Number | None
    us: Spread | None
    message: str | None
    key: str | None = None
    replays: int | None = None


class Result(_Line):
    """A kernel variant on a shape."""

    kernel: str
    variant: str
    pattern: str | None
    layer: str
    shape: list[int]
    of_shape: list[int]
    dtype: str
    config: dict[str, int]
    outcome: str
    error: Number | None
    us: Spread | None
    us_reason: str | None
    message: str | None
    gbps: Number | None
    roofline: Number | None
    configs: int
    outcomes: dict[str, int]
    config_source: str | None = None
    compile_seconds: Number | None = None


class Chain(_Line):
    """Layers in one graph."""

    variant: str
    pattern: str | None
    layers: int
    outcome: str
    us: Spread | None
    us_reason: str | None
    speedup: dict[str, Number | None]


class Arm(_Line):
    """An arm of an end-to-end run."""

    arm: str
    pattern: str | None
    method: str | None
    examples: int
    answer_match: int | None
    eos: int | None
    truncated: int | None
    quality_reason: str | None
    decode_rate: Number | None
    decode_rate_spread: Spread | None
    decode_rate_note: str | None
    speedup: Number | None
    speedup_reason: str | None
    variant: str | None
    kernel_calls: int
    expected_kernel_calls: int
    ceiling: Number | None
    ceiling_reason: str | None
    peak_bytes: Number | None
    peak_bytes_reason: str | None
    path: str | None
    path_reason: str | None
    memory: dict[str, Number | str | None] | None = None


class Fidelity(_Line):
    """A pruned arm on one of the dense model's replies."""

    arm: str
    prefill: str
    example: str
    positions: int
    kl: Number
    agreement: Number
    first_divergence: int | None


class Layer(_Line):
    """A diagnosed layer."""

    arm: str
    layer: str


class PrunedLayer(_Line):
    """A layer that ``sdbench prune`` pruned, and what its method reports."""

    layer: str
    report: dict[str, Any]


class Pruned(_Line):
    """What a finished ``sdbench prune`` took."""

    output: str
    dense_bytes: int
    bytes: int
    seconds: dict[str, Number]
    calibration: dict[str, Any]
    peak_bytes: Number | None


class Decode(_Line):
    """A way to decode at a context length."""

    arm: str
    path: str
    context: int
    outcome: str
    reason: str | None
    decode_rate: Spread | None
    ms_per_token: Number | None
    step_bytes: Number | None
    gbps: Number | None
    ceiling: Number | None
    of_ceiling: Number | None
    kernels: int | None
    ttft_ms: Number | None
    capture: dict[str, Number] | None
    memory: dict[str, Number | str | None] | None
    profile: dict[str, dict[str, Number]] | None


class Batch(Decode):
    """The same with several prompts at once."""

    batch: int


class Prompt(_Line):
    """A prompt on dense and on pruned weights, in turn."""

    arm: str
    context: int
    pairs: int
    outcome: str
    reason: str | None
    dense_seconds: Spread | None
    pruned_seconds: Spread | None
    ratio: Spread | None


class Sample(_Line):
    """An example's reply."""

    arm: str
    example: str
    ids: list[int]
    match: bool | None
    eos: bool
    truncated: bool
    tokens: int
    kernel_calls: int
    expected_kernel_calls: int


KINDS: dict[str, type[_Line]] = {
    "result": Result,
    "trial": Trial,
    "chain": Chain,
    "arm": Arm,
    "fidelity": Fidelity,
    "layer": Layer,
    "decode": Decode,
    "batch": Batch,
    "prompt": Prompt,
}


PRUNED_KINDS: dict[str, type[_Line]] = {"layer": PrunedLayer, "result": Pruned}
"""The same of ``sdbench prune``."""


def row_fault(row: Mapping[str, Any], kinds: Mapping[str, type[_Line]] = KINDS) -> str | None:
    """What is wrong with a line of ``rows.jsonl``; None for a good one."""
    kind = row.get("record")
    if not isinstance(kind, str):
        return "a row without its kind ('record')"
    return _fault(kinds.get(kind, _Line), f"a row of kind {kind!r}", row)


def sample_fault(sample: Mapping[str, Any]) -> str | None:
    """What is wrong with a line of ``samples.jsonl``; None for a good one."""
    return _fault(Sample, "a sample", sample)


FAULTS: dict[str, Fault] = {"rows.jsonl": row_fault, "samples.jsonl": sample_fault}
"""File of a run directory -> the check of its lines."""


def faults_of(command: str) -> dict[str, Fault]:
    """The same for the runs of a command."""
    return FAULTS | {"rows.jsonl": partial(row_fault, kinds=PRUNED_KINDS)} if command == "prune" else FAULTS


def _fault(model: type[_Line], what: str, line: Mapping[str, Any]) -> str | None:
    try:
        model.model_validate(line)
    except ValidationError as error:
        return f"{what} with a fault ({first_fault(error)})"
    return None
