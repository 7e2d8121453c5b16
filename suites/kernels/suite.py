"""Runs the kernel suite and writes its rows."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sdbench.errors import ExitCode, SdbenchError
from sdbench.kernels import registry
from sdbench.kernels.launching import can_run, sm_count
from sdbench.kernels.read import read_bandwidth
from sdbench.kernels.registry import Prepare, Problem, Variant
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.kernels.operands import Operand, Shape, make_operand, reduced
from sdbench.suites.kernels.report import QUANTIZED
from sdbench.suites.kernels.search import Trial, search

SCHEMA = "sdbench.kernels/1"
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class KernelRun:
    """What to check and time.

    Attributes:
        patterns: Patterns of the packed weights.
        shapes: Name -> (out_features, in_features).
        dtype: Dtype of the weights.
        device: Where to run; a CPU checks in the interpreter, on reduced shapes, without timings.
        variants: Names of the SpMV variants; empty for all.
        seed: Seed of weights and inputs.

    Raises:
        UsageError: An unknown variant, or a width that a pattern does not divide.
    """

    patterns: Sequence[Pattern]
    shapes: dict[str, Shape]
    dtype: torch.dtype
    device: torch.device
    variants: Sequence[str]
    seed: int

    def __post_init__(self) -> None:
        for name in self.variants:
            registry.find("spmv", name)
        for name, shape in self.shapes.items():
            for pattern in self.patterns:
                pattern.require_width(shape[1], name)


def run(options: KernelRun, directory: RunDirectory | None, progress: Progress) -> list[dict[str, Any]]:
    """Runs the suite; finished rows of a resumed run directory are kept as they are.

    Args:
        options: What to run.
        directory: Where rows go as they finish; None to keep them in memory alone.
        progress: Where to report.

    Returns:
        A row a (variant, shape, pattern), in the form of the schema, with ``best`` and ``speedup`` filled in.

    Raises:
        SdbenchError: No SpMV variant can run (exit code 5): the dense baselines alone answer nothing.
    """
    chosen = [registry.find("spmv", name) for name in options.variants] or registry.variants("spmv")
    _require_some(options, chosen)
    cases: list[tuple[Variant, str, Pattern | None]] = []
    for name in options.shapes:
        cases += [(variant, name, None) for kernel in ("dense", "quantized") for variant in registry.variants(kernel)]
        cases += [(variant, name, pattern) for pattern in options.patterns for variant in (*chosen, *registry.variants("semi_structured"))]

    rows: list[dict[str, Any]] = [row for row in (directory.rows if directory else []) if row["record"] == "result"]
    done = {_key(row) for row in rows}
    operands = _Operands(options)
    with progress.task("kernels", len(cases)) as task:
        for variant, name, pattern in cases:
            shape = options.shapes[name]
            if (variant.kernel, variant.name, str(pattern) if pattern else None, name, *shape) not in done:
                operand = operands.get(variant, name, pattern)
                trials = _trials(variant, operand, options)
                row = _row(variant, name, shape, operand, trials)
                if directory:
                    for trial in trials:
                        directory.add_row({"record": "trial", **_trial_row(variant, operand, trial)})
                    directory.add_row({"record": "result", **row})
                rows.append({"record": "result", **row})
            task.advance()
    return [{key: value for key, value in row.items() if key not in ("record", "attempt")} for row in _judge(rows)]


def _require_some(options: KernelRun, chosen: Sequence[Variant]) -> None:
    refusals: dict[str, None] = {}
    for variant, pattern, shape in itertools.product(chosen, options.patterns, options.shapes.values()):
        problem = Problem(*shape, options.dtype, pattern, sm_count(options.device))
        refusal = can_run(variant.needs, options.device) or variant.constraint(problem)
        if refusal is None:
            return
        refusals[f"{variant.name} at {pattern} {refusal}"] = None
    raise SdbenchError(f"nothing to run: {'; '.join(refusals) or 'no shape or no pattern'}", ExitCode.NOTHING_SELECTED)


class _Operands:
    """Keeps the operand in use: weights of one shape and pattern serve every variant that reads the same form, then make room."""

    def __init__(self, options: KernelRun):
        self._options = options
        self._key: tuple[Prepare, str, Pattern | None] | None = None
        self._operand: Operand | None = None

    def get(self, variant: Variant, name: str, pattern: Pattern | None) -> Operand:
        key = variant.prepare, name, pattern
        if self._operand is None or self._key != key:
            self._operand = None
            options = self._options
            shape = options.shapes[name] if options.device.type == "cuda" else reduced(options.shapes[name], pattern)
            self._key, self._operand = key, make_operand(shape, options.dtype, pattern, options.device, options.seed, variant.prepare)
        return self._operand


def _trials(variant: Variant, operand: Operand, options: KernelRun) -> list[Trial]:
    refusal = can_run(variant.needs, options.device)
    if refusal:
        return [Trial({}, "constraint", message=refusal)]
    generator = torch.Generator(options.device).manual_seed(options.seed + 1)
    return list(search(variant, operand, generator))


def _best(trials: Iterable[Trial]) -> Trial:
    """The fastest correct trial; without times the first correct one; without a correct one the most telling failure."""
    trials = list(trials)
    timed = [trial for trial in trials if trial.times]
    if timed:
        return min(timed, key=lambda trial: (trial.times.p50 if trial.times else 0.0, sorted(trial.config.items())))
    order = ("correct", "incorrect", "compile_error", "out_of_resources", "constraint")
    return min(trials, key=lambda trial: order.index(trial.outcome))


def _trial_row(variant: Variant, operand: Operand, trial: Trial) -> dict[str, Any]:
    problem = operand.problem
    return {
        "kernel": variant.kernel,
        "variant": variant.name,
        "pattern": str(problem.pattern) if problem.pattern else None,
        "shape": [problem.out_features, problem.in_features],
        "dtype": DTYPE_NAMES[problem.dtype],
        "config": dict(trial.config),
        "outcome": trial.outcome,
        "error": trial.error,
        "us": trial.times.as_dict() if trial.times else None,
        "message": trial.message,
    }


def _row(variant: Variant, name: str, shape: Shape, operand: Operand, trials: Sequence[Trial]) -> dict[str, Any]:
    best = _best(trials)
    problem = operand.problem
    refused = best.outcome == "constraint"  # and so there is no operand
    nbytes = None if refused else operand.nbytes + problem.in_features * problem.dtype.itemsize
    timeable = operand.device.type == "cuda"
    gbps = nbytes / best.times.p50 / 1e3 if nbytes and best.times else None
    outcomes: dict[str, int] = {}
    for trial in trials:
        outcomes[trial.outcome] = outcomes.get(trial.outcome, 0) + 1
    row = _trial_row(variant, operand, best)
    return row | {
        "layer": name,
        "of_shape": list(shape),
        "us_reason": None
        if best.times
        else (best.message or "not timed" if refused or timeable else "no GPU: checked in the interpreter on a reduced shape"),
        "bytes": nbytes,
        "gbps": gbps,
        "roofline": gbps * 1e9 / read_bandwidth(operand.nbytes, operand.device) if gbps else None,
        "configs": len(trials),
        "outcomes": outcomes,
    }


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kernel"], row["variant"], row["pattern"], row["layer"], *row["of_shape"]


def _judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the speed-ups over the baselines of the same run, and marks the fastest correct variant of each group."""
    for row in rows:
        baselines = {
            (other["kernel"], other["variant"]): other["us"]["p50"]
            for other in rows
            if other["pattern"] is None and other["of_shape"] == row["of_shape"] and other["us"]
        }
        times = {
            "linear": baselines.get(("dense", "linear")),
            "dense": min((time for (kernel, _), time in baselines.items() if kernel == "dense"), default=None),
            **{name: baselines.get(("quantized", name)) for name in QUANTIZED},
        }
        p50 = row["us"]["p50"] if row["us"] else None
        row["speedup"] = {name: time / p50 if time and p50 else None for name, time in times.items()}
        group = [
            other
            for other in rows
            if (other["kernel"], other["pattern"], other["of_shape"]) == (row["kernel"], row["pattern"], row["of_shape"])
        ]
        right = [other["us"]["p50"] for other in group if other["us"] and other["outcome"] == "correct"]
        row["best"] = bool(p50 and right and p50 == min(right))
    return rows
