"""What is looked at beside answers and rates: fidelity to the dense replies; in each layer, what calibration misses and pruning costs."""

import math
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from sdbench.calibrate.collect import LayerStatistics
from sdbench.calibrate.diagnostics import Directions, discrepancy, energy_ratio, reconstruction_error, top_directions
from sdbench.calibrate.replay import collect
from sdbench.calibrate.select import select_linears
from sdbench.calibrate.sources import CalibrationText, make_text
from sdbench.models import LoadedModel
from sdbench.packing import PackedWeight
from sdbench.progress import Progress
from sdbench.suites.e2e.arms import CONTROL, DENSE, Arm
from sdbench.suites.e2e.data import Question
from sdbench.suites.e2e.judge import Journal
from sdbench.suites.e2e.options import E2EOptions
from sdbench.suites.e2e.rounding import Rounded
from sdbench.suites.fidelity import compare, reply_logits
from sdbench.suites.statistics import KL_ROUNDING, Interval, kl_ratio, mean_over_positions

TOP = 64
"""Directions of the decode Hessian that a layer's discrepancy is taken over."""

PREFILLS = ("pruned", "dense")
"""Both ways to run the prompt: fidelity costs one forward more for the second, whatever the answers' ``--prefill`` is."""


class Inspector:
    """Compares each pruned or rounded arm with the dense model on what the dense model said to the judged questions.

    Args:
        options: The run.
        loaded: The dense model.
        linears: Layers that are pruned, by dotted name.
        questions: Judged questions.
        journal: Where records go; fidelity figures that it holds are not computed again.
        progress: Where to report.
    """

    def __init__(
        self,
        options: E2EOptions,
        loaded: LoadedModel,
        linears: dict[str, nn.Linear],
        questions: Sequence[Question],
        journal: Journal,
        progress: Progress,
    ):
        self.options, self.model, self.linears = options, loaded.model, linears
        self.every = select_linears(loaded.model)
        self.questions, self.journal, self.progress = questions, journal, progress
        self.replies: dict[str, tuple[int, ...]] = {}
        self.control: dict[str, list[dict[str, Any]]] = {}
        self.decode: dict[str, LayerStatistics] = {}
        self.directions: dict[str, Directions] = {}
        self.layers: list[dict[str, Any]] = []

    def take_dense(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Takes the dense model's answers, which every later figure is about.

        Args:
            samples: The dense arm's, one a question.
        """
        self.replies = {sample["example"]: tuple(sample["ids"]) for sample in samples}
        if self.options.diagnose:
            self._learn_decode_steps()

    def inspect(self, arm: Arm, weights: Mapping[str, PackedWeight | Rounded], texts: Sequence[CalibrationText]) -> dict[str, Any]:
        """Compares one pruned or rounded arm; the model is dense before and after.

        Args:
            arm: Which.
            weights: Its packed or rounded weights by layer.
            texts: What it was calibrated on; none for a method that needs no calibration.

        Returns:
            ``fidelity`` by prefill, for the arm's row; None where it was not asked for.
        """
        fidelity = self.options.fidelity != "no"
        if not (fidelity or self.options.diagnose):
            return {"fidelity": None}
        pruned = {name: weight.unpack() for name, weight in weights.items()}
        if self.options.diagnose:
            self._diagnose(arm, pruned, texts)
        return {"fidelity": self._fidelity(arm, pruned) if fidelity else None}

    def _fidelity(self, arm: Arm, pruned: Mapping[str, Tensor]) -> dict[str, Any]:
        kept = {
            (row["prefill"], row["example"]): row for row in self.journal.rows if row["record"] == "fidelity" and row["arm"] == arm.name
        }
        with self.progress.task(f"fidelity: {arm.name}", len(self.questions)) as task:
            for question in self.questions:
                missing = [prefill for prefill in PREFILLS if (prefill, question.id) not in kept]
                reply = self.replies[question.id]
                dense = reply_logits(self.model, question.prompt, reply) if missing else None
                for prefill in missing:
                    before = pruned if prefill == "pruned" else None
                    other = reply_logits(self.model, question.prompt, reply, self.every, before, pruned)
                    found = compare(dense, other, reply)  # type: ignore[arg-type]  # made where any is missing
                    row = {
                        "record": "fidelity",
                        "arm": arm.name,
                        "prefill": prefill,
                        "example": question.id,
                        "positions": found.positions,
                        "kl": found.kl,
                        "agreement": found.agreement,
                        "first_divergence": found.first_divergence,
                        "nll": found.nll,
                        "dense_nll": found.dense_nll,
                    }
                    self.journal.add_row(row)
                    kept[prefill, question.id] = row
                task.advance()
        return {prefill: self._summary(arm, prefill, [kept[prefill, question.id] for question in self.questions]) for prefill in PREFILLS}

    def _summary(self, arm: Arm, prefill: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Means over all positions, and how many times as close as the control the arm is, with an interval over questions."""
        positions = sum(row["positions"] for row in rows)
        if arm.name == CONTROL:
            self.control[prefill] = rows
        control = self.control.get(prefill)
        ratio: Interval | None = None
        reason: str | None = f"this arm is the control ({CONTROL})" if arm.name == CONTROL else f"no {CONTROL} arm in this run"
        if control and arm.name != CONTROL:
            ratio = kl_ratio(control, rows, seed=self.options.seed)
            reason = None if ratio else f"an interval takes two questions, and KLs above rounding ({KL_ROUNDING:g})"
        divergences = [row["first_divergence"] for row in rows if row["first_divergence"] is not None]
        return {
            "questions": len(rows),
            "positions": positions,
            "kl": mean_over_positions(rows, "kl"),
            "agreement": mean_over_positions(rows, "agreement"),
            "diverged": len(divergences),
            "first_divergence": median(divergences) if divergences else None,
            "perplexity": _perplexity(rows, "nll"),
            "dense_perplexity": _perplexity(rows, "dense_nll"),
            "control_ratio": ratio.as_dict() if ratio else None,
            "control_ratio_reason": reason,
        }

    def _learn_decode_steps(self) -> None:
        """Statistics of the dense model's decode steps and prompts on the judged questions, which no calibration has seen."""
        steps = [make_text("decode", question.prompt, reply=self.replies[question.id]) for question in self.questions]
        prompts = [make_text("prefill", question.prompt) for question in self.questions]
        with self.progress.task("diagnosis: decode steps", len(steps) + len(prompts)) as task:
            self.decode = collect(self.model, self.linears, steps, "hessian", lambda _: task.advance())
            prefill = collect(self.model, self.linears, prompts, "sum_sq", lambda _: task.advance())
        with self.progress.task("diagnosis: directions", len(self.linears)) as task:
            for name, decode in self.decode.items():
                assert decode.hessian is not None
                self.directions[name] = top_directions(decode.hessian, TOP)
                ratio = energy_ratio(decode.sum_sq, prefill[name].sum_sq)
                self._add_layer(
                    {
                        "arm": DENSE,
                        "layer": name,
                        "decode_rows": decode.rows,
                        "prefill_rows": prefill[name].rows,
                        "energy_ratio": {label: _quantile(ratio, share) for label, share in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95))},
                        "directions": len(self.directions[name].values),
                    }
                )
                task.advance()

    def _diagnose(self, arm: Arm, pruned: Mapping[str, Tensor], texts: Sequence[CalibrationText]) -> None:
        calibration: Mapping[str, LayerStatistics] = {}
        if texts:
            with self.progress.task(f"diagnosis: {arm.name}", len(texts)) as task:
                weighting = self.options.choices.weighting
                calibration = collect(self.model, self.linears, texts, "hessian", lambda _: task.advance(), weighting)
        for name, linear in self.linears.items():
            decode = self.decode[name].hessian
            source = calibration[name].hessian if name in calibration else None
            assert decode is not None
            self._add_layer(
                {
                    "arm": arm.name,
                    "layer": name,
                    "discrepancy": discrepancy(self.directions[name], source) if source is not None else None,
                    "reconstruction_error": reconstruction_error(linear.weight.detach(), pruned[name], decode),
                }
            )

    def _add_layer(self, row: dict[str, Any]) -> None:
        self.layers.append(row)
        self.journal.add_row({"record": "layer", **row})


def _perplexity(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    mean = mean_over_positions(rows, key)
    # A broken model may have one that no float holds.
    return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf


def _quantile(values: Tensor, share: float) -> float:
    # Between two columns nothing is interpolated: one of them may be infinite.
    return float(torch.quantile(values, share, interpolation="nearest"))
