"""Calibration sources: which text is replayed through the dense model, and at which positions its activations count.

A reply is replayed in one forward instead of being decoded again: under causal attention each position sees what its decode step saw.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from sdbench.calibrate.choices import CalibrationChoices
from sdbench.calibrate.registry import lookup
from sdbench.errors import SdbenchError, UsageError
from sdbench.words import counted

MIXED = "mixed"
Need = Literal["reply", "reference", "window"]
_MISSING: dict[Need, str] = {"reply": "reply of the model", "reference": "reference answer", "window": "window of the calibration text"}


@dataclass(frozen=True)
class CalibrationText:
    """One forward of the replay.

    Args:
        ids: Token ids fed in, from position 0.
        rows: Positions whose activations count, ascending; may be empty (a reply of one token has no decode step).

    Raises:
        SdbenchError: A row lies outside the text or out of order.
    """

    ids: tuple[int, ...]
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in pairwise(self.rows))
        if self.rows and not (ascending and self.rows[0] >= 0 and self.rows[-1] < len(self.ids)):
            raise SdbenchError(f"calibration rows {list(self.rows)} are no ascending positions in a text of {len(self.ids)} tokens")


Build = Callable[[tuple[int, ...], tuple[int, ...], CalibrationChoices], CalibrationText]


@dataclass(frozen=True)
class Source:
    """A way to choose text and rows.

    Args:
        description: One line for help texts.
        needs: What it reads beside the prompt: the model's own reply, the reference answer of the training example, a window of the
            calibration text, or nothing more.
        build: ``(prompt ids, ids of what it needs, choices) -> CalibrationText``; the ids are empty for a source that needs nothing. None
            for ``mixed``, whose examples belong to other sources.
    """

    description: str
    needs: Need | None
    build: Build | None


def _decode(prompt: tuple[int, ...], reply: tuple[int, ...], choices: CalibrationChoices) -> CalibrationText:
    # The reply's last token is never fed in: nothing comes after it.
    ids = prompt + reply[:-1]
    steps = range(len(prompt), len(ids))
    if choices.first is not None:
        steps = steps[: choices.first]
    if choices.last is not None:
        steps = steps[-choices.last :]
    return CalibrationText(ids, tuple(steps))


def _decode_and_sink(prompt: tuple[int, ...], reply: tuple[int, ...], choices: CalibrationChoices) -> CalibrationText:
    decode = _decode(prompt, reply, choices)
    return CalibrationText(decode.ids, (*range(len(prompt))[: choices.sink], *decode.rows))


def _all_rows(prompt: tuple[int, ...], continuation: tuple[int, ...], choices: CalibrationChoices) -> CalibrationText:
    ids = prompt + continuation
    return CalibrationText(ids, tuple(range(len(ids))))


def _text(prompt: tuple[int, ...], window: tuple[int, ...], choices: CalibrationChoices) -> CalibrationText:
    return CalibrationText(window, tuple(range(len(window))))


SOURCES: dict[str, Source] = {
    "decode": Source("the model's own reply, decode steps only", "reply", _decode),
    "decode+sink": Source("decode steps and the first prompt positions, whose activations are huge", "reply", _decode_and_sink),
    "self": Source("prompt and the model's own reply, all positions", "reply", _all_rows),
    "teacher-forced": Source("prompt and reference answer as fixed text, all positions", "reference", _all_rows),
    "prefill": Source("the prompt alone, all positions", None, _all_rows),
    "text": Source("windows of a corpus, all positions; the prompt is not read", "window", _text),
    MIXED: Source("some examples for each of several sources", None, None),
}


def require_sources(sources: Collection[str], choices: CalibrationChoices) -> None:
    """Checks the names of a run's sources and of a mix's parts, and the choices against them.

    Raises:
        UsageError: An unknown name, a mix within a mix, or a choice that a source lacks or none reads.
    """
    for source in sources:
        lookup("calibration source", source, SOURCES)
    for part, _ in choices.mix:
        lookup("calibration source", part, SOURCES)
        if part == MIXED:
            raise UsageError("--mix mixed: a mix is made of other sources")
    choices.require(sources)


def needs(sources: Collection[str], choices: CalibrationChoices) -> set[Need]:
    """What the sources, and the parts of a mix, read beside the prompt."""
    parts = {part for part, _ in choices.mix} if MIXED in sources else set()
    return {need for source in {*sources, *parts} if (need := SOURCES[source].needs)}


def assign(source: str, count: int, choices: CalibrationChoices) -> list[str]:
    """The source of each of ``count`` examples: always the same one, but for ``mixed`` its parts in turn, by their weights.

    At any length each part's share of the examples is within one example of its weight's share.
    """
    if source != MIXED:
        return [source] * count
    total = sum(weight for _, weight in choices.mix)
    given = dict.fromkeys((part for part, _ in choices.mix), 0)
    order = []
    for number in range(1, count + 1):
        # The part that lags most behind its share of the first `number` examples; the first of equals.
        part = max(choices.mix, key=lambda entry: entry[1] / total * number - given[entry[0]])[0]
        given[part] += 1
        order.append(part)
    return order


def make_text(
    source: str,
    prompt: Sequence[int],
    *,
    reply: Sequence[int] | None = None,
    reference: Sequence[int] | None = None,
    window: Sequence[int] | None = None,
    choices: CalibrationChoices | None = None,
) -> CalibrationText:
    """Text and rows of one example.

    Args:
        source: A name in `SOURCES`, but not ``mixed``: `assign` says which of its parts an example belongs to.
        prompt: Token ids of the prompt, as the model is asked.
        reply: Token ids of the model's own reply, with the EOS token if it ended so.
        reference: Token ids of the reference answer.
        window: Token ids of a window of the calibration text.
        choices: Which rows count; None for the defaults.

    Raises:
        UsageError: No source has this name.
        SdbenchError: The prompt is empty, or what the source needs is missing or empty.
    """
    chosen = lookup("calibration source", source, SOURCES)
    if not prompt:
        raise SdbenchError(f"calibration source {source}: the prompt has no token")
    ingredients: dict[Need, Sequence[int] | None] = {"reply": reply, "reference": reference, "window": window}
    if chosen.build is None:
        raise SdbenchError(f"calibration source {source}: each example belongs to one of its parts, and `assign` says which")
    needed = ingredients[chosen.needs] if chosen.needs else ()
    if chosen.needs and not needed:
        raise SdbenchError(f"calibration source {source}: needs a {_MISSING[chosen.needs]}, and this example has none")
    return chosen.build(tuple(prompt), tuple(needed or ()), choices or CalibrationChoices())


def equalise(texts: Mapping[str, Sequence[CalibrationText]], tokens: int | None = None) -> dict[str, list[CalibrationText]]:
    """Gives every source the same number of rows on the same example, so that sources differ in what they see and not in how much.

    Example i keeps as many rows as the source with the fewest has; the others are thinned to that number, evenly, with the first row
    (position 0 of ``decode+sink``) and the last among those kept.

    Args:
        texts: By source, one text an example, in the same order everywhere.
        tokens: Rows of each source after which no more count: the example that passes this number is thinned to what is left, those
            after it are dropped. None keeps all.

    Raises:
        SdbenchError: The sources have different numbers of examples, or all of them together have fewer rows than ``tokens``.
    """
    counts = {source: len(examples) for source, examples in texts.items()}
    if len(set(counts.values())) > 1:
        raise SdbenchError(f"calibration sources hold different numbers of examples: {counts}; every arm must see the same ones")
    smallest = common_rows(texts)
    if tokens is not None:
        if sum(smallest) < tokens:
            raise SdbenchError(
                f"rows on every arm: {sum(smallest)} of {counted(len(smallest), 'calibration example')}, fewer than --calibration-tokens "
                f"{tokens}; raise --calibration-examples or --max-tokens, or ask for fewer tokens"
            )
        smallest = _spend(smallest, tokens)
    return {
        source: [replace(text, rows=_thin(text.rows, count)) for text, count in zip(examples, smallest, strict=False)]
        for source, examples in texts.items()
    }


def common_rows(texts: Mapping[str, Sequence[CalibrationText]]) -> list[int]:
    """Rows that every source has on each example: those of the source with the fewest."""
    return [min(len(text.rows) for text in example) for example in zip(*texts.values(), strict=True)]


def _spend(counts: Sequence[int], budget: int) -> list[int]:
    """The counts, one after the other, until the budget is spent; the last one is what was left."""
    spent = []
    for count in counts:
        if not budget:
            break
        spent.append(min(count, budget))
        budget -= spent[-1]
    return spent


def _thin(rows: tuple[int, ...], count: int) -> tuple[int, ...]:
    """``count`` of the rows, evenly spaced; the first and, from two on, the last are among them."""
    if count < 2:
        return rows[:count]
    # Rounded in integers: steps of at least 1 never pick a row twice.
    span, steps = len(rows) - 1, count - 1
    return tuple(rows[(2 * step * span + steps) // (2 * steps)] for step in range(count))
