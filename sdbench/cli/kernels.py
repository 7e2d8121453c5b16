"""``sdbench kernels``: check, search and time the SpMV variants."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import rich_click as click

from sdbench.cli.options import (
    SPMM_VARIANTS,
    SPMV_VARIANTS,
    batches_option,
    device_option,
    json_option,
    min_speedup_option,
    output_option,
    products_options,
    run_directory,
    timeout_option,
    variants_option,
)
from sdbench.cli.printing import print_result


@click.command("kernels")
@products_options
@variants_option("Variant to run", f"{', '.join(SPMV_VARIANTS)}, and {', '.join(SPMM_VARIANTS)} for more tokens than one (--batch)")
@click.option(
    "--effort",
    type=click.Choice(["none", "quick", "full"]),
    default="quick",
    show_default=True,
    help="Configs to search where the cache holds no choice: the default alone, about a dozen a variant, or all.",
)
@timeout_option("Seconds a compiled config may take.")
@click.option("--no-cache", is_flag=True, help="Neither use the tuned configs of earlier runs nor keep this one's.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and inputs.")
@device_option
@min_speedup_option("Exit with 4 when the best variant's sum is not this many times as fast as the fastest dense; on a GPU.")
@batches_option("Tokens multiplied at once: 1 is a decode step at batch 1; may be given several times, for where pruning stops paying.")
@click.option(
    "--chain",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Also time this many layers of the shapes in one CUDA graph, each product reading the one before; on a GPU.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw time over bytes read, with the roofline (.png, .svg or .pdf); on a GPU."
)
@output_option
@json_option
def command(
    patterns: tuple[str, ...],
    shapes: str,
    dtype: str,
    variants: tuple[str, ...],
    effort: Literal["none", "quick", "full"],
    timeout: float,
    no_cache: bool,
    seed: int,
    device: str,
    min_speedup: float | None,
    batches: tuple[int, ...],
    chain: int,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Check, search and time every SpMV variant on a model's shapes.

    Each config is checked against the float64 product with the pruned matrix before it is timed; timings are cold-L2 medians inside one
    CUDA graph, next to F.linear and a tuned dense kernel of the same run. Without a GPU the variants are checked in Triton's interpreter.

    The config of each variant comes from the user's cache (see sdbench tune) or from a search, which the cache then holds. A config that
    hangs or crashes ends a process of its own and is a row; the run goes on.

    \b
    sdbench kernels --pattern 2:4
    sdbench kernels --pattern 2:4 --pattern 16:32 --shapes llama-3.1-8b
    sdbench kernels --pattern 4:8 --shapes 4096x2560,2560x9728 --json
    sdbench kernels --pattern 2:4 --effort full --no-cache
    sdbench kernels --pattern 2:4 --chain 36
    sdbench kernels --pattern 2:4 --batch 1 --batch 4 --batch 16
    sdbench kernels --pattern 2:4 --output run --plot run/roofline.png
    """
    from sdbench.devices import require_gpu, resolve_device, resolve_dtype

    target = resolve_device(device)
    if target.type == "cpu":
        # Triton decides at import whether its functions are interpreted.
        os.environ["TRITON_INTERPRET"] = "1"
    from sdbench.environment import describe
    from sdbench.errors import ExitCode, SdbenchError, UsageError
    from sdbench.pattern import Pattern
    from sdbench.progress import Progress
    from sdbench.results import write_atomic
    from sdbench.suites.kernels.chain import require_chain, run_chains
    from sdbench.suites.kernels.report import NO_GPU, report, slowest_speedup
    from sdbench.suites.kernels.shapes import parse_shapes
    from sdbench.suites.kernels.suite import KernelRun, require_right, run
    from sdbench.suites.runs import origins

    if plot:
        from sdbench.suites.kernels.plot import draw
        from sdbench.suites.plots import check_plot, save_plot

        check_plot(plot)
    parsed = list(dict.fromkeys(Pattern.parse(text) for text in patterns))
    options = KernelRun(
        parsed,
        parse_shapes(shapes),
        resolve_dtype(dtype, target),
        target,
        variants,
        seed,
        effort,
        timeout,
        use_cache=not no_cache,
        batches=tuple(dict.fromkeys(batches)),
    )
    for name, given in (("--chain", chain), ("--plot", plot), ("--min-speedup", min_speedup is not None)):
        if given and 1 not in options.batches:
            raise UsageError(f"{name} is about one token; add --batch 1, or leave it out")
    if chain:
        require_chain(options.shapes)
    for name, given in (("--chain", chain), ("--plot", plot), ("--min-speedup", min_speedup is not None)):
        if given:
            require_gpu(target, device, f"{name} needs timings, and those take a GPU; leave it out")
    arguments = options.arguments(shapes) | {"cache": not no_cache, "chain": chain}
    environment = describe(target if target.type == "cuda" else None)
    with run_directory(output, "kernels", arguments, environment) as directory, Progress() as progress:
        if target.type == "cpu":
            progress.note(NO_GPU)
        rows = run(options, directory, progress)
        chains = run_chains(rows, options, chain, directory, progress)
        found = replace(report(arguments, environment, rows, chains), header=origins(directory))
        if output:
            write_atomic(output / "report.md", found.markdown())
    print_result(found, as_json)
    plotted = save_plot(plot, draw(rows, environment["gpu"]["name"] if environment["gpu"] else "no GPU")) if plot else True
    require_right(rows)
    if any(row["outcome"] == "incorrect" for row in chains):
        raise SdbenchError("a chain gave a wrong result: see its row", ExitCode.CHECK_FAILED)
    if not plotted:
        raise SdbenchError(f"nothing to plot in {plot}: no row has a timing", ExitCode.NOTHING_SELECTED)
    slowest = slowest_speedup(rows)
    if min_speedup is not None and (slowest is None or slowest < min_speedup):
        reached = "no timings" if slowest is None else f"{slowest:.2f} over the fastest dense"
        raise SdbenchError(f"slower than --min-speedup {min_speedup:g}: {reached}", ExitCode.SLOWER)
