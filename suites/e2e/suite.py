"""Runs an end-to-end comparison: calibrate on the dense model, prune, and judge every arm under the same conditions."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from sdbench.calibrate.numerics import require_weight
from sdbench.calibrate.select import select_linears
from sdbench.calibrate.sources import CalibrationText
from sdbench.engine.graph import GraphForward
from sdbench.engine.greedy import EagerForward
from sdbench.engine.packed_linear import PackedLinear, packed_linears
from sdbench.errors import SdbenchError
from sdbench.memory import peak_memory
from sdbench.models import LoadedModel, load_model
from sdbench.packing import PackedWeight, pack
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.e2e import data
from sdbench.suites.e2e.calibration import calibrate, prune
from sdbench.suites.e2e.ceiling import ceiling, step_bytes
from sdbench.suites.e2e.data import Examples, Question
from sdbench.suites.e2e.judge import Contender, Journal, answer_runs, rate_runs
from sdbench.suites.e2e.options import Arm, E2EOptions
from sdbench.suites.metrics import speedup
from sdbench.timing import summarise

NO_TEXT = "random weights: replies mean nothing, so that only speed is measured"
EAGER, GRAPH = "transformers, eager", "transformers, static cache and CUDA graph"
SMALL_MODEL = 30_000_000
"""Parameters below which a CPU runs on one thread: a step is shorter than waking a second one, far shorter on a busy machine."""
CPU_RATE = "CPU rates say nothing about GPU speed"


@dataclass(frozen=True)
class Outcome:
    """What a run found.

    Attributes:
        arms: One record an arm, in the form of the schema.
        calibration: How the statistics came about: rows, replies, the replay's difference from live decode steps.
    """

    arms: list[dict[str, Any]]
    calibration: dict[str, Any]


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
    calibration = data.calibration_questions(options, examples and examples.calibration, loaded)
    if examples:
        validation = data.tokenise(examples.validation, loaded)
    else:
        validation = data.random_questions(1, options.prompt_tokens, 0, loaded, "rate", options.seed + 1)

    runner = _Runner(options, loaded, linears, validation, Journal(directory), progress)
    made = calibrate(options, loaded, linears, calibration, progress)
    runner.journal.add_row({"record": "calibration", **made.report})
    arms = [runner.judge(arm, made.texts.get(arm.source or "", [])) for arm in options.arms]
    return Outcome(arms, made.report)


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
        self.baseline: dict[str, Any] | None = None

    def judge(self, arm: Arm, texts: Sequence[CalibrationText]) -> dict[str, Any]:
        """Prunes where the arm asks for it, then runs answers and rates; records the arm's row."""
        reports: dict[str, Any] = {}
        with self._in_place(arm, texts, reports) as packed:
            samples = self._answers(arm, packed)
            # A cache of its own, as long as the timed run needs: a step reads all of a static cache, whatever answers may need.
            forward, path, path_reason = self._forward(self.questions[:1], self.options.equal_tokens, self.options.warmup_tokens)
            contender = Contender(arm.name, self.loaded, packed, forward, path)
            with peak_memory(self.options.device) as peak:
                rates = self._rates(contender, self.options.warmup_tokens)
            row = self._row(arm, contender, samples, rates)
            if self.baseline is None:
                self._compare_paths(contender, row)
        row |= {"path": path, "path_reason": path_reason, "peak_bytes": peak.bytes, "peak_bytes_reason": peak.reason, "layers": reports}
        if self.baseline is None:
            self.baseline = row
        self.journal.add_row({"record": "arm", **row})
        self.progress.note(f"{arm.name}: done")
        return row

    def _forward(self, questions: Sequence[Question], *reply_tokens: int) -> tuple[EagerForward, str, str | None]:
        """The fastest path for the model as it is now, its name, and why it is not a graph where it is not."""
        if self.options.device.type != "cuda":
            return EagerForward(self.loaded.model), EAGER, "no GPU: nothing to capture"
        longest = max(len(question.prompt) for question in questions)
        try:
            return GraphForward(self.loaded.model, longest + max(reply_tokens)), GRAPH, None
        except SdbenchError as error:
            return EagerForward(self.loaded.model), EAGER, str(error)

    def _compare_paths(self, dense: Contender, row: dict[str, Any]) -> None:
        """Adds the other ways to run the dense model; speed-ups are over the fastest."""
        row["baselines"] = {dense.path: row["decode_rate"]}
        if dense.path != EAGER:
            eager = Contender(dense.arm, dense.loaded, dense.packed, EagerForward(dense.loaded.model), EAGER)
            # Its cache grows, so that each length is a shape of its own: all of them are warmed up.
            row["baselines"][EAGER] = _rate(self._rates(eager, self.options.equal_tokens))[0]

    @contextmanager
    def _in_place(self, arm: Arm, texts: Sequence[CalibrationText], reports: dict[str, Any]) -> Iterator[dict[str, PackedLinear]]:
        if not arm.pruned:
            yield {}
            return
        weights: dict[str, PackedWeight] = {}
        for name, pruned in prune(self.options, self.loaded, self.linears, texts, self.progress, arm.name):
            weights[name] = pack(pruned.weight, pruned.keep, self.options.pattern, name)
            reports[name] = pruned.report
        with packed_linears(self.loaded.model, weights, self.options.prefill) as modules:
            yield modules

    def _answers(self, arm: Arm, packed: Mapping[str, PackedLinear]) -> list[dict[str, Any]]:
        if self.options.spec.kind == "random":
            return []
        forward, path, _ = self._forward(self.questions, self.options.max_tokens)
        contender = Contender(arm.name, self.loaded, packed, forward, path)
        with self.progress.task(f"answers: {contender.arm}", len(self.questions)) as task:
            return answer_runs(contender, self.questions, self.options.max_tokens, self.journal, task)

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

    def _row(self, arm: Arm, contender: Contender, samples: Sequence[dict[str, Any]], rates: Sequence[dict[str, Any]]) -> dict[str, Any]:
        options, packed = self.options, contender.packed
        nbytes = step_bytes(self.loaded.model, packed, len(self.questions[0].prompt) + options.equal_tokens // 2)
        rate, spread = _rate(rates)
        gain: float | None = None
        reason: str | None = "this arm is the baseline"
        if self.baseline:
            fastest = max((known for known in self.baseline["baselines"].values() if known), default=None)
            gain, reason = speedup(rate, fastest, rates[0]["tokens"], self.baseline["equal_tokens"])
        bound, bound_reason = ceiling(nbytes, options.device)
        quality_reason = None if samples else NO_TEXT
        return {
            "arm": arm.name,
            "pattern": str(options.pattern) if arm.pruned else None,
            "method": options.method if arm.pruned else None,
            "prefill": options.prefill if arm.pruned else None,
            "examples": len(samples),
            "answer_match": sum(bool(s["match"]) for s in samples) if samples else None,
            "eos": sum(s["eos"] for s in samples) if samples else None,
            "truncated": sum(s["truncated"] for s in samples) if samples else None,
            "quality_reason": quality_reason,
            "reply_tokens": median(s["tokens"] for s in samples) if samples else None,
            "equal_tokens": rates[0]["tokens"],
            "decode_rate": rate,
            "decode_rate_spread": spread,
            "decode_rate_note": CPU_RATE if options.device.type == "cpu" else None,
            "speedup": gain,
            "speedup_reason": reason,
            "variant": "/".join(sorted({module.variant for module in packed.values()})) or None,
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
