"""``sdbench prune --shard`` and ``--devices``: statistics of a share of the examples, by as many processes as there are devices."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path

import torch
from rich.console import Console

from sdbench.calibrate.methods import METHODS
from sdbench.calibrate.stages import Stages
from sdbench.calibrate.store import RECORD, ShardRecord, StoredShard, read_shards, write_record, write_sums
from sdbench.checkpoints.provenance import Example
from sdbench.checkpoints.write import clear_draft, draft_of, require_disk, require_free
from sdbench.devices import resolve_device
from sdbench.environment import describe
from sdbench.errors import ExitCode, SdbenchError, UsageError
from sdbench.memory import peak_memory
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.data import Example as DataExample
from sdbench.suites.dense import load_dense, places, source_of
from sdbench.suites.e2e.calibration import Shard, calibrate, sums_in_turn
from sdbench.suites.e2e.data import calibration_questions
from sdbench.suites.prune import PruneOptions, calibration_speed, require_source


def shard_folder(folder: Path, shard: Shard) -> Path:
    """Where a shard's statistics go."""
    return folder / f"shard-{shard.number}-of-{shard.count}"


def require_shardable(options: PruneOptions) -> None:
    """Refuses what shards cannot give; to be called before anything else here.

    Raises:
        UsageError: Sequential calibration, or a method without calibration.
    """
    if options.sequential:
        raise UsageError("--sequential calibrates each block on the pruned ones before it, which shards cannot; leave out one of the two")
    if METHODS[options.method].needs == "none":
        raise UsageError(f"--method {options.method} needs no calibration, so that there is nothing to share out")


def collect_shard(
    options: PruneOptions, examples: Sequence[DataExample] | None, folder: Path, work: RunDirectory, progress: Progress
) -> StoredShard:
    """Collects one shard's statistics; nothing that is half-written looks like a shard.

    Args:
        options: What to collect, ``shard`` among it.
        examples: Calibration examples, all of them; None for a random model.
        folder: Where the shards are; this one gets a folder of its own in it, which must not be there yet.
        work: Where replies are kept until the statistics are there.
        progress: Where to report.

    Raises:
        UsageError: More shards than examples.
        SdbenchError: Not enough disk, a damaged model, calibration without rows.
    """
    shard = options.shard
    assert shard is not None
    output = shard_folder(folder, shard)
    require_free(output)
    stages = Stages(options.device)
    with stages("load"):
        loaded, linears = load_dense(options, progress, stream=options.stream)
    kind = METHODS[options.method].needs
    assert kind != "none"
    clear_draft(output)
    require_disk({output: sum(4 * linear.in_features ** (2 if kind == "hessian" else 1) for linear in linears.values())})
    with stages("hash"):
        source = source_of(options, loaded, linears, progress)
    require_source(work, source)
    with draft_of(output) as draft:
        with peak_memory(*places(options, loaded)) as peak:
            questions = calibration_questions(options, examples, loaded)
            made = calibrate(options, loaded, linears, questions, progress, shard=shard, kept=work, stages=stages)
            label = options.sources[0]
            turns = sums_in_turn(options, loaded, linears, made.texts[label], progress, label)
            layers, files = write_sums(draft, stages.timed("collection", turns))
        record = ShardRecord(
            shard=shard.number,
            shards=shard.count,
            kind=kind,
            source=source,
            arguments=options.arguments(),
            numbers=made.numbers,
            examples=[Example(id=questions[number].id, prompt_hash=questions[number].prompt_hash) for number in made.numbers],
            report=made.report,
            layers=layers,
            files=files,
            seconds=stages.seconds,
            speed=calibration_speed(stages, made.report),
            peak_bytes=peak.bytes,
        )
        write_record(draft, record)
    return StoredShard(output, record)


def collect_on(
    devices: Sequence[str], options: PruneOptions, examples: Sequence[DataExample] | None, folder: Path, progress: Progress
) -> list[StoredShard]:
    """Collects as many shards as there are devices, each in a process of its own; those that are there already are kept.

    Args:
        devices: Their names, as ``--device`` takes them.
        options: What to collect.
        examples: Calibration examples; None for a random model.
        folder: Where the shards go.
        progress: Where to report.

    Raises:
        UsageError: More devices than examples.
        SdbenchError: What a process could not do.
    """
    shares = [Shard(number, len(devices)) for number in range(1, len(devices) + 1)]
    pairs = [(share, device) for share, device in zip(shares, devices, strict=True) if not (shard_folder(folder, share) / RECORD).is_file()]
    if pairs:
        shares[-1].numbers(options.calibration_examples)
        # CUDA cannot be forked.
        with ProcessPoolExecutor(len(pairs), get_context("spawn")) as pool, progress.task("shards", len(pairs)) as task:
            waiting = [pool.submit(_collect, replace(options, shard=share), examples, folder, device) for share, device in pairs]
            try:
                for future in as_completed(waiting):
                    future.result()
                    task.advance()
            except KeyboardInterrupt:
                # On a terminal Ctrl-C reaches them too; a signal to this process alone does not.
                for child in active_children():
                    child.terminate()
                raise
            except BrokenProcessPool as error:
                raise SdbenchError(
                    f"a process that collected a shard was killed (out of memory?); what is done is kept in {folder}"
                ) from error
    return read_shards(folder)


def remove_collected(folder: Path, count: int) -> None:
    """Removes the shards that `collect_on` made, and the folder if it held nothing else; a shard that was there before it stays."""
    for number in range(1, count + 1):
        shard = shard_folder(folder, Shard(number, count))
        if (work := _work_folder(shard)).is_dir():
            shutil.rmtree(shard)
            shutil.rmtree(work)
    with suppress(OSError):
        folder.rmdir()


def _work_folder(shard: Path) -> Path:
    return shard.with_name(f"{shard.name}.work")


def _collect(options: PruneOptions, examples: Sequence[DataExample] | None, folder: Path, device: str) -> None:
    """One process's part of `collect_on`."""
    target = resolve_device(device)
    if target.type == "cpu":
        torch.set_num_threads(1)
    options = replace(options, device=target)
    assert options.shard is not None
    work = _work_folder(shard_folder(folder, options.shard))
    # No bars: other processes write to the same terminal.
    progress = Progress(Console(stderr=True, force_terminal=False, highlight=False))
    try:
        with (
            RunDirectory.open(work, "prune", options.arguments(), describe(target if target.type == "cuda" else None)) as directory,
            progress,
        ):
            collect_shard(options, examples, folder, directory, progress)
    except KeyboardInterrupt as error:
        raise SdbenchError("interrupted", ExitCode.INTERRUPTED) from error
