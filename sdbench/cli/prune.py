"""``sdbench prune``: a dense model in, a pruned checkpoint out."""

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Literal

import rich_click as click

from sdbench.cli.calibration import METHODS, SOURCES, calibration_options
from sdbench.cli.options import (
    DEMO_MAX_TOKENS,
    MAX_TOKENS,
    SPREAD,
    device_map_option,
    device_option,
    json_option,
    model_dtype_option,
    model_option,
    no_room,
)
from sdbench.cli.profiles import given_options, unused_prompt_tokens
from sdbench.cli.pruned import prune_document, prune_lines, shard_lines

FILE = click.Path(path_type=Path)

WITHOUT_CALIBRATION = frozenset(
    (
        *("output", "model", "revision", "pattern", "method", "kind", "targets", "ignore", "dtype", "device", "device_map", "stream"),
        *("run_directory", "as_json"),
    )
)
"""Options that mean something for a method that needs no calibration; every other one is about calibration."""


@click.command("prune")
@click.option("--output", type=FILE, help="Folder of the checkpoint; must not be there yet.")
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
@click.option(
    "--replies",
    type=FILE,
    help="The model's own replies, made elsewhere, to replay instead of decoding: JSONL with question, reply (or its token ids as ids) and "
    "finish_reason or eos; its questions take the place of --train.",
)
@click.option("--calibration-examples", type=int, default=16, show_default=True, help="Examples of --train or --replies to calibrate on.")
@click.option("--max-tokens", type=int, help=f"Longest calibration reply.  [default: {MAX_TOKENS}; {DEMO_MAX_TOKENS} for the demo model]")
@click.option("--prompt-tokens", type=int, default=128, show_default=True, help="Prompt length for a random: model.")
@click.option("--batch-size", type=int, default=16, show_default=True, help="Calibration replies decoded at once.")
@calibration_options
@click.option("--targets", multiple=True, help="Pattern of linears to prune, such as '*.mlp.*' or down_proj; all when left out.")
@click.option("--ignore", multiple=True, help="Pattern of linears to leave dense.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of every draw.")
@model_dtype_option
@device_option
@device_map_option
@click.option(
    "--run-directory",
    type=FILE,
    help="Where replies and pruned layers are kept until the checkpoint is complete, and run.json and rows.jsonl (times of every stage, "
    "peak memory) and replies.jsonl (for --replies) afterwards.  [default: a folder beside the output, gone afterwards]",
)
@click.option(
    "--stream",
    is_flag=True,
    help="Read the model block by block, so that one larger than the device can be pruned; decodes no replies, but takes --replies.",
)
@click.option("--devices", help="Collect statistics on several devices at once, a process each, such as cuda:0,cuda:1.")
@click.option("--shard", "share", help="Only collect statistics, of share I/N of the examples, into --statistics.")
@click.option("--statistics", type=FILE, help="Folder that gets the --shard.")
@click.option("--merge", "merge", type=FILE, help="Prune by the statistics of all the shards in this folder.")
@json_option
def command(
    output: Path | None,
    calib: str,
    model: str | None,
    revision: str | None,
    pattern: str,
    kind: Literal["packed", "dense"],
    max_tokens: int | None,
    run_directory: Path | None,
    devices: str | None,
    share: str | None,
    statistics: Path | None,
    merge: Path | None,
    device: str,
    dtype: str,
    as_json: bool,
    **rest: object,
) -> None:
    """Calibrate, prune and write a checkpoint that sdbench.load and transformers read.

    Replies and pruned layers are kept in a folder beside the output until the checkpoint is complete: the same command goes on where it was
    stopped. What the checkpoint was made of and on, with hashes, is in its sdbench.json; 'sdbench verify' checks it.

    On several GPUs of one machine, --devices shares the examples out. On several machines, collect a --shard on each and --merge them.

    \b
    sdbench prune --output demo-2-4
    sdbench prune --model org/model --method sparsegpt --output pruned
    sdbench prune --model model.gguf --pattern 16:32 --format dense --output zeros
    sdbench prune --train data/train.jsonl \\
        --split-manifest data/manifest.json --output pruned
    sdbench prune --model org/large --stream --replies replies.jsonl --output pruned
    sdbench prune --model org/model --shard 1/2 --statistics shards
    sdbench prune --model org/model --merge shards --output pruned
    """
    from torch import OutOfMemoryError

    from sdbench.calibrate.store import read_shards
    from sdbench.checkpoints.write import require_free
    from sdbench.devices import require_gpu, resolve_device, resolve_dtype
    from sdbench.environment import describe
    from sdbench.errors import ExitCode, SdbenchError, UsageError
    from sdbench.models import resolve_model
    from sdbench.pattern import Pattern
    from sdbench.progress import Progress
    from sdbench.results import RunDirectory, strict_json
    from sdbench.suites.e2e.calibration import Shard
    from sdbench.suites.e2e.data import load_calibration
    from sdbench.suites.prune import PruneOptions, require_fitting, run
    from sdbench.suites.shards import collect_on, collect_shard, remove_collected, require_shardable, shard_folder

    shard = Shard.parse(share) if share is not None else None
    if (shard is None) != (statistics is None):
        raise UsageError("--shard and --statistics go together: which share, and the folder that gets it")
    if sum(option is not None for option in (shard, merge, devices)) > 1:
        raise UsageError("--shard, --merge and --devices exclude each other")
    if shard is not None and (output is not None or run_directory is not None):
        raise UsageError("--shard only collects statistics; leave out --output and --run-directory")
    if shard is None and output is None:
        raise UsageError("Missing option '--output'")
    if sum(map(bool, (rest["stream"], rest["device_map"], devices))) > 1:
        raise UsageError(
            "--stream, --device-map and --devices exclude each other: a block at a time, or on each GPU a part or all of the model"
        )
    goal = shard_folder(statistics, shard) if shard and statistics else output
    assert goal is not None
    require_free(goal)
    names = devices.split(",") if devices else []
    target = resolve_device(names[0] if names and device == "auto" else device)
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
        shard=shard,
        **rest,  # type: ignore[arg-type]  # click checked them
    )
    if options.device_map:
        require_gpu(target, device, SPREAD)
    examples = load_calibration(options)
    if shard or names:
        require_shardable(options)
    shards = read_shards(merge) if merge else []
    if shards:
        require_fitting(options, shards)
    if not options.sources:
        _refuse_calibration(options.method)
    # A run goes on with the statistics and the shares that it began with.
    merged = _digest([stored.record.files for stored in shards]) if shards else None
    arguments = options.arguments() | {"merged_sha256": merged, "devices": len(names)}
    key = _digest(arguments)[:8]
    work = run_directory or goal.with_name(f"{goal.name}.work-{key}")
    try:
        with (
            RunDirectory.open(work, "prune", arguments, describe(target if target.type == "cuda" else None)) as directory,
            Progress() as progress,
        ):
            progress.note(f"model: {spec.name} ({spec.reason})")
            for line in unused_prompt_tokens(spec.kind):
                progress.note(line)
            if directory.rows:
                progress.note(f"going on with what is in {work}")
            if shard and statistics:
                found = collect_shard(options, examples, statistics, directory, progress)
            else:
                if names:
                    shards = collect_on(names, options, examples, work / "statistics", progress)
                outcome = run(options, examples, goal, directory, progress, shards)
                document = prune_document(goal, outcome, shards)
                directory.add_row({"record": "result", **document, "provenance": outcome.provenance.sha256})
    except KeyboardInterrupt as error:
        raise SdbenchError(f"interrupted; the same command goes on with what is in {work}", ExitCode.INTERRUPTED) from error
    except OutOfMemoryError as error:
        raise no_room(error, "prune", f"what is finished is in {work}") from error
    except SdbenchError:
        # A first attempt that finished nothing has left no folder.
        if work.is_dir():
            click.echo(f"what is finished is in {work}, and the same command goes on with it", err=True)
        raise
    if run_directory:
        # It may be the user's, with other files in it.
        for file in outcome.files:
            file.unlink()
        if names:
            remove_collected(work / "statistics", len(names))
    else:
        shutil.rmtree(work)
    if shard:
        document = {"schema": "sdbench.shard/1", "output": str(goal), "statistics": found.record}
    if as_json:
        sys.stdout.write(strict_json(document, indent=2) + "\n")
        return
    for line in shard_lines(found) if shard else prune_lines(goal, outcome, shards):
        print(line)


def _refuse_calibration(method: str) -> None:
    """Refuses what the command line says about calibration, for a method that needs none."""
    from sdbench.errors import UsageError

    given = given_options({option.name for option in command.params if option.name} - WITHOUT_CALIBRATION)
    if given:
        them = "it" if len(given) == 1 else "them"
        raise UsageError(f"--method {method} needs no calibration, and {', '.join(given)} would change nothing; leave {them} out")


def _digest(value: object) -> str:
    from sdbench.results import strict_json

    return hashlib.sha256(strict_json(value).encode()).hexdigest()
