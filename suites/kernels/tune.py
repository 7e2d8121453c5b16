"""Finds the fastest right config of every variant that has a choice, and keeps it for all later runs."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sdbench.errors import ExitCode, SdbenchError, UsageError
from sdbench.kernels import registry, tuned
from sdbench.kernels.launching import capability
from sdbench.kernels.registry import Variant
from sdbench.kernels.spmm import TUNED_TOKENS
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.kernels.measure import Measurement, Product, choice_of, measure
from sdbench.suites.kernels.runner import Runner
from sdbench.suites.kernels.suite import PRUNED, SEVERAL, UNPRUNED, out_of_bounds


def tunable() -> list[Variant]:
    """Variants whose configs are worth a search: those with a Triton kernel that itself multiplies, for up to so many tokens."""
    every = [variant for kernel in (*PRUNED, *UNPRUNED, SEVERAL) for variant in registry.variants(kernel)]
    return [variant for variant in every if variant.needs == "triton" and variant.tokens[1] is not None]


class TuneRun(Measurement):
    """What to tune; ``variants`` are names, and a name stands for its variant in every kernel.

    Raises:
        UsageError: An unknown variant, or a width that a pattern does not divide.
    """

    def __post_init__(self) -> None:
        names = list(dict.fromkeys(variant.name for variant in tunable()))
        for name in self.variants:
            if name not in names:
                close = get_close_matches(name, names, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise UsageError(f"variant {name!r} is none that can be tuned: {hint}known: {', '.join(names)}")
        super().__post_init__()
        for batch in self.batches:
            if batch > 1 and batch not in TUNED_TOKENS:
                known = ", ".join(map(str, (1, *TUNED_TOKENS)))
                raise UsageError(f"--batch {batch}: a product takes the config of the next larger number among {known}; tune that one")


def run(options: TuneRun, directory: RunDirectory | None, progress: Progress, runner: Runner | None = None) -> list[dict[str, Any]]:
    """Tunes every variant on every shape; each choice is in the user's cache as soon as it is found.

    Args:
        options: What to tune.
        directory: Where trials and results go; None to keep them in memory alone.
        progress: Where to report.
        runner: What runs the configs; None for what suits the device.

    Returns:
        A row a (variant, shape, pattern, batch).

    Raises:
        SdbenchError: No variant takes any of the problems (exit code 5). Or rows of another GPU.
    """
    chosen = [variant for variant in tunable() if not options.variants or variant.name in options.variants]
    products: list[Product] = []
    for layer in options.shapes:
        for variant in chosen:
            patterns = [None] if variant.kernel in UNPRUNED else list(options.patterns)
            served = [batch for batch in options.batches if variant.serves(batch)]
            products += [(variant, layer, pattern, batch) for batch in served for pattern in patterns]
    if not products:
        refusals = [out_of_bounds(variant, batch) for variant in chosen for batch in options.batches]
        raise SdbenchError(f"nothing to tune: {'; '.join(refusals)}; choose another --batch", ExitCode.NOTHING_SELECTED)
    rows = measure(products, options, directory, progress, runner)
    if all(row["outcome"] == "constraint" for row in rows):
        reasons = dict.fromkeys(f"{row['variant']} at {row['pattern']} {row['message']}" for row in rows)
        raise SdbenchError(f"nothing to tune: {'; '.join(reasons) or 'no shape or no pattern'}", ExitCode.NOTHING_SELECTED)
    return rows


def export(path: Path, rows: Sequence[dict[str, Any]], options: TuneRun) -> int:
    """Merges the rows' choices into a file of the form that ships with the package.

    Returns:
        How many choices it was given.

    Raises:
        SdbenchError: The file cannot be written, or is of another compute capability.
    """
    choices = []
    products = {(variant.kernel, variant.name): variant for variant in tunable()}
    for row in rows:
        if row["us"] and row["config_source"] != "default":
            pattern = next((pattern for pattern in options.patterns if str(pattern) == row["pattern"]), None)
            case = options.case((products[row["kernel"], row["variant"]], row["layer"], pattern, row["tokens"]))
            key = tuned.key_of(case.find(), case.problem, case.device)
            choices.append(choice_of(key, row["config"], row["us"], options.effort, row["outcomes"]))
    tuned.export(path, capability(options.device), choices)
    return len(choices)
