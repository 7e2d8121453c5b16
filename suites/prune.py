"""``sdbench prune``: calibrate on the dense model, prune layer by layer, write a checkpoint; a stopped run goes on where it was."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sdbench.calibrate.methods import METHODS, Pruned
from sdbench.calibrate.sequential import find_blocks
from sdbench.calibrate.sources import CalibrationText, needs
from sdbench.calibrate.stages import Stages
from sdbench.calibrate.store import StoredShard, merge_reports, merged
from sdbench.checkpoints.layout import PARTS, Format
from sdbench.checkpoints.provenance import Calibration, Example, Layer, Origin, Provenance, Rows, Source
from sdbench.checkpoints.stored import to_dense, to_stored
from sdbench.checkpoints.write import checkpoint_bytes, clear_draft, packed_bytes, require_disk, write_checkpoint
from sdbench.errors import CheckFailed, SdbenchError, UsageError
from sdbench.memory import Peak, peak_memory, resident_bytes
from sdbench.models import LoadedModel
from sdbench.packing import StoredWeight, require_exact, require_finite
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.streaming import resident, unique_state
from sdbench.suites.data import Example as DataExample
from sdbench.suites.dense import load_dense, places, source_of, streamed
from sdbench.suites.e2e.calibration import Shard, calibrate, prune
from sdbench.suites.e2e.data import Question, calibration_questions
from sdbench.suites.e2e.options import CalibrationOptions
from sdbench.suites.replies import REPLIES_FILE, write_replies


@dataclass(frozen=True, kw_only=True)
class PruneOptions(CalibrationOptions):
    """One pruning run.

    Attributes:
        format: ``"packed"``, or ``"dense"`` for an ordinary checkpoint with zeros.
        shard: The share of the examples that this process collects statistics of; None to prune.
        stream: Have one block's weights in memory at a time.
    """

    format: Format = "packed"
    shard: Shard | None = None
    stream: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream and not self.replies and "reply" in needs(self.sources, self.choices):
            raise UsageError(
                f"--stream cannot decode replies, which calibration source {self.sources[0]} needs: a token would take as long as "
                "reading the whole model; give replies that the model made where it is served as --replies, or use --calib teacher-forced, "
                "--calib prefill, or --calib text with --calibration-text"
            )


@dataclass(frozen=True)
class PruneOutcome:
    """What a run made.

    Attributes:
        provenance: Contents of the checkpoint's ``sdbench.json``.
        dense_bytes: Bytes of the dense model's tensors.
        bytes: Bytes of the checkpoint's tensors.
        resumed: Layers that an earlier, interrupted run had pruned.
        seconds: Wall time by stage.
        peak: Peak memory of calibrating and pruning, the model included.
        model_bytes: Memory in use once the model was loaded, of the same kind.
        speed: What calibration took, see `calibration_speed`.
        streaming: What a streamed model took, see `streamed`; None for one that was loaded whole.
        files: The pruned layers' files in the work folder, which the checkpoint holds now.
    """

    provenance: Provenance
    dense_bytes: int
    bytes: int
    resumed: int
    seconds: dict[str, float]
    peak: Peak
    model_bytes: int
    speed: dict[str, Any]
    streaming: dict[str, Any] | None
    files: list[Path]


def run(
    options: PruneOptions,
    examples: Sequence[DataExample] | None,
    output: Path,
    work: RunDirectory,
    progress: Progress,
    shards: Sequence[StoredShard] = (),
) -> PruneOutcome:
    """Prunes a model and writes the checkpoint.

    Args:
        options: What to do.
        examples: Calibration examples, drawn by :func:`sdbench.suites.e2e.data.load_calibration`; None for a random model.
        output: The checkpoint's folder, not there yet.
        work: Where replies and pruned layers are kept until all of them are there.
        progress: Where to report.
        shards: Statistics that were collected already, and fit (see `require_fitting`); without any the model is calibrated here.

    Raises:
        UsageError: A pattern or width that does not fit, or an output, or in the work folder a layer, that is there already.
        SdbenchError: Not enough disk, a damaged model, calibration without rows, NaN or Inf.
        CheckFailed: Shards of another model.
    """
    stages = Stages(options.device)
    with stages("load"):
        loaded, linears = load_dense(options, progress, stream=options.stream)
    size = checkpoint_bytes(loaded.model, linears, options.pattern, options.format)
    pruner = _Pruner(options, loaded, linears, work, progress, stages)
    # The pruned layers lie on a disk twice until the checkpoint is complete.
    clear_draft(output)
    require_disk({output: size, work.path: sum(packed_bytes(linears[name], options.pattern) for name in pruner.remaining)})
    with stages("hash"):
        source = source_of(options, loaded, linears, progress)
    sizes = [tensor.nbytes for tensor in unique_state(loaded.model).values()]
    require_source(work, source)
    if shards and shards[0].record.source.sha256 != source.sha256:
        raise CheckFailed(f"the shards in {shards[0].folder.parent} are of another model than {options.spec.name}: another SHA-256")
    devices = places(options, loaded)
    model_bytes = resident_bytes(*devices)
    with peak_memory(*devices) as peak:
        made = merged_calibration(shards) if shards else pruner.calibrate(examples)
        reports = pruner.prune(made["texts"], shards)
    origin = Origin(
        method=options.method,
        pattern=str(options.pattern),
        seed=options.seed,
        source=source,
        calibration=_calibration(options, made, reports),
        layers={name: Layer(shape=(linear.out_features, linear.in_features), report=reports[name]) for name, linear in linears.items()},
    )
    with stages("writing"), progress.task("writing", len(sizes)) as task:
        provenance = write_checkpoint(
            output, loaded.model, loaded.tokenizer, origin, pruner.load, options.format, on_tensor=task.advance, read=pruner.read
        )
    resumed = len(linears) - len(pruner.remaining)
    speed = calibration_speed(stages, made["report"], resumed)
    streaming, files = streamed(loaded, stages), [*pruner.files.values()]
    return PruneOutcome(provenance, sum(sizes), size, resumed, stages.seconds, peak, model_bytes, speed, streaming, files)


def require_source(work: RunDirectory, source: Source) -> None:
    """Records the model of a fresh run; an interrupted one goes on with the same model alone.

    Raises:
        SdbenchError: It began with another.
    """
    began = next((row["sha256"] for row in work.rows if row["record"] == "source"), None)
    if began is None:
        work.add_row({"record": "source", "sha256": source.sha256})
    elif began != source.sha256:
        raise SdbenchError(f"another model than the one that the interrupted run in {work.path} began with; remove that folder")


def require_fitting(options: PruneOptions, shards: Sequence[StoredShard]) -> None:
    """Refuses shards that were not collected for this command: all but what is chosen after calibration must be the same.

    Raises:
        UsageError: A method that needs other statistics, or none, or one that goes block by block.
        CheckFailed: Another option.
    """
    record = shards[0].record
    needs = METHODS[options.method].needs
    if needs == "none" or options.sequential:
        what = "--sequential calibrates each block on the pruned ones before it" if options.sequential else f"{options.method} needs none"
        raise UsageError(f"statistics that were collected before cannot be used: {what}")
    if needs == "hessian" and record.kind != needs:
        raise UsageError(f"--method {options.method} needs Hessians, and the shards hold sums of squares; collect them with this method")
    after = {"pattern", "method", "format", "shard", "targets", "ignore", "batch_size", "device", "device_map", "stream"}
    now = options.arguments()
    for name in dict.fromkeys((*record.arguments, *now)):
        if name not in after and record.arguments.get(name) != now.get(name):
            there, option = shards[0].folder.parent, name.replace("_", "-")
            raise CheckFailed(f"--{option} is {now.get(name)}, and the shards in {there} were collected with {record.arguments.get(name)}")


def merged_calibration(shards: Sequence[StoredShard]) -> dict[str, Any]:
    """The calibration's record as one process over all examples would have made it, without the texts."""
    records = [shard.record for shard in shards]
    pairs = [pair for record in records for pair in zip(record.numbers, record.examples, strict=True)]
    return {
        "examples": [example.model_dump() for _, example in sorted(pairs, key=lambda pair: pair[0])],
        "report": merge_reports([record.report for record in records]) | {"shards": len(records)},
        "texts": [],
    }


def calibration_speed(stages: Stages, report: Mapping[str, Any], resumed: int = 0) -> dict[str, Any]:
    """How fast replies were decoded here, and what share of that time collecting adds.

    Args:
        stages: Seconds, and the tokens that were decoded, of this process.
        report: The calibration's.
        resumed: Layers whose statistics an earlier run collected.
    """
    tokens, seconds = stages.items.get("generation", 0), stages.seconds.get("generation")
    replied = report["replies"]
    reason = None
    if not replied:
        reason = "the source needs no replies"
    elif not seconds:
        reason = "no reply was decoded by this process"
    elif resumed or tokens != replied["tokens"]:
        reason = "an earlier run did a part of it"
    collected = stages.seconds.get("collection", 0.0)
    return {
        "generated_tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else None,
        "generation": report["generation"],
        "collection_overhead": None if reason or not seconds else collected / seconds,
        "collection_overhead_reason": reason,
    }


class _Pruner:
    """Prunes what the work folder does not hold yet; a layer's file and then its row are written as soon as it is pruned."""

    def __init__(
        self,
        options: PruneOptions,
        loaded: LoadedModel,
        linears: dict[str, nn.Linear],
        work: RunDirectory,
        progress: Progress,
        stages: Stages,
    ):
        self.options, self.loaded, self.linears, self.work, self.progress, self.stages = options, loaded, linears, work, progress, stages
        self.files = {name: work.path / f"layer-{number:05d}.safetensors" for number, name in enumerate(linears)}
        if not work.rows and (foreign := next((file for file in self.files.values() if file.exists()), None)):
            raise UsageError(f"{foreign} is there already, and no layer that this run pruned; choose another --run-directory")
        done = {row["layer"] for row in work.rows if row["record"] == "layer" and _is_whole(self.files[row["layer"]])}
        if options.sequential:
            # The layers of a block are pruned from one look at the block as it was: a block that was left half done begins anew.
            prefixes = [f"{prefix}." for prefix in find_blocks(loaded.model, linears)]
            for inside in ({name for name in linears if name.startswith(prefix)} for prefix in prefixes):
                done -= inside if not inside <= done else set()
        self.done = done
        self.remaining = {name: linear for name, linear in linears.items() if name not in done}

    def calibrate(self, examples: Sequence[DataExample] | None) -> dict[str, Any]:
        """The calibration's record: examples, texts and report; an earlier run's where there is one."""
        for row in self.work.rows:
            if row["record"] == "calibration":
                return row
        options = self.options
        questions = calibration_questions(options, examples, self.loaded) if options.sources else []
        made = calibrate(options, self.loaded, self.linears, questions, self.progress, kept=self.work, stages=self.stages)
        self._keep_replies(questions)
        texts = made.texts[options.sources[0]] if options.sources else []
        row = {
            "record": "calibration",
            "examples": [{"id": questions[number].id, "prompt_hash": questions[number].prompt_hash} for number in made.numbers],
            "report": made.report,
            "texts": [{"ids": list(text.ids), "rows": list(text.rows)} for text in texts],
        }
        self.work.add_row(row)
        return row

    def prune(self, texts: Sequence[Mapping[str, Any]], shards: Sequence[StoredShard]) -> dict[str, dict[str, Any]]:
        """Prunes the remaining layers; returns every layer's report."""
        replayed = [CalibrationText(tuple(text["ids"]), tuple(text["rows"])) for text in texts]
        label = "/".join(self.options.sources) or self.options.method
        given = merged(shards, self.remaining, self.options.device) if shards else None
        if self.remaining:
            with self._earlier_in_place():
                for name, pruned in prune(
                    self.options, self.loaded, self.remaining, replayed, self.progress, label, given=given, stages=self.stages
                ):
                    with self.stages("packing"):
                        self._keep(name, pruned)
        return {row["layer"]: row["report"] for row in self.work.rows if row["record"] == "layer"}

    def load(self, name: str) -> StoredWeight:
        """A pruned layer's weight."""
        return StoredWeight(**load_file(self.files[name]))

    def read(self, name: str) -> Tensor:
        """A tensor that stays as it is."""
        layer, _, what = name.rpartition(".")
        module = self.loaded.model.get_submodule(layer)
        with resident([module]):
            found: Tensor = getattr(module, what).detach()
        return found

    def _keep_replies(self, questions: Sequence[Question]) -> None:
        """Writes the replies that were decoded as a file that another run takes for its ``--replies``."""
        rows = [row for row in self.work.rows if row["record"] == "replies"]
        if rows and self.options.spec.kind != "random":
            ids = {number: reply for row in rows for number, reply in zip(row["numbers"], row["ids"], strict=True)}
            write_replies(self.work.path / REPLIES_FILE, questions, ids, self.loaded)

    def _keep(self, name: str, pruned: Pruned) -> None:
        require_exact(pruned.keep, self.options.pattern, name)
        require_finite(pruned.weight, name, "pruned weight", "raise the damping, or prune in bf16 or fp32")
        stored = to_stored(pruned.weight, pruned.keep)
        _save(self.files[name], {part: getattr(stored, part).contiguous() for part in PARTS})
        self.work.add_row({"record": "layer", "layer": name, "report": pruned.report})

    def _earlier_in_place(self) -> AbstractContextManager[None]:
        """Inside, sequential calibration finds what it has to: the layers that were pruned before the interruption."""
        earlier = sorted(self.done) if self.options.sequential else []
        if self.loaded.stream:
            return self.loaded.stream.instead(earlier, lambda name: to_dense(self.load(name), name))
        # Over their own weights, which nothing asks for again: beside them there may be no room for as many.
        for name in earlier:
            self.linears[name].weight.data.copy_(to_dense(self.load(name), name))
        return nullcontext()


def _calibration(options: PruneOptions, made: Mapping[str, Any], reports: Mapping[str, Mapping[str, Any]]) -> Calibration:
    rows = [report["rows"] for report in reports.values() if "rows" in report]
    return Calibration(
        source=options.sources[0] if options.sources else None,
        examples=[Example(**example) for example in made["examples"]],
        rows=Rows(min=min(rows), max=max(rows)) if rows else None,
        report=made["report"],
        arguments=options.arguments(),
    )


def _save(file: Path, tensors: dict[str, Tensor]) -> None:
    draft = file.with_suffix(".tmp")
    try:
        save_file(tensors, draft)
        # The layer's row, which is on the disk before the next layer begins, must not outlive its file.
        descriptor = os.open(draft, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(file)
    except (OSError, SafetensorError) as error:
        raise SdbenchError(f"cannot write {file}: {getattr(error, 'strerror', None) or error}") from error


def _is_whole(file: Path) -> bool:
    """Whether a layer's file is there in full; its header says how long it is."""
    try:
        with safe_open(file, "pt") as stored:
            return set(stored.keys()) == set(PARTS)
    except (OSError, SafetensorError):
        return False
