"""``sdbench decode``: how fast a model decodes at batch 1, dense and pruned, and where the time goes."""

from dataclasses import replace
from pathlib import Path

import rich_click as click

from sdbench.cli.options import (
    SPREAD,
    device_map_option,
    device_option,
    json_option,
    model_dtype_option,
    model_option,
    output_option,
    run_directory,
)
from sdbench.cli.printing import print_result


@click.command("decode")
@model_option
@click.option("--revision", help="Revision of a hub model.")
@click.option("--pattern", "patterns", multiple=True, default=["2:4"], show_default=True, help="N:M, N kept of M; may be repeated.")
@click.option("--context", "contexts", type=int, multiple=True, default=[128], show_default=True, help="Prompt length; may be repeated.")
@click.option("--batch", "batches", type=int, multiple=True, default=[1], show_default=True, help="Prompts at once; may be repeated.")
@click.option("--tokens", type=int, default=256, show_default=True, help="Exact length of the timed replies.")
@click.option("--repeats", type=int, default=3, show_default=True, help="Timed replies; the median counts.")
@click.option("--warmup-tokens", type=int, default=8, show_default=True, help="Tokens decoded before timing.")
@click.option(
    "--baselines/--no-baselines",
    default=True,
    show_default=True,
    help="Also time transformers' own ways (eager, static cache in a graph, torch.compile) at the first context length.",
)
@click.option("--profile", "profiled", is_flag=True, help="Also show device time by kind of kernel, for a step of each arm.")
@click.option("--targets", multiple=True, help="Pattern of linears to prune, such as '*.mlp.*'; all when left out.")
@click.option("--ignore", multiple=True, help="Pattern of linears to leave dense.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
@model_dtype_option
@device_option
@device_map_option
@output_option
@json_option
def command(
    model: str | None,
    revision: str | None,
    patterns: tuple[str, ...],
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    device: str,
    device_map: str | None,
    dtype: str,
    output: Path | None,
    as_json: bool,
    tokens: int,
    repeats: int,
    warmup_tokens: int,
    baselines: bool,
    profiled: bool,
    targets: tuple[str, ...],
    ignore: tuple[str, ...],
    seed: int,
) -> None:
    """Time decoding, dense, int8 and pruned, over context lengths and batches; profile a step.

    Beside the fused step, transformers' own ways are timed. Attention grows with the context and no pruning touches it, so that the
    speed-up shrinks: ask for the lengths that you serve.

    \b
    sdbench decode --model random:Qwen/Qwen3-4B-Instruct-2507
    sdbench decode --context 128 --context 2048 --context 8192 --profile
    sdbench decode --batch 1 --batch 4 --batch 16 --batch 32
    sdbench decode --model demo --tokens 32 --no-baselines
    """
    from sdbench.devices import require_gpu, resolve_device, resolve_dtype
    from sdbench.environment import describe
    from sdbench.models import resolve_model
    from sdbench.pattern import Pattern
    from sdbench.progress import Progress
    from sdbench.results import write_atomic
    from sdbench.suites.decode.options import DecodeOptions
    from sdbench.suites.decode.report import report
    from sdbench.suites.decode.suite import require_some, run
    from sdbench.suites.runs import origins

    target = resolve_device(device)
    options = DecodeOptions(
        spec=resolve_model(model, revision, target),
        device=target,
        dtype=resolve_dtype(dtype, target),
        patterns=tuple(dict.fromkeys(Pattern.parse(text) for text in patterns)),
        contexts=tuple(dict.fromkeys(contexts)),
        batches=tuple(sorted(set(batches))),
        tokens=tokens,
        repeats=repeats,
        warmup_tokens=warmup_tokens,
        baselines=baselines,
        profiled=profiled,
        targets=targets,
        ignore=ignore,
        seed=seed,
        device_map=device_map,
    )
    if device_map:
        require_gpu(target, device, SPREAD)
    if profiled:
        require_gpu(target, device, "--profile counts a GPU's kernels; leave it out")
    environment = describe(target if target.type == "cuda" else None)
    with run_directory(output, "decode", options.arguments(), environment) as directory, Progress() as progress:
        progress.note(f"model: {options.spec.name} ({options.spec.reason})")
        rows = run(options, directory, progress)
        found = replace(report(rows, options.arguments(), environment), header=origins(directory))
        if output:
            write_atomic(output / "report.md", found.markdown())
    print_result(found, as_json)
    require_some(rows)
