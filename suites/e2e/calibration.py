"""Calibration of a run: the dense model answers, and every source counts the same number of rows of the same examples."""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sdbench.calibrate.collect import InputSums, statistics_of
from sdbench.calibrate.methods import METHODS, Pruned, prune_linears
from sdbench.calibrate.replay import collect_sums, replay_difference
from sdbench.calibrate.replies import Replier
from sdbench.calibrate.sampling import Sampler
from sdbench.calibrate.sequential import collect_by_block, prune_sequentially
from sdbench.calibrate.sources import CalibrationText, assign, common_rows, equalise, make_text, needs
from sdbench.calibrate.stages import Stages
from sdbench.errors import CheckFailed, SdbenchError, UsageError
from sdbench.models import LoadedModel
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.streaming import resident
from sdbench.suites.e2e.data import Question
from sdbench.suites.e2e.options import CalibrationOptions
from sdbench.timing import within
from sdbench.words import counted

REPLAY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest relative difference of the sums of squares; rounding alone gives about 1e-6 in float32 and 3e-2 in bf16 over 36 layers."""

FEW_ROWS = 32
"""A calibration of fewer rows than a mask word has columns is warned of."""


@dataclass(frozen=True)
class Calibration:
    """What every arm calibrates on.

    Attributes:
        texts: By source, texts with as many rows on each example as every other source has; empty for a method that needs none.
        report: How they came about: rows by source, the replies' lengths and how they were decoded, and the relative difference between
            live decode steps and their replay on the first example.
        numbers: Which of the questions they are made of, in their order.
    """

    texts: Mapping[str, list[CalibrationText]]
    report: dict[str, Any]
    numbers: list[int]


@dataclass(frozen=True)
class Shard:
    """One process's share of the calibration examples: every N-th of them.

    Attributes:
        number: Which one, from 1.
        count: N.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise UsageError(f"--shard {self}: write I/N with I from 1 to N, such as 1/4")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Reads ``I/N``.

        Raises:
            UsageError: The text is no such share.
        """
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal()):
            raise UsageError(f"--shard {text!r}: write I/N with I from 1 to N, such as 1/4")
        return cls(int(number), int(count))

    def numbers(self, examples: int) -> list[int]:
        """The numbers of its examples among so many.

        Raises:
            UsageError: There is none.
        """
        found = list(range(self.number - 1, examples, self.count))
        if not found:
            raise UsageError(f"--shard {self}: too few calibration examples ({examples}); use fewer shards")
        return found

    def tokens(self, budget: int | None) -> int | None:
        """Its part of a token budget; the parts add up to the whole."""
        return None if budget is None else budget // self.count + (self.number <= budget % self.count)


WHOLE = Shard(1, 1)


def calibrate(
    options: CalibrationOptions,
    loaded: LoadedModel,
    linears: dict[str, nn.Linear],
    questions: Sequence[Question],
    progress: Progress,
    *,
    shard: Shard = WHOLE,
    kept: RunDirectory | None = None,
    stages: Stages | None = None,
) -> Calibration:
    """Calibration texts by source, from the dense model's replies where a source needs them.

    With a token budget no more examples are answered than it takes.

    Args:
        options: The run.
        loaded: The dense model.
        linears: Layers that will be watched, by dotted name.
        questions: Calibration examples, all of them whatever the shard.
        progress: Where to report.
        shard: The share of them that is calibrated on.
        kept: Where replies are kept as they come, and found again.
        stages: Is told how long ``capture``, ``generation`` and ``replay check`` took.

    Raises:
        CheckFailed: Replayed decode steps are not what live ones are.
        SdbenchError: The examples give fewer rows than the budget asks for.
    """
    report: dict[str, Any] = {"replies": None, "generation": None, "replay_difference": None, "replay_difference_reason": None}
    report["sources"] = {}
    choices, sources = options.choices, options.sources
    if not sources:
        return Calibration({}, report, [])
    stages = stages or Stages(options.device)
    of_example = {source: assign(source, len(questions), choices) for source in sources}
    texts: dict[str, list[CalibrationText]] = {source: [] for source in sources}
    numbers, budget = shard.numbers(len(questions)), shard.tokens(choices.tokens)
    answers: _Answers | _Given | None = None
    if "reply" in needs(sources, choices):
        answers = _Given(options, questions) if options.replies else _Answers(options, loaded, questions, numbers, kept, stages)
    with progress.task("calibration replies" if answers else "calibration texts", len(numbers)) as task:
        for start in range(0, len(numbers), options.batch_size):
            batch = numbers[start : start + options.batch_size]
            replies: Mapping[int, tuple[int, ...]] = answers.of(batch) if answers else {}
            for number in batch:
                question = questions[number]
                ingredients: dict[str, Any] = {"reference": question.reference, "window": question.window, "reply": replies.get(number)}
                for source in sources:
                    texts[source].append(make_text(of_example[source][number], question.prompt, **ingredients, choices=choices))
            task.advance(len(batch))
            if budget is not None and sum(common_rows(texts)) >= budget:
                break
    if answers:
        lengths = [len(reply) for reply in answers.given.values()]
        report["replies"] = {"count": len(lengths), "tokens": sum(lengths), "shortest": min(lengths), "longest": max(lengths)}
        report["generation"] = answers.how
        answers.close()
        if isinstance(answers, _Given):
            progress.note(answers.summary(loaded))
        if loaded.stream:
            report["replay_difference_reason"] = "live decode steps of a streamed model would read it once a token"
        else:
            with stages("replay check"):
                report["replay_difference"] = _checked_replay(options, loaded, linears, questions[numbers[0]].prompt, lengths[0])
    equal = equalise(texts, budget)
    rows = sum(common_rows(equal))
    if rows < FEW_ROWS:
        few = f"calibrated on {counted(rows, 'row')} a layer, too few to tell columns apart"
        progress.note(f"warning: {few}; give more examples or longer replies")
    parts = {source: [of_example[source][number] for number in numbers] for source in sources}
    report["sources"] = {source: _summary(equal[source], texts[source], parts[source]) for source in sources}
    return Calibration(equal, report, numbers[: len(equal[sources[0]])])


def prune(
    options: CalibrationOptions,
    loaded: LoadedModel,
    linears: dict[str, nn.Linear],
    texts: Sequence[CalibrationText],
    progress: Progress,
    label: str,
    *,
    given: Iterable[dict[str, InputSums]] | None = None,
    stages: Stages | None = None,
) -> Iterator[tuple[str, Pruned]]:
    """Prunes by the run's method, one layer after the other, in one pass or block by block; the model stays as it is.

    Args:
        options: The run.
        loaded: The dense model.
        linears: Layers to prune, by dotted name.
        texts: One source's texts of `calibrate`; none for a method that needs no calibration.
        progress: Where to report.
        label: What the progress calls this arm.
        given: Sums of all layers, some at a time, in place of those over the texts.
        stages: Is told how long ``collection`` and ``pruning`` took.

    Yields:
        Names and pruned weights; none is kept, so that a caller may write or pack each and let go of it.
    """
    stages = stages or Stages(options.device)
    pattern, method, weighting = options.pattern, options.method, options.choices.weighting
    if METHODS[method].needs == "none":
        results = stages.timed("pruning", _prune_each(options, linears))
    elif options.sequential:
        results = prune_sequentially(loaded.model, linears, texts, pattern, method, weighting, stages, progress)
    else:
        turns = given if given is not None else sums_in_turn(options, loaded, linears, texts, progress, label, stages)
        results = _prune_in_turn(options, linears, stages.timed("collection", turns), stages)
    with progress.task(f"pruning: {label}", len(linears)) as task:
        for name, pruned in results:
            yield name, pruned
            task.advance()


def sums_in_turn(
    options: CalibrationOptions,
    loaded: LoadedModel,
    linears: dict[str, nn.Linear],
    texts: Sequence[CalibrationText],
    progress: Progress,
    label: str,
    stages: Stages | None = None,
) -> Iterator[dict[str, InputSums]]:
    """Sums over one source's texts on the dense model: of all layers at once, or of one block at a time where the sums of all would be
    large or the model is streamed.

    Args:
        options: The run; its method says which sums.
        loaded: The dense model.
        linears: Layers to watch, by dotted name.
        texts: The texts of `calibrate`.
        progress: Where to report.
        label: What the progress calls this arm.
        stages: Is told where hidden states lie.
    """
    kind, weighting = METHODS[options.method].needs, options.choices.weighting
    if kind == "none":
        return
    if kind == "hessian" or loaded.stream:
        turns = collect_by_block(loaded.model, linears, texts, kind, weighting, stages, progress)
        try:
            first = next(turns)
        except SdbenchError as error:
            if loaded.stream:
                raise
            progress.note(f"Hessians of all layers at once, since the model cannot be run block by block: {error}")
        else:
            yield first
            del first
            yield from turns
            return
    with progress.task(f"statistics: {label}", len(texts)) as task:
        sums = collect_sums(loaded.model, linears, texts, kind, lambda _: task.advance(), weighting)
    yield sums


def _prune_in_turn(
    options: CalibrationOptions, linears: Mapping[str, nn.Linear], turns: Iterable[dict[str, InputSums]], stages: Stages
) -> Iterator[tuple[str, Pruned]]:
    for sums in turns:
        inside = {name: linears[name] for name in sums}
        statistics = statistics_of(sums)
        # Whoever made them is done with them, and Hessians are large.
        sums.clear()
        with resident(inside.values()):
            yield from stages.timed("pruning", prune_linears(inside, statistics, options.pattern, options.method))
        del statistics


def _prune_each(options: CalibrationOptions, linears: Mapping[str, nn.Linear]) -> Iterator[tuple[str, Pruned]]:
    """Prunes by a method that needs no statistics."""
    for name, linear in linears.items():
        with resident([linear]):
            yield from prune_linears({name: linear}, {}, options.pattern, options.method)


class _Answers:
    """The model's replies to calibration examples, found among what an earlier run kept or decoded now."""

    def __init__(
        self,
        options: CalibrationOptions,
        loaded: LoadedModel,
        questions: Sequence[Question],
        numbers: Sequence[int],
        kept: RunDirectory | None,
        stages: Stages,
    ):
        self._options, self._loaded, self._questions, self._numbers = options, loaded, questions, numbers
        self._directory, self._stages = kept, stages
        self._replier: Replier | None = None
        self.given: dict[int, tuple[int, ...]] = {}
        self.how: dict[str, Any] = {}
        self._kept: dict[int, tuple[list[int], dict[str, Any]]] = {}
        for row in kept.rows if kept else ():
            if row["record"] == "replies":
                self._kept |= {number: (ids, row["how"]) for number, ids in zip(row["numbers"], row["ids"], strict=True)}

    def of(self, batch: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Replies to some examples by their numbers."""
        if all(number in self._kept for number in batch):
            self.how = self._kept[batch[0]][1]
            found = {number: tuple(self._kept[number][0]) for number in batch}
        else:
            found = dict(zip(batch, self._decode(batch), strict=True))
            if self._directory:
                row = {"record": "replies", "numbers": list(batch), "ids": [list(ids) for ids in found.values()], "how": self.how}
                self._directory.add_row(row)
        self.given |= found
        return found

    def close(self) -> None:
        """Lets go of the decoder's cache and graph, which may be in reference cycles."""
        self._replier = None
        gc.collect()

    def _decode(self, batch: Sequence[int]) -> list[tuple[int, ...]]:
        options, choices, model = self._options, self._options.choices, self._loaded.model
        if self._replier is None:
            positions = max(len(self._questions[number].prompt) for number in self._numbers) + options.max_tokens
            size = min(options.batch_size, len(self._numbers))
            with self._stages("capture"):
                self._replier = Replier(model, size, positions, sampled=bool(choices.temperature))
            self.how = {"path": self._replier.path, "reason": self._replier.reason, "batch": size}
        sampler = None
        if choices.temperature:
            sampler = Sampler.draw(options.seed, batch, options.max_tokens, choices, model.device)
        with self._stages("generation"):
            replies = self._replier.replies(
                [self._questions[number].prompt for number in batch],
                max_new_tokens=options.max_tokens,
                eos_ids=self._loaded.eos_ids,
                ignore_eos=options.spec.kind == "random",
                sampler=sampler,
            )
        ids = [reply.ids for reply in replies]
        self._stages.items["generation"] = self._stages.items.get("generation", 0) + sum(map(len, ids))
        return ids


class _Given:
    """The model's replies to calibration examples as a file has them."""

    def __init__(self, options: CalibrationOptions, questions: Sequence[Question]):
        assert options.replies is not None
        self._options, self._questions, self._name = options, questions, options.replies.name
        self.given: dict[int, tuple[int, ...]] = {}
        self.how: dict[str, Any] = {"path": "given", "reason": None, "batch": None, "file": self._name}

    def of(self, batch: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Replies to some examples by their numbers, none longer than the longest that is asked for."""
        found = {number: self._questions[number].reply[: self._options.max_tokens] for number in batch}
        self.given |= found
        return found

    def close(self) -> None:
        """Nothing to let go of."""

    def summary(self, loaded: LoadedModel) -> str:
        """How the replies end, in one line."""
        ended = sum(reply[-1] in loaded.eos_ids for reply in self.given.values())
        cut = sum(len(self._questions[number].reply) > len(reply) for number, reply in self.given.items())
        line = f"{self._name}: {counted(len(self.given), 'reply', 'replies')}, {ended} of them ended by EOS"
        return line + (f", {cut} cut off at --max-tokens {self._options.max_tokens}" if cut else "")


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
