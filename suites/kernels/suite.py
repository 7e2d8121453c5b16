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

SEVERAL = "spmm"
"""The kernel of a pruned weight and several tokens."""


class KernelRun(Measurement):
    """What to check, search and time; ``variants`` are those of the SpMV and the SpMM, beside which all baselines run.

    Raises:
        UsageError: An unknown variant, or a width that a pattern does not divide.
    """

    def __post_init__(self) -> None:
        several = {variant.name for variant in registry.variants(SEVERAL)}
        for name in self.variants:
            if name not in several:
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
    chosen: list[Variant] = []
    for kernel in ("spmv", "spmv_partial", SEVERAL):
        ours = {variant.name: variant for variant in registry.variants(kernel)}
        chosen += [ours[name] for name in options.variants or ours if name in ours]
    _require_some(options, chosen)
    products: list[Product] = []
    unpruned = [variant for kernel in UNPRUNED for variant in registry.variants(kernel)]
    pruned = [*chosen, *registry.variants("semi_structured")]
    for name in options.shapes:
        for batch in options.batches:
            products += [(variant, name, None, batch) for variant in unpruned if variant.serves(batch)]
            for pattern in options.patterns:
                products += [(variant, name, pattern, batch) for variant in pruned if variant.serves(batch)]
    return judge(measure(products, options, directory, progress, runner))


def out_of_bounds(variant: Variant, batch: int) -> str:
    """Why a variant does not serve a batch."""
    least, most = variant.tokens
    bounds = "one token" if most == 1 else f"{least} to {most} tokens" if most else f"{least} tokens or more"
    return f"{variant.name} is for {bounds}, not {batch}"


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
    for variant, pattern, shape, batch in itertools.product(chosen, options.patterns, options.shapes.values(), options.batches):
        if not variant.serves(batch):
            refusals[out_of_bounds(variant, batch)] = None
            continue
        problem = Problem(*shape, options.dtype, pattern, sm_count(device), capability(device), batch)
        refusal = can_run(variant.needs, device) or variant.constraint(problem)
        if refusal is None:
            return
        refusals[f"{variant.name} at {pattern} {refusal}"] = None
    raise SdbenchError(f"nothing to run: {'; '.join(refusals) or 'no shape or no pattern'}", ExitCode.NOTHING_SELECTED)
