"""What the lines of a run directory must hold to be read back: checked where they are read, so that the rest may rely on it.

A line may hold more, and of a kind of row that is not named here only the attempt counts. A figure that was not to be had is null, never
left out, and what came of it is null too.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from sdbench.results import Fault, first_fault

KEYS = {
    "result": ("kernel", "variant", "pattern", "layer", "of_shape", "dtype", "tokens"),
    "chain": ("kernel", "variant", "pattern", "layers"),
    "arm": ("arm", "pattern", "method"),
    "decode": ("arm", "path", "context"),
    "batch": ("arm", "path", "context", "batch"),
    "prompt": ("arm", "context"),
    "fidelity": ("arm", "prefill", "example"),
    "layer": ("arm", "layer"),
}
"""Kind of row -> the fields that say what was measured."""

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A time, rate, size or share; one that was NaN is null."""


def _require_figures(memory: dict[str, float | str | None]) -> dict[str, float | str | None]:
    for name, value in memory.items():
        if isinstance(value, str) and name != "originals" and not name.endswith("reason"):
            raise PydanticCustomError("float_type", "{name}: Input should be a valid number", {"name": name})
    return memory


Memory = Annotated[dict[str, Annotated[float, Field(allow_inf_nan=False)] | str | None], AfterValidator(_require_figures)]
"""Bytes, of which some are differences of what was in use, and reasons."""


class _Line(BaseModel):
    model_config = ConfigDict(strict=True)

    comes_of: ClassVar[Mapping[str, str]] = {}
    """Field -> the figure that it comes of: where the field is neither null nor 0, that one is not null."""

    attempt: int = 1

    @model_validator(mode="after")
    def _require_origins(self) -> Self:
        for name, origin in self.comes_of.items():
            if getattr(self, name) and getattr(self, origin) is None:
                raise PydanticCustomError("null", "{origin}: null, though {name} is not", {"origin": origin, "name": name})
        return self


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

    comes_of = {"gbps": "us"}

    kernel: str
    variant: str
    pattern: str | None
    layer: str
    shape: list[int]
    of_shape: list[int]
    dtype: str
    tokens: Count = 1
    config: dict[str, int]
    outcome: str
    error: Number | None
    us: Spread | None
    us_reason: str | None
    message: str | None
    gbps: Number | None
    roofline: Number | None
    configs: Count
    outcomes: dict[str, Count]
    config_source: str | None = None
    compile_seconds: Number | None = None


class Chain(_Line):
    """Layers in one graph."""

    comes_of = {"gbps": "us"}

    kernel: str
    variant: str
    pattern: str | None
    layers: int
    outcome: str
    us: Spread | None
    us_reason: str | None
    speedup: dict[str, Number | None]
    gbps: Number | None = None


class Arm(_Line):
    """An arm of an end-to-end run."""

    comes_of = {"decode_rate_spread": "decode_rate", "examples": "eos", "graded": "answer_match"}

    arm: str
    pattern: str | None
    method: str | None
    examples: Count
    graded: Count = 0
    answer_match: Count | None
    eos: Count | None
    truncated: Count | None
    matches: dict[str, bool | None] | None = None
    quality_reason: str | None
    equal_tokens: Count | None
    decode_rate: Number | None
    decode_rate_spread: Spread | None
    decode_rate_note: str | None
    speedup: Number | None
    speedup_reason: str | None
    variant: str | None
    kernel_calls: Count
    expected_kernel_calls: Count
    ceiling: Number | None
    ceiling_reason: str | None
    peak_bytes: Number | None
    peak_bytes_reason: str | None
    path: str | None
    path_reason: str | None
    memory: Memory | None = None


class Fidelity(_Line):
    """A pruned arm on one of the dense model's replies."""

    arm: str
    prefill: str
    example: str
    positions: Annotated[int, Field(ge=1)]
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

    comes_of = {"ms_per_token": "decode_rate"}

    arm: str
    path: str
    context: int
    tokens: Count
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
    capture: Memory | None
    memory: Memory | None
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
    prompt_hash: str
    ids: list[int]
    match: bool | None
    eos: bool
    truncated: bool
    tokens: Count
    kernel_calls: Count
    expected_kernel_calls: Count


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
