"""Runs an end-to-end comparison: calibrate on the dense model, prune, and judge every arm under the same conditions."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from triton.errors import TritonError

from sdbench.calibrate.numerics import require_weight
from sdbench.calibrate.select import select_linears
from sdbench.calibrate.sources import CalibrationText
from sdbench.engine.decoders import COMPILED, EAGER, FUSED_GRAPH, FUSED_INT8, GRAPH, Decoder, fastest, named
from sdbench.engine.packed_linear import PackedLinear, packed_linears
from sdbench.errors import SdbenchError
from sdbench.memory import peak_memory
from sdbench.models import LoadedModel, load_model
from sdbench.packing import PackedWeight, pack
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.e2e import data
from sdbench.suites.e2e.arms import CONTROL, Arm
from sdbench.suites.e2e.calibration import calibrate, prune
from sdbench.suites.e2e.ceiling import ceiling, step_bytes
from sdbench.suites.e2e.data import Examples, Question
from sdbench.suites.e2e.inspection import Inspector
from sdbench.suites.e2e.judge import Contender, Journal, answer_runs, rate_runs
from sdbench.suites.e2e.options import E2EOptions
from sdbench.suites.e2e.quality import matches, quality, worth
from sdbench.suites.e2e.report import ONLY_FIDELITY
from sdbench.suites.metrics import speedup
from sdbench.suites.tasks.graders import make_grader
from sdbench.timing import summarise

NO_TEXT = "random weights: replies mean nothing, so that only speed is measured"
SMALL_MODEL = 30_000_000
"""Parameters below which a CPU runs on one thread: a step is shorter than waking a second one, far shorter on a busy machine."""
ANSWERED = ("number", "unit-tests")
"""Graders that tell right from wrong."""
CPU_RATE = "CPU rates say nothing about GPU speed"
NOT_MEASURED: dict[str, Any] = {
    **dict.fromkeys(
        ("equal_tokens", "decode_rate", "decode_rate_spread", "speedup", "variant", "step_bytes", "ceiling", "path", "peak_bytes")
    ),
    **dict.fromkeys(("decode_rate_note", "speedup_reason", "ceiling_reason", "path_reason", "peak_bytes_reason"), ONLY_FIDELITY),
    **dict.fromkeys(("kernel_calls", "expected_kernel_calls"), 0),
    "baselines": {},
}
"""What stands in a row for speed where none is measured."""


@dataclass(frozen=True)
class Outcome:
    """What a run found.

    Attributes:
        arms: One record an arm, in the form of the schema.
        calibration: How the statistics came about: rows, replies, the replay's difference from live decode steps.
        layers: One record a layer and arm, of ``--diagnose``.
    """

    arms: list[dict[str, Any]]
    calibration: dict[str, Any]
    layers: list[dict[str, Any]]


def run(options: E2EOptions, examples: Examples | None, directory: RunDirectory | None, progress: Progress) -> Outcome:
    """Runs every arm; answers that the run directory holds already are not asked again, rates are always measured anew.

    Args:
        options: What to run.
        examples: Verified and drawn by :func:`sdbench.suites.e2e.data.load`; None for a random model.
        directory: Where records go as they finish; None to keep them in memory alone.
        progress: Where to report.
    """
    loaded = load_model(options.spec, options.device, options.dtype, progress.note)
    if options.device.type == "cpu" and sum(p.numel() for p in loaded.model.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)
    linears = select_linears(loaded.model, options.targets, options.ignore)
    for name, linear in linears.items():
        options.pattern.require_width(linear.in_features, name)
        # The dense arm would trip over such a weight first, and could not say which one it is.
        require_weight(linear.weight, name)
    calibration = data.calibration_questions(options, examples.calibration if examples else None, loaded)
    if examples:
        validation = data.tokenise(examples.validation, loaded)
    else:
        validation = data.random_questions(1, options.prompt_tokens, 0, loaded, "rate", options.seed + 1)

    runner = _Runner(options, loaded, linears, validation, Journal(directory), progress)
    made = calibrate(options, loaded, linears, calibration, progress)
    runner.journal.add_row({"record": "calibration", **made.report})
    arms = [runner.judge(arm, made.texts.get(arm.source or "", [])) for arm in options.arms]
    return Outcome(arms, made.report, runner.inspector.layers)


class _Runner:
    """Judges arms one after the other on one loaded model; the dense arm, judged first, is the others' baseline."""

    def __init__(
        self,
        options: E2EOptions,
        loaded: LoadedModel,
        linears: dict[str, nn.Linear],
        questions: Sequence[Question],
        journal: Journal,
        progress: Progress,
    ):
        self.options, self.loaded, self.linears = options, loaded, linears
        self.questions, self.journal, self.progress = questions, journal, progress
        self.inspector = Inspector(options, loaded, linears, questions, journal, progress)
        self.grader = make_grader(options.task, options.allow_code_execution, options.judge)
        self.baseline: dict[str, Any] | None = None
        self.control: list[bool] = []
        self.dense: list[dict[str, Any]] = []

    def judge(self, arm: Arm, texts: Sequence[CalibrationText]) -> dict[str, Any]:
        """Prunes where the arm asks for it, then runs answers and rates; records the arm's row."""
        reports: dict[str, Any] = {}
        weights = self._prune(arm, texts, reports)
        inspected = self.inspector.inspect(arm, weights, texts) if arm.pruned else {"fidelity": None}
        if self.options.fidelity == "only":
            # The dense model's replies are what the pruned ones are compared on.
            samples = [] if arm.pruned else self._answers(arm, {})
            row = self._quality(arm, samples) | NOT_MEASURED
        else:
            with packed_linears(self.loaded.model, weights, self.options.prefill) as packed:
                samples = self._answers(arm, packed)
                row = self._quality(arm, samples) | self._timed(arm, packed, samples)
        row |= {**worth(row, samples), "layers": reports, **inspected}
        if not arm.pruned:
            self.baseline, self.dense = row, samples
            if samples:
                self.inspector.take_dense(samples)
        self.journal.add_row({"record": "arm", **row})
        self.progress.note(f"{arm.name}: done")
        return row

    def _timed(self, arm: Arm, packed: Mapping[str, PackedLinear], samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        # An earlier decoder may be in reference cycles, and would count as this one's memory.
        gc.collect()
        # A cache of its own, as long as the timed run needs: a step reads all of a static cache, whatever answers may need.
        decoder, path, path_reason = self._decoder(packed, self.questions[:1], self.options.equal_tokens, self.options.warmup_tokens)
        contender = Contender(arm.name, self.loaded, decoder, path)
        with peak_memory(self.options.device) as peak:
            rates = self._rates(contender, self.options.warmup_tokens)
        row = self._speed(packed, decoder, samples, rates)
        row |= {"path": path, "path_reason": path_reason, "peak_bytes": peak.bytes, "peak_bytes_reason": peak.reason}
        if not arm.pruned:
            # One decoder at a time holds a cache and a graph.
            del decoder, contender
            self._compare_paths(path, row)
        return row

    def _decoder(
        self, packed: Mapping[str, PackedLinear], questions: Sequence[Question], *reply_tokens: int
    ) -> tuple[Decoder, str, str | None]:
        """The fastest way to decode the model as it is now, its name, and why not a faster one."""
        return fastest(self.loaded.model, packed, self._positions(questions, *reply_tokens))

    def _positions(self, questions: Sequence[Question], *reply_tokens: int) -> int:
        return max(len(question.prompt) for question in questions) + max(reply_tokens)

    def _compare_paths(self, path: str, row: dict[str, Any]) -> None:
        """Adds the other ways to run the dense model; speed-ups are over the fastest of those that leave the weights as they are."""
        row["baselines"], row["baselines_reason"] = {path: row["decode_rate"]}, {}
        row["alternatives"] = {}
        if self.options.device.type != "cuda":
            return
        for other in (COMPILED, GRAPH, EAGER) if self.options.compile_baseline else (GRAPH, EAGER):
            if other != path:
                self._measure_path(other, row["baselines"], row["baselines_reason"])
        if path == FUSED_GRAPH:
            self._measure_path(FUSED_INT8, row["alternatives"], row["baselines_reason"])

    def _measure_path(self, path: str, rates: dict[str, float | None], reasons: dict[str, str]) -> None:
        options = self.options
        # An eager cache grows, so that each length is a shape of its own: all of them are warmed up.
        warmup = options.equal_tokens if path == EAGER else options.warmup_tokens
        try:
            decoder = named(path, self.loaded.model, {}, self._positions(self.questions[:1], options.equal_tokens, warmup))
            rates[path] = _rate(self._rates(Contender("dense", self.loaded, decoder, path), warmup))[0]
        except (SdbenchError, TritonError, torch.OutOfMemoryError) as error:
            rates[path], reasons[path] = None, " ".join(str(error).split())[:300]

    def _prune(self, arm: Arm, texts: Sequence[CalibrationText], reports: dict[str, Any]) -> dict[str, PackedWeight]:
        weights: dict[str, PackedWeight] = {}
        if arm.pruned:
            for name, pruned in prune(self.options, self.loaded, self.linears, texts, self.progress, arm.name):
                weights[name] = pack(pruned.weight, pruned.keep, self.options.pattern, name)
                reports[name] = pruned.report
        return weights

    def _answers(self, arm: Arm, packed: Mapping[str, PackedLinear]) -> list[dict[str, Any]]:
        if self.options.spec.kind == "random":
            return []
        decoder, path, _ = self._decoder(packed, self.questions, self.options.max_tokens)
        contender = Contender(arm.name, self.loaded, decoder, path)
        with self.progress.task(f"answers: {contender.arm}", len(self.questions)) as task:
            return answer_runs(contender, self.questions, self.options.max_tokens, self.grader, self.journal, task)

    def _rates(self, contender: Contender, warmup_tokens: int) -> list[dict[str, Any]]:
        with self.progress.task(f"rate: {contender.arm}", self.options.rate_repeats) as task:
            return rate_runs(
                contender,
                self.questions[0].prompt,
                equal_tokens=self.options.equal_tokens,
                warmup_tokens=warmup_tokens,
                repeats=self.options.rate_repeats,
                journal=self.journal,
                task=task,
            )

    def _quality(self, arm: Arm, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        options = self.options
        if arm.name == CONTROL:
            self.control = matches(samples)
        compared = arm.pruned and arm.name != CONTROL
        return {
            "arm": arm.name,
            "pattern": str(options.pattern) if arm.pruned else None,
            "method": options.method if arm.pruned else None,
            "prefill": options.prefill if arm.pruned else None,
            "quality_reason": None if samples else NO_TEXT if options.spec.kind == "random" else ONLY_FIDELITY,
            **quality(samples, self.control if compared and options.task.grader in ANSWERED else None, self.dense),
        }

    def _speed(
        self, packed: Mapping[str, PackedLinear], decoder: Decoder, samples: Sequence[dict[str, Any]], rates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        options = self.options
        nbytes = step_bytes(self.loaded.model, packed, len(self.questions[0].prompt) + options.equal_tokens // 2)
        rate, spread = _rate(rates)
        gain: float | None = None
        reason: str | None = "this arm is the baseline"
        if self.baseline:
            fastest = max((known for known in self.baseline["baselines"].values() if known), default=None)
            gain, reason = speedup(rate, fastest, rates[0]["tokens"], self.baseline["equal_tokens"])
        bound, bound_reason = ceiling(nbytes, options.device)
        return {
            "equal_tokens": rates[0]["tokens"],
            "decode_rate": rate,
            "decode_rate_spread": spread,
            "decode_rate_note": CPU_RATE if options.device.type == "cpu" else None,
            "speedup": gain,
            "speedup_reason": reason,
            "variant": "/".join(decoder.variants) or None,
            "kernel_calls": sum(record["kernel_calls"] for record in (*samples, *rates)),
            "expected_kernel_calls": sum(record["expected_kernel_calls"] for record in (*samples, *rates)),
            "step_bytes": nbytes,
            "ceiling": bound,
            "ceiling_reason": bound_reason,
        }


def _rate(rows: Sequence[dict[str, Any]]) -> tuple[float | None, dict[str, float] | None]:
    """Median decode rate of some rate runs, and its spread."""
    times = summarise([row["decode_rate"] for row in rows if row["decode_rate"] is not None])
    return (times.p50, times.as_dict()) if times else (None, None)
