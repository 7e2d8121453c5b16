"""Runs the kernel suite: every SpMV variant beside what a user would take instead, on a model's shapes."""

import itertools
from collections.abc import Sequence
from typing import Any

from sdbench.errors import ExitCode, SdbenchError
from sdbench.kernels import registry
from sdbench.kernels.launching import can_run, capability, sm_count
from sdbench.kernels.registry import Problem, Variant
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.kernels.measure import Measurement, Product, measure
from sdbench.suites.kernels.report import failures, judge
from sdbench.suites.kernels.runner import Runner

PRUNED, UNPRUNED = ("spmv", "spmv_partial", "semi_structured"), ("dense", "quantized")
"""Kernels that multiply by a pruned weight, once a pattern, and those that multiply by the whole one, once a shape."""


class KernelRun(Measurement):
    """What to check, search and time; ``variants`` are those of the SpMV, beside which all baselines run.

    Raises:
        UsageError: An unknown variant, or a width that a pattern does not divide.
    """

    def __post_init__(self) -> None:
        for name in self.variants:
            registry.find("spmv", name)
        super().__post_init__()


def run(options: KernelRun, directory: RunDirectory | None, progress: Progress, runner: Runner | None = None) -> list[dict[str, Any]]:
    """Runs the suite; finished shapes of a resumed run directory are kept as they are.

    Args:
        options: What to run.
        directory: Where rows go as they finish; None to keep them in memory alone.
        progress: Where to report.
        runner: What runs the configs; None for what suits the device.

    Returns:
        A row a (variant, shape, pattern), in the form of the schema, with ``best`` and ``speedup`` filled in.

    Raises:
        SdbenchError: No SpMV variant can run (exit code 5): the baselines alone answer nothing. Or rows of another GPU.
    """
    chosen = [registry.find("spmv", name) for name in options.variants] or registry.variants("spmv")
    _require_some(options, chosen)
    names = {variant.name for variant in chosen}
    chosen += [variant for variant in registry.variants("spmv_partial") if variant.name in names]
    products: list[Product] = []
    for name in options.shapes:
        products += [(variant, name, None) for kernel in UNPRUNED for variant in registry.variants(kernel)]
        for pattern in options.patterns:
            products += [(variant, name, pattern) for variant in (*chosen, *registry.variants("semi_structured"))]
    return judge(measure(products, options, directory, progress, runner))


def require_right(rows: Sequence[dict[str, Any]]) -> None:
    """Fails a run, once its rows are out, for every variant that takes a problem and has no right config for it.

    Raises:
        SdbenchError: There is one; names the variant and the shape. Exit code 3 where a product was wrong.
    """
    failed = failures(rows)
    if failed:
        wrong = any(row["outcome"] == "incorrect" for row in rows)
        raise SdbenchError("; ".join(failed), ExitCode.CHECK_FAILED if wrong else ExitCode.ERROR)


def _require_some(options: KernelRun, chosen: Sequence[Variant]) -> None:
    device = options.device
    refusals: dict[str, None] = {}
    for variant, pattern, shape in itertools.product(chosen, options.patterns, options.shapes.values()):
        problem = Problem(*shape, options.dtype, pattern, sm_count(device), capability(device))
        refusal = can_run(variant.needs, device) or variant.constraint(problem)
        if refusal is None:
            return
        refusals[f"{variant.name} at {pattern} {refusal}"] = None
    raise SdbenchError(f"nothing to run: {'; '.join(refusals) or 'no shape or no pattern'}", ExitCode.NOTHING_SELECTED)
