"""Calibration of a run: the dense model answers, and every source counts the same number of rows of the same examples."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sdbench.calibrate.collect import LayerStatistics
from sdbench.calibrate.methods import METHODS
from sdbench.calibrate.sources import SOURCES, CalibrationText, collect, equalise, make_text, replay_difference
from sdbench.engine.greedy import greedy
from sdbench.errors import CheckFailed
from sdbench.models import LoadedModel
from sdbench.progress import Progress
from sdbench.suites.e2e.data import Question
from sdbench.suites.e2e.options import E2EOptions
from sdbench.timing import within

REPLAY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest relative difference of the sums of squares; rounding alone gives about 1e-6 in float32 and 3e-2 in bf16 over 36 layers."""


def calibrate(
    options: E2EOptions, loaded: LoadedModel, linears: dict[str, nn.Linear], questions: Sequence[Question], progress: Progress
) -> tuple[dict[str, dict[str, LayerStatistics]], dict[str, Any]]:
    """Statistics of the dense model by source, over the same examples and the same number of rows.

    Args:
        options: The run.
        loaded: The dense model.
        linears: Layers to watch, by dotted name.
        questions: Calibration examples.
        progress: Where to report.

    Returns:
        Statistics by source and layer, empty for a method that needs none; and a report of how they came about: rows by source, the
        replies' lengths, and the relative difference between live decode steps and their replay on the first example.
    """
    sources = [arm.source for arm in options.arms if arm.source]
    needs = METHODS[options.method].needs
    if needs == "none":
        return {}, {"sources": {}, "replies": None, "replay_difference": None}
    replies: list[tuple[int, ...] | None] = [None] * len(questions)
    report: dict[str, Any] = {"replies": None, "replay_difference": None}
    if any(SOURCES[source].needs_reply for source in sources):
        random = options.spec.kind == "random"
        with progress.task("calibration replies", len(questions)) as task:
            for start in range(0, len(questions), options.batch_size):
                batch = questions[start : start + options.batch_size]
                found = greedy(
                    loaded.model,
                    [question.prompt for question in batch],
                    max_new_tokens=options.max_tokens,
                    eos_ids=loaded.eos_ids,
                    ignore_eos=random,
                )
                replies[start : start + len(batch)] = [reply.ids for reply in found]
                task.advance(len(batch))
        lengths = [len(reply) for reply in replies if reply]
        report["replies"] = {"count": len(lengths), "tokens": sum(lengths), "shortest": min(lengths), "longest": max(lengths)}
        # The claim that a replay equals live decode steps is checked on the run's own model, not taken from a test.
        report["replay_difference"] = replay_difference(
            loaded.model,
            linears,
            questions[0].prompt,
            max_new_tokens=max(2, min(len(replies[0] or ()), 32)),
            eos_ids=loaded.eos_ids,
            ignore_eos=True,
        )
        if not within(report["replay_difference"], REPLAY_TOLERANCE[options.dtype]):
            raise CheckFailed(
                f"the replay of decode steps differs from live ones by {report['replay_difference']:.1e}; this model's forward "
                "depends on how its tokens are batched, so that calibration by replay does not hold for it"
            )
    texts: dict[str, list[CalibrationText]] = {
        source: [
            make_text(source, question.prompt, reply=reply, reference=question.reference)
            for question, reply in zip(questions, replies, strict=True)
        ]
        for source in sources
    }
    equal = equalise(texts)
    statistics = {}
    for source, chosen in equal.items():
        with progress.task(f"statistics: {source}", len(chosen)) as task:
            statistics[source] = collect(loaded.model, linears, chosen, needs, on_text=lambda done, task=task: task.advance())  # type: ignore[misc]
    report["sources"] = {
        source: {
            "examples": len(chosen),
            "rows": sum(len(text.rows) for text in chosen),
            "rows_available": sum(len(t.rows) for t in texts[source]),
        }
        for source, chosen in equal.items()
    }
    return statistics, report
