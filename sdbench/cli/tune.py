"""``sdbench tune``: find the fastest right config of every kernel variant on this GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import rich_click as click

from sdbench.cli.options import (
    TUNABLE_VARIANTS,
    batches_option,
    device_option,
    json_option,
    output_option,
    products_options,
    run_directory,
    timeout_option,
    variants_option,
)
from sdbench.cli.printing import print_result

NO_GPU = "tuning times configs, which takes a CUDA GPU; 'sdbench kernels' checks the default configs without one"


@click.command("tune")
@products_options
@variants_option("Variant to tune, of every kernel that has it", ", ".join(TUNABLE_VARIANTS))
@click.option(
    "--effort",
    type=click.Choice(["none", "quick", "full"]),
    default="full",
    show_default=True,
    help="none checks the default config alone and writes nothing; quick searches about a dozen configs a variant, full all of them.",
)
@batches_option("Tokens multiplied at once, each a search of its own: tile and gemm are for several. May be given several times.")
@timeout_option("Seconds that a config may take once it is compiled; one that takes longer is recorded and its process ended.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and inputs.")
@click.option(
    "--export", "exported", type=click.Path(dir_okay=False, path_type=Path), help="Merge the choices into this file of configs that ship."
)
@device_option
@output_option
@json_option
def command(
    patterns: tuple[str, ...],
    shapes: str,
    dtype: str,
    variants: tuple[str, ...],
    effort: Literal["none", "quick", "full"],
    batches: tuple[int, ...],
    timeout: float,
    seed: int,
    exported: Path | None,
    device: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Find the fastest right config of every kernel variant on this GPU, and keep it for all later runs.

    Every config is compiled, checked against the float64 product with the pruned matrix, and timed in a process of its own: one that
    fails, hangs or crashes is recorded and the rest go on. Configs within the noise of the fastest one are decided by a fixed rule.

    The choices are kept in $SDBENCH_CACHE, else $XDG_CACHE_HOME/sdbench, else ~/.cache/sdbench, a readable file each. What is there
    for this GPU, kernel source and Triton is checked again and used; the rest is searched.

    \b
    sdbench tune --pattern 2:4
    sdbench tune --pattern 2:4 --pattern 16:32 --shapes qwen3-8b --effort quick
    sdbench tune --variant lane_row --shapes 4096x2560 --json
    sdbench tune --pattern 2:4 --variant tile --batch 2 --batch 4 --batch 8
    sdbench tune --pattern 2:4 --output run
    sdbench tune --pattern 2:4 --export kernels/tuned/sm_90.json
    """
    from sdbench.devices import require_gpu, resolve_device, resolve_dtype
    from sdbench.environment import describe
    from sdbench.errors import UsageError
    from sdbench.kernels.launching import capability
    from sdbench.kernels.tuned import cache_folder, open_set
    from sdbench.pattern import Pattern
    from sdbench.progress import Progress
    from sdbench.results import write_atomic
    from sdbench.suites.kernels.report import tune_report
    from sdbench.suites.kernels.shapes import parse_shapes
    from sdbench.suites.kernels.suite import require_right
    from sdbench.suites.kernels.tune import TuneRun, export, run
    from sdbench.suites.runs import origins

    if exported and effort == "none":
        raise UsageError("--export with --effort none: nothing is searched, so there is nothing to write")
    target = resolve_device(device)
    parsed = list(dict.fromkeys(Pattern.parse(text) for text in patterns))
    options = TuneRun(
        parsed, parse_shapes(shapes), resolve_dtype(dtype, target), target, variants, seed, effort, timeout,
        batches=tuple(dict.fromkeys(batches)),
    )  # fmt: skip
    # What was typed is checked first: a typo is a typo on every machine.
    require_gpu(target, device, NO_GPU)
    if exported:
        open_set(exported, capability(target))
    environment = describe(target)
    with run_directory(output, "tune", options.arguments(shapes), environment) as directory, Progress() as progress:
        rows = run(options, directory, progress)
        if exported:
            progress.note(f"{export(exported, rows, options)} choices merged into {exported}")
        if effort != "none":
            progress.note(f"choices are kept in {cache_folder()}")
        found = replace(tune_report(environment, rows), header=origins(directory))
        if output:
            write_atomic(output / "report.md", found.markdown())
    print_result(found, as_json)
    require_right(rows)
