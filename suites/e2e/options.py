"""What an end-to-end run is asked to do, checked before anything loads."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sdbench.calibrate.methods import METHODS
from sdbench.calibrate.registry import lookup
from sdbench.calibrate.sources import SOURCES
from sdbench.engine.packed_linear import PrefillWeights
from sdbench.errors import UsageError
from sdbench.models import ModelSpec
from sdbench.pattern import Pattern
from sdbench.suites.data import read_manifest

CONTROL = "teacher-forced"
"""Fixed-text calibration: the arm that every chosen source is compared with."""

DENSE = "dense"


@dataclass(frozen=True)
class Arm:
    """One row of the result.

    Attributes:
        name: ``dense``, a calibration source, or a method that needs none.
        source: Calibration source; None where there is nothing to calibrate.
        pruned: Whether the linears are pruned and packed.
    """

    name: str
    source: str | None
    pruned: bool


@dataclass(frozen=True)
class E2EOptions:
    """One end-to-end run.

    Attributes:
        spec: The model.
        device: Where it runs.
        dtype: Dtype of its weights.
        pattern: N:M.
        method: Pruning method by name.
        calib: Calibration sources beside the control.
        prefill: Matrix that the prompt runs on in pruned arms.
        train: File of calibration examples; None for the bundled task.
        validation: File of judged examples; None for the bundled task.
        split_manifest: Manifest that pins both files.
        dataset_revision: Revision that the manifest must name, or None.
        calibration_examples: Examples to calibrate on.
        validation_examples: Examples to judge.
        max_tokens: Longest reply of an answer run.
        equal_tokens: Exact length of a rate run.
        warmup_tokens: Tokens decoded before a rate run, untimed.
        rate_repeats: Rate runs an arm.
        prompt_tokens: Prompt length for a random model, which has no text to answer.
        batch_size: Calibration replies decoded at once.
        targets: Patterns of the linears to prune; none for all.
        ignore: Patterns of the linears to leave dense.
        seed: Seed of every draw.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    pattern: Pattern
    method: str
    calib: tuple[str, ...]
    prefill: PrefillWeights
    train: Path | None
    validation: Path | None
    split_manifest: Path | None
    dataset_revision: str | None
    calibration_examples: int
    validation_examples: int
    max_tokens: int
    equal_tokens: int
    warmup_tokens: int
    rate_repeats: int
    prompt_tokens: int
    batch_size: int
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    seed: int

    def __post_init__(self) -> None:
        least = {
            "calibration-examples": 1,
            "validation-examples": 1,
            "max-tokens": 1,
            "equal-tokens": 2,
            "warmup-tokens": 0,
            "rate-repeats": 1,
            "prompt-tokens": 1,
            "batch-size": 1,
        }
        for name, minimum in least.items():
            value = getattr(self, name.replace("-", "_"))
            if value < minimum:
                raise UsageError(f"--{name} is {value}; it must be at least {minimum}")
        lookup("method", self.method, METHODS)
        for source in self.calib:
            lookup("calibration source", source, SOURCES)
        files = (self.train, self.validation, self.split_manifest)
        if self.spec.kind == "random" and any(files):
            raise UsageError("a random: model has no text to answer; leave out --train, --validation and --split-manifest")
        if any(files) and not all(files):
            raise UsageError("--train, --validation and --split-manifest go together; 'sdbench split FILE --output DIR' makes all three")

    @property
    def arms(self) -> list[Arm]:
        """Dense, the control, then the chosen sources; a method that needs no calibration has one arm of its own name."""
        arms = [Arm(DENSE, None, pruned=False)]
        if METHODS[self.method].needs == "none":
            return [*arms, Arm(self.method, None, pruned=True)]
        return arms + [Arm(source, source, pruned=True) for source in dict.fromkeys((CONTROL, *self.calib))]

    def arguments(self) -> dict[str, Any]:
        """Every option that changes a result, for the run directory.

        Raises:
            SdbenchError: The manifest cannot be read.
        """
        text = {name: None if value is None else str(value) for name, value in self._texts().items()}
        numbers = {
            name: getattr(self, name)
            for name in (
                "calibration_examples",
                "validation_examples",
                "max_tokens",
                "equal_tokens",
                "warmup_tokens",
                "rate_repeats",
                "prompt_tokens",
                "batch_size",
                "seed",
            )
        }
        lists = {"calib": list(self.calib), "targets": list(self.targets), "ignore": list(self.ignore)}
        return text | numbers | lists | self._pinned

    @cached_property
    def _pinned(self) -> dict[str, str | None]:
        """What tells files of the same names apart: SHA-256 of both parts as their manifest has it, and a local model's file stamps."""
        parts = read_manifest(self.split_manifest).parts if self.split_manifest else None
        return {
            "train_sha256": parts.train.sha256 if parts else None,
            "validation_sha256": parts.validation.sha256 if parts else None,
            "model_files": _stamp(Path(self.spec.source)) if self.spec.kind in ("folder", "gguf") else None,
        }

    def _texts(self) -> dict[str, Any]:
        return {
            "model": self.spec.name,
            "revision": self.spec.revision,
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "pattern": self.pattern,
            "method": self.method,
            "prefill": self.prefill,
            "train": self.train and self.train.name,
            "validation": self.validation and self.validation.name,
            "split_manifest": self.split_manifest and self.split_manifest.name,
            "dataset_revision": self.dataset_revision,
        }


def _stamp(path: Path) -> str:
    """Hash of the names, sizes and times of a checkpoint's files: reading the weights would take too long."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stamps = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest()[:16]
