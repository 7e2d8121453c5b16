"""Calibration of a run: the dense model answers, and every source counts the same number of rows of the same examples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sdbench.calibrate.methods import METHODS, Pruned, prune_linears
from sdbench.calibrate.replay import collect, replay_difference
from sdbench.calibrate.sampling import Sampler
from sdbench.calibrate.sequential import prune_sequentially
from sdbench.calibrate.sources import CalibrationText, assign, common_rows, equalise, make_text, needs
from sdbench.engine.greedy import greedy
from sdbench.errors import CheckFailed
from sdbench.models import LoadedModel
from sdbench.progress import Progress
from sdbench.suites.e2e.data import Question
from sdbench.suites.e2e.options import CalibrationOptions
from sdbench.timing import within

REPLAY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest relative difference of the sums of squares; rounding alone gives about 1e-6 in float32 and 3e-2 in bf16 over 36 layers."""


@dataclass(frozen=True)
class Calibration:
    """What every arm calibrates on.

    Attributes:
        texts: By source, texts with as many rows on each example as every other source has; empty for a method that needs none.
        report: How they came about: rows by source, the replies' lengths, and the relative difference between live decode steps and
            their replay on the first example.
    """

    texts: Mapping[str, list[CalibrationText]]
    report: dict[str, Any]


def calibrate(
    options: CalibrationOptions, loaded: LoadedModel, linears: dict[str, nn.Linear], questions: Sequence[Question], progress: Progress
) -> Calibration:
    """Calibration texts by source, from the dense model's replies where a source needs them.

    With a token budget no more examples are answered than it takes.

    Args:
        options: The run.
        loaded: The dense model.
        linears: Layers that will be watched, by dotted name.
        questions: Calibration examples.
        progress: Where to report.

    Raises:
        CheckFailed: Replayed decode steps are not what live ones are.
        SdbenchError: The examples give fewer rows than the budget asks for.
    """
    report: dict[str, Any] = {"replies": None, "replay_difference": None, "sources": {}}
    choices, sources = options.choices, options.sources
    if not sources:
        return Calibration({}, report)
    of_example = {source: assign(source, len(questions), choices) for source in sources}
    texts: dict[str, list[CalibrationText]] = {source: [] for source in sources}
    replies: list[tuple[int, ...]] = []
    replied = "reply" in needs(sources, choices)
    with progress.task("calibration replies" if replied else "calibration texts", len(questions)) as task:
        for start in range(0, len(questions), options.batch_size):
            batch = questions[start : start + options.batch_size]
            if replied:
                replies += _replies(options, loaded, batch, start)
            for index, question in enumerate(batch, start):
                for source in sources:
                    part = of_example[source][index]
                    reply = replies[index] if replied else None
                    texts[source].append(
                        make_text(part, question.prompt, reply=reply, reference=question.reference, window=question.window, choices=choices)
                    )
            task.advance(len(batch))
            if choices.tokens is not None and sum(common_rows(texts)) >= choices.tokens:
                break
    if replied:
        lengths = [len(reply) for reply in replies]
        report["replies"] = {"count": len(lengths), "tokens": sum(lengths), "shortest": min(lengths), "longest": max(lengths)}
        report["replay_difference"] = _checked_replay(options, loaded, linears, questions[0].prompt, len(replies[0]))
    equal = equalise(texts, choices.tokens)
    report["sources"] = {source: _summary(equal[source], texts[source], of_example[source]) for source in sources}
    return Calibration(equal, report)


def prune(
    options: CalibrationOptions,
    loaded: LoadedModel,
    linears: dict[str, nn.Linear],
    texts: Sequence[CalibrationText],
    progress: Progress,
    label: str,
) -> Iterator[tuple[str, Pruned]]:
    """Prunes by the run's method, one layer after the other, in one pass or block by block; the model stays as it is.

    Args:
        options: The run.
        loaded: The dense model.
        linears: Layers to prune, by dotted name.
        texts: One source's texts of `calibrate`; none for a method that needs no calibration.
        progress: Where to report.
        label: What the progress calls this arm.

    Yields:
        Names and pruned weights; none is kept, so that a caller may write or pack each and let go of it.
    """
    kind, weighting = METHODS[options.method].needs, options.choices.weighting
    if kind == "none":
        results = prune_linears(linears, {}, options.pattern, options.method)
    elif options.sequential:
        results = prune_sequentially(loaded.model, linears, texts, options.pattern, options.method, weighting)
    else:
        with progress.task(f"statistics: {label}", len(texts)) as task:
            statistics = collect(loaded.model, linears, texts, kind, lambda _: task.advance(), weighting)
        results = prune_linears(linears, statistics, options.pattern, options.method)
    with progress.task(f"pruning: {label}", len(linears)) as task:
        for name, pruned in results:
            yield name, pruned
            task.advance()


def _replies(options: CalibrationOptions, loaded: LoadedModel, batch: Sequence[Question], start: int) -> list[tuple[int, ...]]:
    choices = options.choices
    sampler = None
    if choices.temperature:
        numbers = range(start, start + len(batch))
        sampler = Sampler.draw(options.seed, numbers, options.max_tokens, choices, loaded.model.device)
    found = greedy(
        loaded.model,
        [question.prompt for question in batch],
        max_new_tokens=options.max_tokens,
        eos_ids=loaded.eos_ids,
        ignore_eos=options.spec.kind == "random",
        choose=sampler,
    )
    return [reply.ids for reply in found]


def _checked_replay(
    options: CalibrationOptions, loaded: LoadedModel, linears: dict[str, nn.Linear], prompt: Sequence[int], reply_tokens: int
) -> float:
    """The claim that a replay equals live decode steps is checked on the run's own model, not taken from a test."""
    difference = replay_difference(
        loaded.model, linears, prompt, max_new_tokens=max(2, min(reply_tokens, 32)), eos_ids=loaded.eos_ids, ignore_eos=True
    )
    if not within(difference, REPLAY_TOLERANCE[options.dtype]):
        raise CheckFailed(
            f"the replay of decode steps differs from live ones by {difference:.1e}; this model's forward "
            "depends on how its tokens are batched, so that calibration by replay does not hold for it"
        )
    return difference


def _summary(used: Sequence[CalibrationText], available: Sequence[CalibrationText], of_example: Sequence[str]) -> dict[str, Any]:
    """Counts of one source; those of a mix also by its parts."""
    summary: dict[str, Any] = {
        "examples": len(used),
        "rows": sum(len(text.rows) for text in used),
        "rows_available": sum(len(text.rows) for text in available),
    }
    if len(parts := dict.fromkeys(of_example)) > 1:
        summary["parts"] = {
            part: sum(len(text.rows) for text, name in zip(used, of_example, strict=False) if name == part) for part in parts
        }
    return summary
