"""Runs an end-to-end comparison: calibrate on the dense model, prune, and judge every arm under the same conditions."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sdbench.calibrate.numerics import require_weight
from sdbench.calibrate.select import select_linears
from sdbench.engine.greedy import position_limit
from sdbench.errors import UsageError
from sdbench.models import LoadedModel, ModelSpec, load_model, locate_model
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.e2e import data
from sdbench.suites.e2e.arms import Arm
from sdbench.suites.e2e.calibration import calibrate
from sdbench.suites.e2e.data import Examples, Question
from sdbench.suites.e2e.judge import Journal
from sdbench.suites.e2e.options import E2EOptions
from sdbench.suites.e2e.runner import Runner, Standard

SMALL_MODEL = 30_000_000
"""Parameters below which a CPU runs on one thread: a step is shorter than waking a second one, far shorter on a busy machine."""


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
    journal = Journal(directory)
    if journal.samples:
        again = "" if options.fidelity == "only" or not options.rate_repeats else ", rates are measured again"
        progress.note(f"replies kept from an earlier attempt: {len(journal.samples)}{again} ('sdbench report' shows a run as it is)")
    if options.rival:
        # A model that is not to be had is told before an hour's work.
        locate_model(options.rival, progress.note)
    outcome, standard = _judge_arms(options, examples, journal, progress)
    if options.rival:
        # The first model is gone by now: the other one's memory is its own.
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
        outcome.arms.append(_judge_rival(options, options.rival, examples, standard, journal, progress))
    return outcome


def _judge_arms(options: E2EOptions, examples: Examples | None, journal: Journal, progress: Progress) -> tuple[Outcome, Standard]:
    loaded = load_model(options.spec, options.device, options.dtype, progress.note, options.device_map)
    with _threads(loaded):
        linears = select_linears(loaded.model, options.targets, options.ignore)
        for name, linear in linears.items():
            options.pattern.require_width(linear.in_features, name)
            # The dense arm would trip over such a weight first, and could not say which one it is.
            require_weight(linear.weight, name)
        calibration = data.calibration_questions(options, examples.calibration if examples else None, loaded)
        runner = Runner(options, loaded, linears, _judged(options, examples, loaded), journal, progress)
        made = calibrate(options, loaded, linears, calibration, progress)
        journal.add_row({"record": "calibration", **made.report})
        if journal.path:
            # The first row: what was refused before it has left no directory.
            progress.note(f"run directory: {journal.path}")
        arms = [runner.judge(arm, made.texts.get(arm.source or "", [])) for arm in options.arms]
    return Outcome(arms, made.report, runner.inspector.layers), runner.standard


def _judge_rival(
    options: E2EOptions, spec: ModelSpec, examples: Examples | None, standard: Standard, journal: Journal, progress: Progress
) -> dict[str, Any]:
    loaded = load_model(spec, options.device, options.dtype, progress.note, options.device_map)
    journal.add_row({"record": "compare-model", "model": loaded.name, "revision": loaded.spec.revision})
    with _threads(loaded):
        runner = Runner(options, loaded, {}, _judged(options, examples, loaded), journal, progress, standard)
        return runner.judge(Arm(spec.name, None, "another model"), [])


def _judged(options: E2EOptions, examples: Examples | None, loaded: LoadedModel) -> list[Question]:
    """The questions to judge, as a model reads them.

    Raises:
        UsageError: One of them and its reply have no room in the model.
    """
    if examples:
        questions, limit = data.tokenise(examples.validation, loaded), position_limit(loaded.model)
        for question in questions:
            length = len(question.prompt)
            if limit is not None and length + options.max_tokens > limit:
                raise UsageError(
                    f"example {question.id}: its prompt of {length} tokens and --max-tokens {options.max_tokens} exceed the {limit} "
                    f"positions of {loaded.name}; ask for fewer tokens, or take a model of a longer context"
                )
    else:
        questions, limit = (
            data.random_questions(1, options.prompt_tokens, 0, loaded, "rate", options.seed + 1),
            position_limit(loaded.model),
        )
    # Rates are of the first question; what they ask for is known before anything is decoded.
    length, longest = len(questions[0].prompt), max(options.equal_tokens, options.warmup_tokens)
    if options.timed and limit is not None and length + longest > limit:
        name = "equal-tokens" if longest == options.equal_tokens else "warmup-tokens"
        raise UsageError(f"--{name} {longest} after a prompt of {length} exceed the {limit} positions of {loaded.name}; ask for fewer")
    return questions


@contextmanager
def _threads(loaded: LoadedModel) -> Iterator[None]:
    """Inside, a small model on a CPU has one thread."""
    before = torch.get_num_threads()
    if loaded.model.device.type == "cpu" and sum(p.numel() for p in loaded.model.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
