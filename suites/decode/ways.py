"""Which arms are decoded in which ways, at which lengths and batches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sdbench.engine.paths import COMPILED, EAGER, FUSED, FUSED_GRAPH, FUSED_INT8, GRAPH
from sdbench.suites.decode.batches import batch_of
from sdbench.suites.decode.options import DENSE, INT8, DecodeOptions

Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to decode at one context length.

    Attributes:
        arm: ``dense``, ``int8`` or a pattern.
        path: Name of the decoder.
        context: Prompt length.
        batch: Prompts at once.
    """

    arm: str
    path: str
    context: int
    batch: int = 1

    @classmethod
    def of(cls, row: Row) -> "Way":
        """The way of a row."""
        return cls(row["arm"], row["path"], row["context"], batch_of(row))


def ways_of(options: DecodeOptions) -> list[Way]:
    """One prompt at a time by every way, where it is asked for, then several at once."""
    return [*(_single(options) if 1 in options.batches else []), *(way for way in _several(options) if way.batch > 1)]


def _single(options: DecodeOptions) -> list[Way]:
    fused = FUSED_GRAPH if options.device.type == "cuda" else FUSED
    if options.device_map:
        # The fused step, first, has a row that says why it cannot run.
        ways = [Way(DENSE, fused, options.contexts[0])] if options.baselines else []
        return ways + [Way(arm, EAGER, context) for arm in (DENSE, *map(str, options.patterns)) for context in options.contexts]
    ways = [Way(DENSE, fused, context) for context in options.contexts]
    if options.baselines:
        others = (COMPILED, GRAPH, EAGER) if options.device.type == "cuda" else (EAGER,)
        ways += [Way(DENSE, path, options.contexts[0]) for path in others]
    if options.device.type == "cuda":
        ways += [Way(INT8, FUSED_INT8, context) for context in options.contexts]
    return ways + [Way(str(pattern), fused, context) for pattern in options.patterns for context in options.contexts]


def _several(options: DecodeOptions) -> list[Way]:
    fused = FUSED_GRAPH if options.device.type == "cuda" else FUSED
    others = [COMPILED, GRAPH] if options.device.type == "cuda" else [EAGER]
    if options.device_map:
        fused, others = EAGER, []
    ways = []
    for arm in (DENSE, *map(str, options.patterns)):
        for context in options.contexts:
            for batch in options.batches:
                baselines = others if options.baselines and arm == DENSE and context == options.contexts[0] else []
                ways += [Way(arm, path, context, batch) for path in (fused, *baselines)]
    return ways


def measured_for(way: Way, done: Mapping[Way, Row], options: DecodeOptions) -> list[Way]:
    """Of a way, and what takes its place where the model or the weights cannot be decoded so, those that have been measured."""
    return [tried for tried in _tries(way, done, options) if tried in done]


def next_for(way: Way, done: Mapping[Way, Row], options: DecodeOptions) -> Way | None:
    """What is to be measured for a way: itself, then what takes its place; None once it has a row that counts."""
    return next((tried for tried in _tries(way, done, options) if tried not in done), None)


def _tries(way: Way, done: Mapping[Way, Row], options: DecodeOptions) -> list[Way]:
    refused = way in done and done[way]["outcome"] == "constraint"
    if not refused or options.device_map or way.path not in (FUSED, FUSED_GRAPH):
        return [way]
    return [way, replace(way, path=GRAPH if options.device.type == "cuda" else EAGER)]
