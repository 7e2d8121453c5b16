"""Judges arms on one loaded model: prunes or rounds its weights, then answers and rates, the same way for each."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from triton.errors import TritonError

from sdbench.calibrate.in_place import weights_in_place
from sdbench.calibrate.sources import CalibrationText
from sdbench.devices import devices_of
from sdbench.engine.decoders import Decoder, fastest, named
from sdbench.engine.packed_linear import PackedLinear, packed_linears
from sdbench.engine.paths import COMPILED, EAGER, FUSED_INT8, GRAPH, loop_of
from sdbench.engine.resident import weights_memory
from sdbench.errors import SdbenchError, one_line
from sdbench.memory import peak_memory
from sdbench.models import LoadedModel
from sdbench.packing import PackedWeight, pack
from sdbench.progress import Progress
from sdbench.suites.e2e.arms import CONTROL, DENSE, Arm
from sdbench.suites.e2e.calibration import prune
from sdbench.suites.e2e.ceiling import ceiling, step_bytes
from sdbench.suites.e2e.data import Question
from sdbench.suites.e2e.failures import FAILURES, failure_of, free_memory, put_back
from sdbench.suites.e2e.inspection import Inspector
from sdbench.suites.e2e.judge import Contender, Journal, answer_runs, rate_runs
from sdbench.suites.e2e.options import E2EOptions
from sdbench.suites.e2e.quality import matches, quality, worth
from sdbench.suites.e2e.report import NO_RATES, ONLY_FIDELITY, not_measured
from sdbench.suites.e2e.rounding import Rounded, round_linears
from sdbench.suites.memory import beside_dense
from sdbench.suites.metrics import speedup
from sdbench.suites.tasks.graders import make_grader
from sdbench.timing import summarise

NO_TEXT = "random weights: replies mean nothing, so that only speed is measured"
ANSWERED = ("number", "unit-tests")
"""Graders that tell right from wrong."""
CPU_RATE = "CPU rates say nothing about GPU speed"
INT8_AS_DENSE = "without a GPU its weights run as the dense values that they stand for"
OTHER_TOKENS = "another vocabulary, whose tokens are not the dense model's: compare seconds a right answer"
ANOTHER_MODEL = "another model: fidelity is that of one model's weights, changed"
REASONS = ("decode_rate_note", "speedup_reason", "ceiling_reason", "path_reason", "peak_bytes_reason", "memory_reason")
NOT_MEASURED: dict[str, Any] = {
    **dict.fromkeys(
        ("equal_tokens", "decode_rate", "decode_rate_spread", "speedup", "variant", "step_bytes", "ceiling", "path", "peak_bytes", "memory")
    ),
    **dict.fromkeys(REASONS, ONLY_FIDELITY),
    **dict.fromkeys(("kernel_calls", "expected_kernel_calls"), 0),
    "baselines": {},
}
"""What stands in a row for speed where none is measured."""


@dataclass
class Standard:
    """What arms are compared with.

    Attributes:
        vocabulary: The model's tokens: rates and lengths in other ones are not compared.
        baseline: The dense arm's row, once there is one.
        dense: Its samples.
        control: Right or wrong of the control's answers.
    """

    vocabulary: Any
    baseline: dict[str, Any] | None = None
    dense: Sequence[dict[str, Any]] = ()
    control: list[bool] = field(default_factory=list)


class Runner:
    """Judges arms one after the other on one loaded model; the dense arm, judged first, is the others' baseline.

    Args:
        options: The run.
        loaded: The model.
        linears: Layers that pruned arms prune, by dotted name.
        questions: Judged questions, as this model reads them.
        journal: Where records go.
        progress: Where to report.
        standard: What an earlier model's arms left to compare this one's with; None for the run's own model.
    """

    def __init__(
        self,
        options: E2EOptions,
        loaded: LoadedModel,
        linears: dict[str, nn.Linear],
        questions: Sequence[Question],
        journal: Journal,
        progress: Progress,
        standard: Standard | None = None,
    ):
        self.options, self.loaded, self.linears = options, loaded, linears
        self.questions, self.journal, self.progress = questions, journal, progress
        self.inspector = Inspector(options, loaded, linears, questions, journal, progress)
        self.places = {name: linear.weight.device for name, linear in self.inspector.every.items()}
        self.grader = make_grader(options.task, options.allow_code_execution, options.judge)
        self.standard = standard or Standard(_vocabulary(loaded))

    def judge(self, arm: Arm, texts: Sequence[CalibrationText]) -> dict[str, Any]:
        """Prunes or rounds where the arm asks for it, then runs answers and rates; records the arm's row.

        One that memory does not reach for, or whose kernels do not compile, is a row with that outcome. Not so the dense model's answers,
        without which there is nothing to compare with.
        """
        try:
            row, samples = self._judged(arm, texts)
        except FAILURES as error:
            if arm.weights == "dense":
                raise
            row, samples = self._failed(arm, error), []
        if "outcome" in row:
            # Only now is free what the failed attempt held.
            free_memory()
            put_back(self.inspector.every, self.places)
        row |= worth(row, samples)
        if arm.weights == "dense":
            self.standard.baseline, self.standard.dense = row, samples
            if samples:
                self.inspector.take_dense(samples)
        self.journal.add_row({"record": "arm", **row})
        self.progress.note(f"{arm.name}: {row['outcome']} ({row['reason']})" if "outcome" in row else f"{arm.name}: done")
        return row

    def _judged(self, arm: Arm, texts: Sequence[CalibrationText]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """An arm's row, but for what its answers are worth, and its samples."""
        reports: dict[str, Any] = {}
        pruned = self._prune(arm, texts, reports)
        rounded = round_linears(self.loaded.model) if arm.weights == "int8" else {}
        inspected = self._inspect(arm, pruned or rounded, texts) | self._harnessed(arm, pruned or rounded)
        if self.options.fidelity == "only":
            # The dense model's replies are what the others are compared on.
            samples = self._answers(arm, {}, {}) if arm.weights == "dense" else []
            row = self._quality(arm, samples) | NOT_MEASURED
        else:
            with packed_linears(self.loaded.model, pruned, self.options.prefill) as packed:
                samples = self._answers(arm, packed, rounded)
                timed = self._timed(arm, packed, rounded, samples) if self.options.timed else _untimed(samples, NO_RATES)
                row = self._quality(arm, samples) | timed
        return row | {"layers": reports, **inspected}, samples

    def _failed(self, arm: Arm, error: Exception) -> dict[str, Any]:
        """The row of an arm without any figure."""
        failure = failure_of(error)
        reason = not_measured(failure["reason"])
        row = self._quality(arm, []) | self._unrated([], failure) | {"quality_reason": reason, "layers": {}}
        return row | {"fidelity": None, "fidelity_reason": reason if self.options.fidelity != "no" else None}

    def _unrated(self, samples: Sequence[dict[str, Any]], failure: dict[str, str]) -> dict[str, Any]:
        """What stands for speed where it could not be measured."""
        return _untimed(samples, not_measured(failure["reason"])) | {"equal_tokens": self.options.equal_tokens, **failure}

    def _inspect(self, arm: Arm, weights: Mapping[str, PackedWeight | Rounded], texts: Sequence[CalibrationText]) -> dict[str, Any]:
        if weights:
            return self.inspector.inspect(arm, weights, texts)
        reason = ANOTHER_MODEL if arm.weights == "another model" and self.options.fidelity != "no" else None
        return {"fidelity": None, "fidelity_reason": reason}

    def _harnessed(self, arm: Arm, weights: Mapping[str, PackedWeight | Rounded]) -> dict[str, Any]:
        """Figures of lm-evaluation-harness, which the journal may hold already."""
        harness = self.options.harness
        if not harness:
            return {}
        kept = [row for row in self.journal.rows if row["record"] == "lm-eval" and row["arm"] == arm.name]
        if not kept:
            with self.progress.task(f"lm-eval: {arm.name}", 1) as task:
                matrices = {name: weight.unpack() for name, weight in weights.items()}
                with weights_in_place(self.inspector.every, matrices):
                    kept = [{"record": "lm-eval", "arm": arm.name, "figures": harness.run(self.loaded, self.options.batch_size)}]
                self.journal.add_row(kept[0])
                task.advance()
        return {"lm_eval": kept[-1]["figures"]}

    def _timed(
        self, arm: Arm, packed: Mapping[str, PackedLinear], rounded: Mapping[str, Rounded], samples: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        try:
            return self._rated(arm, packed, rounded, samples)
        except FAILURES as error:
            failure = failure_of(error)
        free_memory()
        return self._unrated(samples, failure)

    def _rated(
        self, arm: Arm, packed: Mapping[str, PackedLinear], rounded: Mapping[str, Rounded], samples: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        # An earlier decoder may be in reference cycles, and would count as this one's memory.
        gc.collect()
        options = self.options
        # A cache of its own, as long as the timed run needs: a step reads all of a static cache, whatever answers may need.
        with self._decoding(arm, packed, rounded, self.questions[:1], options.equal_tokens, options.warmup_tokens) as (decoder, path, why):
            if arm.weights == "int8" and options.device.type == "cuda" and path != FUSED_INT8:
                return NOT_MEASURED | dict.fromkeys(REASONS, f"int8 weights have a kernel in the fused step alone: {why}")
            contender = Contender(arm.name, self.loaded, decoder, path)
            with peak_memory(options.device, *devices_of(self.loaded.model)) as peak:
                rates = self._rates(contender, options.warmup_tokens)
            row = self._speed(packed, rounded, decoder, path, samples, rates)
            memory = weights_memory(self.loaded, packed, decoder, bool(rounded))
        row |= {"memory": beside_dense(memory, (self.standard.baseline or {"memory": memory})["memory"]), "memory_reason": None}
        row |= {"path": path, "path_reason": why, "peak_bytes": peak.bytes, "peak_bytes_reason": peak.reason}
        if arm.weights == "dense":
            # One decoder at a time holds a cache and a graph.
            del decoder, contender
            self._compare_paths(path, row)
        return row

    @contextmanager
    def _decoding(
        self,
        arm: Arm,
        packed: Mapping[str, PackedLinear],
        rounded: Mapping[str, Rounded],
        questions: Sequence[Question],
        *reply_tokens: int,
    ) -> Iterator[tuple[Decoder, str, str | None]]:
        """Inside, the arm's weights are in the model: the fastest way to decode it, its name, and why not a faster one."""
        model, positions, why = self.loaded.model, self._positions(questions, *reply_tokens), None
        decoder: Decoder | None = None
        if arm.weights == "int8" and self.options.device.type == "cuda":
            try:
                # It rounds the weights itself, to the same codes; the prompt then reads the rounded ones below.
                decoder = named(FUSED_INT8, model, {}, positions)
            except (SdbenchError, TritonError, torch.OutOfMemoryError) as error:
                why = one_line(error)
        with weights_in_place(self.inspector.every, {name: weight.matrix for name, weight in rounded.items()}):
            if decoder:
                yield decoder, FUSED_INT8, None
            else:
                decoder, path, reason = fastest(model, packed, positions)
                yield decoder, path, why or reason

    def _positions(self, questions: Sequence[Question], *reply_tokens: int) -> int:
        return max(len(question.prompt) for question in questions) + max(reply_tokens)

    @property
    def _other_tokens(self) -> bool:
        return _vocabulary(self.loaded) != self.standard.vocabulary

    def _compare_paths(self, path: str, row: dict[str, Any]) -> None:
        """Adds the other ways to run the dense model; speed-ups are over the fastest of them."""
        row["baselines"], row["baselines_reason"] = {path: row["decode_rate"]}, {}
        if self.options.device.type != "cuda":
            return
        for other in (COMPILED, GRAPH, EAGER) if self.options.compile_baseline else (GRAPH, EAGER):
            if other != path:
                self._measure_path(other, row["baselines"], row["baselines_reason"])

    def _measure_path(self, path: str, rates: dict[str, float | None], reasons: dict[str, str]) -> None:
        options = self.options
        # An eager cache grows, so that each length is a shape of its own: all of them are warmed up.
        warmup = options.equal_tokens if path == EAGER else options.warmup_tokens
        try:
            decoder = named(path, self.loaded.model, {}, self._positions(self.questions[:1], options.equal_tokens, warmup))
            rates[path] = _rate(self._rates(Contender("dense", self.loaded, decoder, path), warmup))[0]
        except (SdbenchError, TritonError, torch.OutOfMemoryError) as error:
            rates[path], reasons[path] = None, one_line(error)

    def _prune(self, arm: Arm, texts: Sequence[CalibrationText], reports: dict[str, Any]) -> dict[str, PackedWeight]:
        weights: dict[str, PackedWeight] = {}
        if arm.pruned:
            for name, pruned in prune(self.options, self.loaded, self.linears, texts, self.progress, arm.name):
                weights[name] = pack(pruned.weight, pruned.keep, self.options.pattern, name)
                reports[name] = pruned.report
        return weights

    def _answers(self, arm: Arm, packed: Mapping[str, PackedLinear], rounded: Mapping[str, Rounded]) -> list[dict[str, Any]]:
        if self.options.spec.kind == "random":
            return []
        with self._decoding(arm, packed, rounded, self.questions, self.options.max_tokens) as (decoder, path, _):
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
        options, standard = self.options, self.standard
        if arm.name == CONTROL:
            standard.control = matches(samples)
        compared = arm.name not in (CONTROL, DENSE) and options.task.grader in ANSWERED
        found = {
            "arm": arm.name,
            "pattern": str(options.pattern) if arm.pruned else None,
            "method": options.method if arm.pruned else None,
            "prefill": options.prefill if arm.pruned else None,
            "quality_reason": None if samples else NO_TEXT if options.spec.kind == "random" else ONLY_FIDELITY,
            **quality(samples, standard.control if compared else None, standard.dense),
        }
        if self._other_tokens:
            found |= {"length_ratio": None, "length_ratio_reason": OTHER_TOKENS}
        return found

    def _speed(
        self,
        packed: Mapping[str, PackedLinear],
        rounded: Mapping[str, Rounded],
        decoder: Decoder,
        path: str,
        samples: Sequence[dict[str, Any]],
        rates: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        options, baseline = self.options, self.standard.baseline
        nbytes = step_bytes(self.loaded.model, packed, len(self.questions[0].prompt) + options.equal_tokens // 2)
        nbytes -= sum(weight.matrix.nbytes - weight.nbytes for weight in rounded.values())
        rate, spread = _rate(rates)
        gain: float | None = None
        reason: str | None = "this arm is the baseline"
        if self._other_tokens:
            reason = OTHER_TOKENS
        elif rounded and options.device.type == "cpu":
            reason = INT8_AS_DENSE
        elif baseline:
            known = {name: known for name, known in baseline["baselines"].items() if known}
            gain, reason = speedup(rate, max(known.values(), default=None), rates[0]["tokens"], baseline["equal_tokens"])
            if known and loop_of(path) not in known:
                gain, reason = None, f"decoded by another loop than dense weights ({path}, not {' or '.join(known)})"
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


def _untimed(samples: Sequence[dict[str, Any]], reason: str) -> dict[str, Any]:
    """What stands for speed where there are only answers: that the pruned linears ran is shown all the same."""
    calls = {key: sum(sample[key] for sample in samples) for key in ("kernel_calls", "expected_kernel_calls")}
    return NOT_MEASURED | dict.fromkeys(REASONS, reason) | calls


def _rate(rows: Sequence[dict[str, Any]]) -> tuple[float | None, dict[str, float] | None]:
    """Median decode rate of some rate runs, and its spread."""
    times = summarise([row["decode_rate"] for row in rows if row["decode_rate"] is not None])
    return (times.p50, times.as_dict()) if times else (None, None)


def _vocabulary(loaded: LoadedModel) -> Any:
    """Equal where two models' tokens are the same ones; random models only have a number of them."""
    return loaded.tokenizer.get_vocab() if loaded.tokenizer else loaded.model.config.get_text_config().vocab_size
