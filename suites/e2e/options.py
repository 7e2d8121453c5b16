"""What a pruning or an end-to-end run is asked to do, checked before anything loads."""

import hashlib
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from sdbench.calibrate.choices import CalibrationChoices
from sdbench.calibrate.methods import METHODS
from sdbench.calibrate.registry import lookup
from sdbench.calibrate.sources import needs, require_sources
from sdbench.engine.packed_linear import PrefillWeights
from sdbench.errors import UsageError
from sdbench.models import ModelSpec
from sdbench.pattern import Pattern
from sdbench.suites.data import read_manifest, sha256_of
from sdbench.suites.e2e.arms import CONTROL, DENSE, INT8, Arm, is_timed
from sdbench.suites.e2e.harness import HarnessTasks
from sdbench.suites.tasks.endpoint import Judge
from sdbench.suites.tasks.registry import DEFAULT_TASK, OWN, Task, find_task

Fidelity = Literal["no", "also", "only"]


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """Which model is pruned, how, and what it is calibrated on: what every command that prunes has in common.

    Attributes:
        spec: The model.
        device: Where it runs.
        dtype: Dtype of its weights.
        pattern: N:M.
        method: Pruning method by name.
        calib: Calibration sources.
        train: File of calibration examples; None for the bundled task.
        split_manifest: Manifest that pins the files, or None.
        dataset_revision: Revision that the manifest must name, or None.
        calibration_examples: Examples to calibrate on.
        max_tokens: Longest reply.
        prompt_tokens: Prompt length for a random model, which has no text to answer.
        batch_size: Calibration replies decoded at once.
        targets: Patterns of the linears to prune; none for all.
        ignore: Patterns of the linears to leave dense.
        seed: Seed of every draw.
        choices: How calibration texts are made and which of their rows count.
        sequential: Calibrate each block on the pruned blocks before it, instead of all on the dense model.
        chosen_task: What is asked; None for the bundled arithmetic, or for own questions where ``train`` or ``data`` is given.
        data: The task's own file, of which a part is held out; None where ``train`` is given or the task brings its data.
        replies: File of questions with the model's own replies to them, which are then replayed and not decoded; None to decode.
        device_map: How the model is spread over the GPUs, one of `sdbench.devices.DEVICE_MAPS`; None for ``device`` alone.
    """

    least: ClassVar[dict[str, int]] = {"calibration_examples": 1, "max_tokens": 1, "prompt_tokens": 1, "batch_size": 1}
    files: ClassVar[tuple[str, ...]] = ("train", "split_manifest")
    told_otherwise: ClassVar[tuple[str, ...]] = ("spec", "choices", "chosen_task", "judge", "rival", "harness", "device_map", "replies")

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    pattern: Pattern
    method: str
    calib: tuple[str, ...]
    train: Path | None
    split_manifest: Path | None
    dataset_revision: str | None
    calibration_examples: int
    max_tokens: int
    prompt_tokens: int
    batch_size: int
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    seed: int
    choices: CalibrationChoices = field(default_factory=CalibrationChoices)
    sequential: bool = False
    chosen_task: Task | None = None
    data: Path | None = None
    replies: Path | None = None
    device_map: str | None = None

    def __post_init__(self) -> None:
        for name, minimum in self.least.items():
            value = getattr(self, name)
            if value < minimum:
                raise UsageError(f"--{_option(name)} is {value}; it must be at least {minimum}")
        lookup("method", self.method, METHODS)
        require_sources(self.sources or self.calib, self.choices)
        given = [getattr(self, name) is not None for name in self.files]
        *others, last = (f"--{_option(name)}" for name in self.files)
        names = f"{', '.join(others)} and {last}"
        if self.spec.kind == "random" and any(given):
            raise UsageError(f"a random: model has no text to answer; leave out {names}")
        if self.spec.kind == "random" and self.choices.text:
            raise UsageError("a random: model has no tokenizer for a text; leave out --calibration-text")
        if any(given) and not all(given):
            raise UsageError(f"{names} go together; 'sdbench split FILE --output DIR' makes them")
        if self.replies:
            self._check_replies()
        self._check_task(any(given) or self.replies is not None, names)

    def _check_replies(self) -> None:
        if self.spec.kind == "random":
            raise UsageError("a random: model gives no replies that mean anything; leave out --replies")
        given = [name for name in (*self.files, "data", "dataset_revision") if getattr(self, name) is not None]
        if given:
            raise UsageError(f"--replies brings its own questions; leave out {', '.join(f'--{_option(name)}' for name in given)}")
        if self.sources and "reply" not in needs(self.sources, self.choices):
            raise UsageError(
                "--replies changes nothing without the calibration source decode, decode+sink or self; add --calib or leave it out"
            )
        if self.choices.temperature:
            raise UsageError("--temperature samples replies, and --replies gives them; leave out one")

    def _check_task(self, split: bool, names: str) -> None:
        task = self.task
        if self.spec.kind == "random":
            if self.chosen_task or self.data:
                raise UsageError("a random: model has no text to answer; leave out --task and --data")
            return
        if self.data and split:
            raise UsageError(f"--data is one file, of which a part is held out, and {names} are parts already; give one or the other")
        if not (self.data or split or task.bundled):
            raise UsageError(f"task {task.name} needs its data; give --data FILE (it comes from {task.source})")
        lacking = [source for source in self.calib if task.reference is None and "reference" in needs([source], self.choices)]
        if lacking:
            raise UsageError(f"calibration source {lacking[0]} needs reference answers, and task {task.name} has none; choose another")

    @property
    def task(self) -> Task:
        """What is asked."""
        return self.chosen_task or (OWN if self.train or self.data or self.replies else find_task(DEFAULT_TASK))

    @property
    def sources(self) -> tuple[str, ...]:
        """Calibration sources that the run collects, each once; none for a method that needs no calibration."""
        return () if METHODS[self.method].needs == "none" else tuple(dict.fromkeys(self.calib))

    def arguments(self) -> dict[str, Any]:
        """Every option that changes a result, for the run directory.

        Raises:
            SdbenchError: The manifest cannot be read.
        """
        plain = {item.name: _plain(getattr(self, item.name)) for item in fields(self) if item.name not in self.told_otherwise}
        model = {"model": self.spec.name, "revision": self.spec.revision}
        asked = self.spec.kind != "random"
        task = {"task": self.task.name if asked else None, "task_version": self.task.version if asked else None}
        spread = {"device_map": self.device_map} if self.device_map else {}
        given = {"replies": self.replies.name} if self.replies else {}
        return model | task | plain | spread | given | self.choices.arguments() | self._pinned

    @cached_property
    def _pinned(self) -> dict[str, str | None]:
        """What tells files of the same names apart: SHA-256 of the data files (as a manifest has it), stamps of a model's."""
        parts = read_manifest(self.split_manifest).parts if self.split_manifest else None
        hashes = {f"{name}_sha256": getattr(parts, name).sha256 if parts else None for name in self.files if name != "split_manifest"}
        if self.replies:
            hashes["replies_sha256"] = sha256_of(self.replies)
        return hashes | {
            "data_sha256": sha256_of(self.data) if self.data else None,
            "calibration_text_sha256": sha256_of(self.choices.text) if self.choices.text else None,
            "model_files": _files_of(self.spec),
        }


@dataclass(frozen=True, kw_only=True)
class E2EOptions(CalibrationOptions):
    """One end-to-end run; ``calib`` holds the sources beside the control.

    Attributes:
        prefill: Matrix that the prompt runs on in pruned arms.
        validation: File of judged examples; None for the bundled task.
        validation_examples: Examples to judge.
        equal_tokens: Exact length of a rate run.
        warmup_tokens: Tokens decoded before a rate run, untimed.
        compile_baseline: On a GPU, also time the dense model under torch.compile.
        rate_repeats: Rate runs an arm; none at 0, where answers alone are asked for.
        fidelity: Compare each pruned arm with the dense model at every position of the dense model's own replies; ``"only"`` judges
            by nothing else: no answers of the pruned arms, no rates.
        diagnose: Measure in each layer what calibration misses of the decode steps, and what pruning costs there.
        allow_code_execution: Run generated code against its tests, locked away.
        judge: Who scores texts, or None.
        alternatives: Also judge the model with its linears rounded to int8, which needs no pruning.
        rival: Another dense model to judge on the same questions, or None.
        harness: Tasks of lm-evaluation-harness to judge every arm on too, or None.
        profile: Name and version of the profile that the options come from, or None.
        profile_changed: Options that have another value than the profile's.
    """

    least: ClassVar[dict[str, int]] = CalibrationOptions.least | {
        "validation_examples": 1,
        "equal_tokens": 2,
        "warmup_tokens": 0,
        "rate_repeats": 0,
    }
    files: ClassVar[tuple[str, ...]] = ("train", "validation", "split_manifest")

    prefill: PrefillWeights
    validation: Path | None
    validation_examples: int
    equal_tokens: int
    warmup_tokens: int
    rate_repeats: int
    compile_baseline: bool = True
    fidelity: Fidelity = "no"
    diagnose: bool = False
    allow_code_execution: bool = False
    judge: Judge | None = None
    alternatives: bool = False
    rival: ModelSpec | None = None
    harness: HarnessTasks | None = None
    profile: str | None = None
    profile_changed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for given, option, grader in (
            (self.allow_code_execution, "allow-code-execution", "unit-tests"),
            (self.judge, "judge-url", "judge"),
        ):
            if given and self.task.grader != grader:
                raise UsageError(f"--{option} has no use for task {self.task.name}, whose replies are judged otherwise; leave it out")
        if self.spec.kind == "random" and (self.fidelity != "no" or self.diagnose):
            raise UsageError("a random: model gives no replies that mean anything; leave out --fidelity and --diagnose")
        if self.spec.kind == "random" and not self.rate_repeats:
            raise UsageError("a random: model has no answers to judge, and --rate-repeats 0 leaves out its speed; ask for some repeats")
        if self.spec.kind == "random" and self.harness:
            raise UsageError("a random: model has no text to answer; leave out --lm-eval")
        if self.rival:
            self._check_rival(self.rival)

    def _check_rival(self, rival: ModelSpec) -> None:
        if self.fidelity == "only":
            raise UsageError("--compare-model is judged by its answers and its rate, and --fidelity-only asks for neither; leave one out")
        if (rival.kind == "random") != (self.spec.kind == "random"):
            raise UsageError("--compare-model: a random: model is compared with another random: model alone, by speed")
        if rival.name in [arm.name for arm in self.arms]:
            raise UsageError(f"--compare-model: a model called {rival.name} would look like the arm of that name; rename its folder")

    @property
    def sources(self) -> tuple[str, ...]:
        """The control, where the task has reference answers, then the chosen sources."""
        control = () if self.task.reference is None else (CONTROL,)
        return () if METHODS[self.method].needs == "none" else tuple(dict.fromkeys((*control, *self.calib)))

    @property
    def timed(self) -> bool:
        """Whether rates are asked for."""
        return is_timed(self.fidelity, self.rate_repeats)

    def arguments(self) -> dict[str, Any]:
        """Every option that changes a result, for the run directory; of the judge only its address and name."""
        judge = {"judge_url": self.judge.url if self.judge else None, "judge_model": self.judge.model if self.judge else None}
        rival = {
            "compare_model": self.rival and self.rival.name,
            "compare_revision": self.rival and self.rival.revision,
            "compare_model_files": self.rival and _files_of(self.rival),
        }
        harness = {
            "lm_eval": list(self.harness.names) if self.harness else None,
            "lm_eval_path": self.harness.folder.name if self.harness and self.harness.folder else None,
            "lm_eval_limit": self.harness.limit if self.harness else None,
        }
        return super().arguments() | judge | rival | harness

    @property
    def arms(self) -> list[Arm]:
        """Dense, the control, then the chosen sources; a method that needs no calibration has one arm of its own name. Then int8."""
        pruned = [Arm(source, source, "pruned") for source in self.sources] or [Arm(self.method, None, "pruned")]
        return [Arm(DENSE, None, "dense"), *pruned, *([Arm(INT8, None, "int8")] if self.alternatives else [])]


def _option(name: str) -> str:
    return name.replace("_", "-")


def _plain(value: Any) -> Any:
    """An option as JSON holds it; paths and devices without what differs between equal runs."""
    if isinstance(value, Path):
        return value.name
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, int | str) else str(value).removeprefix("torch.")


def _files_of(spec: ModelSpec) -> str | None:
    """Hash of the names, sizes and times of a local checkpoint's files: reading the weights would take too long."""
    if spec.kind not in ("folder", "gguf"):
        return None
    path = Path(spec.source)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stamps = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest()[:16]
