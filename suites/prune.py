"""``sdbench prune``: calibrate on the dense model, prune layer by layer, write a checkpoint; a stopped run goes on where it was."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sdbench.calibrate.numerics import require_weight
from sdbench.calibrate.select import select_linears
from sdbench.calibrate.sequential import find_blocks, weights_in_place
from sdbench.calibrate.sources import CalibrationText
from sdbench.checkpoints.layout import PARTS, Format
from sdbench.checkpoints.provenance import Calibration, Example, Layer, Origin, Provenance, Rows, Source, state_sha256
from sdbench.checkpoints.write import checkpoint_bytes, packed_bytes, require_disk, unique_state, write_checkpoint
from sdbench.errors import SdbenchError
from sdbench.memory import Peak, peak_memory
from sdbench.models import LoadedModel, load_model
from sdbench.packing import PackedWeight, StoredWeight, pack
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.data import Example as DataExample
from sdbench.suites.e2e.calibration import calibrate, prune
from sdbench.suites.e2e.data import calibration_questions
from sdbench.suites.e2e.options import CalibrationOptions


@dataclass(frozen=True, kw_only=True)
class PruneOptions(CalibrationOptions):
    """One pruning run.

    Attributes:
        format: ``"packed"``, or ``"dense"`` for an ordinary checkpoint with zeros.
    """

    format: Format = "packed"


@dataclass(frozen=True)
class PruneOutcome:
    """What a run made.

    Attributes:
        provenance: Contents of the checkpoint's ``sdbench.json``.
        dense_bytes: Bytes of the dense model's tensors.
        bytes: Bytes of the checkpoint's tensors.
        resumed: Layers that an earlier, interrupted run had pruned.
        seconds: Wall time by step.
        peak: Peak memory of calibrating and pruning, the model included.
    """

    provenance: Provenance
    dense_bytes: int
    bytes: int
    resumed: int
    seconds: dict[str, float]
    peak: Peak


def run(
    options: PruneOptions, examples: Sequence[DataExample] | None, output: Path, work: RunDirectory, progress: Progress
) -> PruneOutcome:
    """Prunes a model and writes the checkpoint.

    Args:
        options: What to do.
        examples: Calibration examples, drawn by :func:`sdbench.suites.e2e.data.load_calibration`; None for a random model.
        output: The checkpoint's folder, not there yet.
        work: Where pruned layers are kept until all of them are there.
        progress: Where to report.

    Raises:
        UsageError: A pattern or width that doesn't fit, or an output that is there already.
        SdbenchError: Not enough disk, a damaged model, calibration without rows, NaN or Inf.
    """
    clock = _Clock()
    with clock.step("load"):
        loaded = load_model(options.spec, options.device, options.dtype, progress.note)
        linears = select_linears(loaded.model, options.targets, options.ignore)
        for name, linear in linears.items():
            options.pattern.require_width(linear.in_features, name)
            require_weight(linear.weight, name)
    size = checkpoint_bytes(loaded.model, linears, options.pattern, options.format)
    pruner = _Pruner(options, loaded, linears, work, progress)
    # The pruned layers lie on the disk twice until the checkpoint is complete.
    require_disk(output, size + sum(packed_bytes(linears[name], options.pattern) for name in pruner.remaining))
    with clock.step("hash"):
        state = unique_state(loaded.model)
        source = Source(
            model=options.spec.name,
            kind=options.spec.kind,
            revision=loaded.spec.revision,
            dtype=str(options.dtype).removeprefix("torch."),
            sha256=state_sha256(state),
        )
    with peak_memory(options.device) as peak:
        with clock.step("calibration"):
            made = pruner.calibrate(examples, source.sha256)
        with clock.step("pruning"):
            reports = pruner.prune(made["texts"])
    origin = Origin(
        method=options.method,
        pattern=str(options.pattern),
        seed=options.seed,
        source=source,
        calibration=_calibration(options, made, reports),
        layers={name: Layer(shape=(linear.out_features, linear.in_features), report=reports[name]) for name, linear in linears.items()},
    )
    with clock.step("writing"), progress.task("writing", len(state)) as task:
        provenance = write_checkpoint(output, loaded.model, loaded.tokenizer, origin, pruner.load, options.format, on_tensor=task.advance)
    dense_bytes = sum(tensor.nbytes for tensor in state.values())
    return PruneOutcome(provenance, dense_bytes, size, len(linears) - len(pruner.remaining), clock.seconds, peak)


class _Pruner:
    """Prunes what the work folder does not hold yet; a layer's file and then its row are written as soon as it is pruned."""

    def __init__(self, options: PruneOptions, loaded: LoadedModel, linears: dict[str, nn.Linear], work: RunDirectory, progress: Progress):
        self.options, self.loaded, self.linears, self.work, self.progress = options, loaded, linears, work, progress
        self.files = {name: work.path / f"layer-{number:05d}.safetensors" for number, name in enumerate(linears)}
        done = {row["layer"] for row in work.rows if row["record"] == "layer" and self.files[row["layer"]].is_file()}
        if options.sequential:
            # The layers of a block are pruned from one look at the block as it was: a block that was left half done begins anew.
            prefixes = [f"{prefix}." for prefix in find_blocks(loaded.model, linears)]
            for inside in ({name for name in linears if name.startswith(prefix)} for prefix in prefixes):
                done -= inside if not inside <= done else set()
        self.done = done
        self.remaining = {name: linear for name, linear in linears.items() if name not in done}

    def calibrate(self, examples: Sequence[DataExample] | None, source_sha256: str) -> dict[str, Any]:
        """The calibration's record: examples, texts and report; an earlier run's where there is one."""
        for row in self.work.rows:
            if row["record"] == "calibration":
                if row["source_sha256"] != source_sha256:
                    raise SdbenchError(
                        f"another model than the one that the interrupted run in {self.work.path} began with; remove that folder"
                    )
                return row
        options = self.options
        questions = calibration_questions(options, examples, self.loaded) if options.sources else []
        made = calibrate(options, self.loaded, self.linears, questions, self.progress)
        texts = made.texts[options.sources[0]] if options.sources else []
        row = {
            "record": "calibration",
            "source_sha256": source_sha256,
            "examples": [{"id": question.id, "prompt_hash": question.prompt_hash} for question in questions[: len(texts)]],
            "report": made.report,
            "texts": [{"ids": list(text.ids), "rows": list(text.rows)} for text in texts],
        }
        self.work.add_row(row)
        return row

    def prune(self, texts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Prunes the remaining layers; returns every layer's report."""
        replayed = [CalibrationText(tuple(text["ids"]), tuple(text["rows"])) for text in texts]
        label = "/".join(self.options.sources) or self.options.method
        if self.remaining:
            with weights_in_place(self.linears, self._earlier()):
                for name, pruned in prune(self.options, self.loaded, self.remaining, replayed, self.progress, label):
                    stored = pack(pruned.weight, pruned.keep, self.options.pattern, name).to_stored()
                    _save(self.files[name], {part: getattr(stored, part).contiguous() for part in PARTS})
                    self.work.add_row({"record": "layer", "layer": name, "report": pruned.report})
        return {row["layer"]: row["report"] for row in self.work.rows if row["record"] == "layer"}

    def load(self, name: str) -> StoredWeight:
        """A pruned layer's weight."""
        return StoredWeight(**load_file(self.files[name]))

    def _earlier(self) -> dict[str, Tensor]:
        """What sequential calibration has to find in place: the layers that were pruned before the interruption."""
        if not self.options.sequential:
            return {}
        pattern, device = self.options.pattern, self.options.device
        return {name: PackedWeight.from_stored(self.load(name), pattern, device, name).unpack() for name in sorted(self.done)}


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
        draft.replace(file)
    except OSError as error:
        raise SdbenchError(f"cannot write {file}: {error.strerror}") from error


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
