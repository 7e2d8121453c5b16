"""``sdbench prune``: a dense model in, a pruned checkpoint out."""

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Literal

import rich_click as click

from sdbench.cli.calibration import METHODS, SOURCES, calibration_options
from sdbench.cli.options import DEMO_MAX_TOKENS, MAX_TOKENS, device_option, json_option, model_dtype_option, model_option

FILE = click.Path(path_type=Path)


@click.command("prune")
@click.option("--output", type=FILE, required=True, help="Folder of the checkpoint; must not be there yet.")
@click.option("--calib", default="decode", show_default=True, help=f"Calibration source: {SOURCES}.")
@model_option
@click.option("--revision", help="Revision of a hub model.")
@click.option("--pattern", default="2:4", show_default=True, help="N:M, N kept of M.")
@click.option("--method", default="wanda", show_default=True, help=f"{METHODS}.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["packed", "dense"]),
    default="packed",
    show_default=True,
    help="packed, for sdbench and for transformers once sdbench is imported; or dense, an ordinary checkpoint with zeros.",
)
@click.option("--train", type=FILE, help="Calibration examples, JSONL with question and answer.  [default: bundled arithmetic]")
@click.option("--split-manifest", type=FILE, help="Manifest that pins --train, from 'sdbench split'.")
@click.option("--dataset-revision", help="Refuse a manifest that names another revision.")
@click.option("--calibration-examples", type=int, default=16, show_default=True, help="Examples of --train to calibrate on.")
@click.option("--max-tokens", type=int, help=f"Longest calibration reply.  [default: {MAX_TOKENS}; {DEMO_MAX_TOKENS} for the demo model]")
@click.option("--prompt-tokens", type=int, default=128, show_default=True, help="Prompt length for a random: model.")
@click.option("--batch-size", type=int, default=16, show_default=True, help="Calibration replies decoded at once.")
@calibration_options
@click.option("--targets", multiple=True, help="Pattern of linears to prune, such as '*.mlp.*' or down_proj; all when left out.")
@click.option("--ignore", multiple=True, help="Pattern of linears to leave dense.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of every draw.")
@model_dtype_option
@device_option
@json_option
def command(
    output: Path,
    calib: str,
    model: str | None,
    revision: str | None,
    pattern: str,
    kind: Literal["packed", "dense"],
    max_tokens: int | None,
    device: str,
    dtype: str,
    as_json: bool,
    **rest: object,
) -> None:
    """Calibrate, prune and write a checkpoint that sdbench.load and transformers read.

    Pruned layers are kept in a folder beside the output until the checkpoint is complete: the same command goes on where it was stopped.
    What the checkpoint was made of and on, with hashes, is in its sdbench.json; 'sdbench verify' checks it.

    \b
    sdbench prune --output demo-2-4
    sdbench prune --model org/model --method sparsegpt --output pruned
    sdbench prune --model model.gguf --pattern 16:32 --format dense --output zeros
    sdbench prune --train data/train.jsonl \\
        --split-manifest data/manifest.json --output pruned
    """
    from sdbench.checkpoints.write import require_free
    from sdbench.devices import resolve_device, resolve_dtype
    from sdbench.environment import describe
    from sdbench.errors import ExitCode, SdbenchError
    from sdbench.models import resolve_model
    from sdbench.pattern import Pattern
    from sdbench.progress import Progress
    from sdbench.results import RunDirectory, strict_json
    from sdbench.suites.e2e.data import load_calibration
    from sdbench.suites.prune import PruneOptions, run

    require_free(output)
    target = resolve_device(device)
    spec = resolve_model(model, revision, target)
    if max_tokens is None:
        max_tokens = DEMO_MAX_TOKENS if spec.kind == "demo" else MAX_TOKENS
    options = PruneOptions(
        spec=spec,
        device=target,
        dtype=resolve_dtype(dtype, target),
        pattern=Pattern.parse(pattern),
        calib=(calib,),
        format=kind,
        max_tokens=max_tokens,
        **rest,  # type: ignore[arg-type]
    )
    examples = load_calibration(options)
    arguments = options.arguments()
    key = hashlib.sha256(strict_json(arguments).encode()).hexdigest()[:8]
    work = output.with_name(f"{output.name}.work-{key}")
    try:
        with (
            RunDirectory.open(work, "prune", arguments, describe(target if target.type == "cuda" else None)) as directory,
            Progress() as progress,
        ):
            progress.note(f"model: {spec.name} ({spec.reason})")
            if directory.rows:
                progress.note(f"going on with what is in {work}")
            outcome = run(options, examples, output, directory, progress)
    except KeyboardInterrupt as error:
        raise SdbenchError(f"interrupted; the same command goes on with what is in {work}", ExitCode.INTERRUPTED) from error
    shutil.rmtree(work)
    found = outcome.provenance
    document = {
        "schema": "sdbench.prune/1",
        "output": str(output),
        "dense_bytes": outcome.dense_bytes,
        "bytes": outcome.bytes,
        "resumed_layers": outcome.resumed,
        "seconds": outcome.seconds,
        "peak_bytes": outcome.peak.bytes,
        "peak_bytes_reason": outcome.peak.reason,
        "provenance": found,
    }
    if as_json:
        sys.stdout.write(strict_json(document, indent=2) + "\n")
        return
    rows = found.calibration.rows
    print(f"{output}: {spec.name} at {found.pattern}, {found.method}, {found.format}")
    print(f"pruned layers: {len(found.layers)}" + (f", {outcome.resumed} of them by an earlier run" if outcome.resumed else ""))
    if rows:
        counts = f"{rows.min}" if rows.min == rows.max else f"{rows.min} to {rows.max}"
        print(f"calibration: {found.calibration.source}, {len(found.calibration.examples)} examples, {counts} rows a layer")
    print(f"bytes of weights: {outcome.bytes:,}, {outcome.bytes / outcome.dense_bytes:.3f} of the dense model's")
    print("seconds: " + ", ".join(f"{step} {seconds:.1f}" for step, seconds in outcome.seconds.items()))
    print(f"next: sdbench verify {output}")
