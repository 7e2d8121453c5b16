"""Checks every config of a variant on fresh input, times the right ones, and keeps every outcome."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from sdbench.kernels.registry import Config, Variant
from sdbench.suites.kernels.operands import Operand
from sdbench.timing import TOLERANCE, Times, graph_times, relative_error, within

FINALISTS = 3
"""Configs of the first, short timing that are timed again at length."""


@dataclass
class Trial:
    """One config of one variant on one operand.

    Attributes:
        config: Launch parameters.
        outcome: ``correct``, ``incorrect``, ``compile_error``, ``out_of_resources`` or ``constraint``.
        error: Relative Frobenius error against the float64 product; None where nothing ran.
        times: Microseconds a call; None without a GPU or for any other outcome than ``correct``.
        message: What went wrong, in one line.
    """

    config: Config
    outcome: str
    error: float | None = None
    times: Times | None = None
    message: str | None = None


def check(variant: Variant, operand: Operand, config: Config, generator: torch.Generator) -> Trial:
    """Runs a config twice on fresh random x, into NaN-filled outputs, against the float64 product with the pruned matrix.

    The second run catches what the first leaves behind: counters, or sums that go on accumulating.
    """
    device, dtype = operand.dense.device, operand.problem.dtype
    # The interpreter truncates float32 to bf16 where a GPU rounds, so that x stays float32 there.
    x_dtype = dtype if device.type == "cuda" else torch.float32
    if variant.kernel == "dense" and variant.needs == "torch":
        x_dtype = dtype
    worst, y_dtype = 0.0, torch.float32
    for _ in range(2):
        x = torch.randn(operand.problem.in_features, generator=generator, device=device).to(dtype)
        y = torch.full((operand.problem.out_features,), float("nan"), device=device)
        try:
            got = variant.launch(operand.weight, x.to(x_dtype), y, config)
        except (OutOfResources, torch.OutOfMemoryError) as error:
            return Trial(config, "out_of_resources", message=_one_line(error))
        except TritonError as error:
            return Trial(config, "compile_error", message=_one_line(error))
        error_now = relative_error(got, operand.dense.double() @ x.double())
        # max() would drop a NaN that comes second.
        worst = error_now if not error_now <= worst else worst
        y_dtype = got.dtype
    correct = within(worst, TOLERANCE[y_dtype])
    return Trial(config, "correct" if correct else "incorrect", worst, message=None if correct else f"relative error {worst:.2e}")


def search(variant: Variant, operand: Operand, generator: torch.Generator) -> Iterator[Trial]:
    """Yields a trial for each config; with a GPU the right ones are timed, and the fastest few again at length, in place.

    Args:
        variant: What to run.
        operand: What it multiplies.
        generator: Source of the inputs, on the operand's device.
    """
    refusal = variant.constraint(operand.problem)
    if refusal:
        yield Trial({}, "constraint", message=refusal)
        return
    if operand.dense.device.type != "cuda":
        yield check(variant, operand, variant.default(operand.problem), generator)
        return
    try:
        copies = operand.copies()
    except torch.OutOfMemoryError as error:
        yield Trial({}, "out_of_resources", message=_one_line(error))
        return
    x = torch.randn(operand.problem.in_features, generator=generator, device=operand.dense.device).to(operand.problem.dtype)
    y = torch.empty(operand.problem.out_features, device=operand.dense.device)

    def timed(config: Config, replays: int) -> Times | None:
        calls: list[Any] = [lambda weight=weight: variant.launch(weight, x, y, config) for weight in copies]
        return graph_times(calls, replays=replays)

    trials = []
    for config in variant.space(operand.problem):
        trial = check(variant, operand, config, generator)
        if trial.outcome == "correct":
            try:
                trial.times = timed(config, replays=3)
            except torch.OutOfMemoryError as error:
                trial = Trial(config, "out_of_resources", trial.error, message=_one_line(error))
        trials.append(trial)
    right = sorted((t for t in trials if t.times), key=lambda t: t.times.p50 if t.times else 0.0)
    for trial in right[:FINALISTS]:
        trial.times = timed(trial.config, replays=20)
    for trial in right[FINALISTS:]:
        # A short timing orders configs; it is no figure to publish.
        trial.message = f"{trial.times.p50:.2f} us in the short timing" if trial.times else None
        trial.times = None
    yield from trials


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
