"""Calibration sources: which text is replayed through the dense model, and at which positions its activations count.

A reply that the model gave greedily is replayed in one forward instead of being decoded again: under causal attention each position sees
what its decode step saw, and `replay_difference` measures how close the two are.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from sdbench.calibrate.collect import Collector, LayerStatistics, StatisticsKind
from sdbench.calibrate.registry import lookup
from sdbench.engine.greedy import greedy
from sdbench.engine.phase import phase
from sdbench.errors import SdbenchError


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


@dataclass(frozen=True)
class Source:
    """A way to choose text and rows.

    Args:
        description: One line for help texts.
        needs_reply: Reads the model's own greedy reply.
        needs_reference: Reads the reference answer of the training example.
        build: ``(prompt ids, continuation ids) -> CalibrationText``; the continuation is what the source needs, empty if it needs none.
    """

    description: str
    needs_reply: bool
    needs_reference: bool
    build: Callable[[tuple[int, ...], tuple[int, ...]], CalibrationText]


def _decode(prompt: tuple[int, ...], reply: tuple[int, ...]) -> CalibrationText:
    # The reply's last token is never fed in: nothing comes after it.
    ids = prompt + reply[:-1]
    return CalibrationText(ids, tuple(range(len(prompt), len(ids))))


def _decode_and_sink(prompt: tuple[int, ...], reply: tuple[int, ...]) -> CalibrationText:
    decode = _decode(prompt, reply)
    return CalibrationText(decode.ids, (0, *decode.rows))


def _all_rows(prompt: tuple[int, ...], continuation: tuple[int, ...]) -> CalibrationText:
    ids = prompt + continuation
    return CalibrationText(ids, tuple(range(len(ids))))


SOURCES: dict[str, Source] = {
    "decode": Source("the model's own reply, decode steps only", True, False, _decode),
    "decode+sink": Source("decode steps and position 0, whose activations are huge", True, False, _decode_and_sink),
    "self": Source("prompt and the model's own reply, all positions", True, False, _all_rows),
    "teacher-forced": Source("prompt and reference answer as fixed text, all positions", False, True, _all_rows),
    "prefill": Source("the prompt alone, all positions", False, False, _all_rows),
}


def make_text(
    source: str, prompt: Sequence[int], *, reply: Sequence[int] | None = None, reference: Sequence[int] | None = None
) -> CalibrationText:
    """Text and rows of one example.

    Args:
        source: A name in `SOURCES`.
        prompt: Token ids of the prompt, as the model is asked.
        reply: Token ids of the model's greedy reply, with the EOS token if it ended so.
        reference: Token ids of the reference answer.

    Raises:
        UsageError: No source has this name.
        SdbenchError: The prompt is empty, or what the source needs is missing or empty.
    """
    chosen = lookup("calibration source", source, SOURCES)
    if not prompt:
        raise SdbenchError(f"calibration source {source}: the prompt has no token")
    needed, continuation = None, None
    if chosen.needs_reply:
        needed, continuation = "reply of the model", reply
    elif chosen.needs_reference:
        needed, continuation = "reference answer", reference
    if needed and not continuation:
        raise SdbenchError(f"calibration source {source}: needs a {needed}, and this example has none")
    return chosen.build(tuple(prompt), tuple(continuation or ()))


def equalise(texts: Mapping[str, Sequence[CalibrationText]]) -> dict[str, list[CalibrationText]]:
    """Gives every source the same number of rows on the same example, so that sources differ in what they see and not in how much.

    Example i keeps as many rows as the source with the fewest has; the others are thinned to that number, evenly, with the first row
    (position 0 of ``decode+sink``) and the last among those kept.

    Args:
        texts: By source, one text an example, in the same order everywhere.

    Raises:
        SdbenchError: The sources have different numbers of examples.
    """
    counts = {source: len(examples) for source, examples in texts.items()}
    if len(set(counts.values())) > 1:
        raise SdbenchError(f"calibration sources hold different numbers of examples: {counts}; every arm must see the same ones")
    smallest = [min(len(text.rows) for text in example) for example in zip(*texts.values(), strict=True)]
    return {
        source: [CalibrationText(text.ids, _thin(text.rows, count)) for text, count in zip(examples, smallest, strict=True)]
        for source, examples in texts.items()
    }


def _thin(rows: tuple[int, ...], count: int) -> tuple[int, ...]:
    """``count`` of the rows, evenly spaced; the first and, from two on, the last are among them."""
    if count < 2:
        return rows[:count]
    # Rounded in integers: steps of at least 1 never pick a row twice.
    span, steps = len(rows) - 1, count - 1
    return tuple(rows[(2 * step * span + steps) // (2 * steps)] for step in range(count))


@torch.no_grad()
def collect(
    model: Any,
    linears: dict[str, nn.Linear],
    texts: Sequence[CalibrationText],
    kind: StatisticsKind,
    on_text: Callable[[int], None] | None = None,
) -> dict[str, LayerStatistics]:
    """Statistics of the dense model over the texts' rows, one forward a text.

    Args:
        model: A transformers causal language model in eval mode.
        linears: Layers to watch, by dotted name.
        texts: What to replay; a text without rows is passed over.
        kind: ``"sum_sq"`` or ``"hessian"``.
        on_text: Called after each text with the number of texts done, for progress.

    Raises:
        SdbenchError: No text has a row, no row reached a layer, or its inputs hold NaN or Inf.
    """
    if not any(text.rows for text in texts):
        raise SdbenchError(
            "no calibration text has a row that counts (a reply of one token has no decode step); use more or other examples"
        )
    # One position's logits are enough: a whole text's are larger than everything else the forward allocates.
    fixed = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    collector = Collector(model, linears, {"prefill"}, kind)
    with collector:
        for done, text in enumerate(texts, start=1):
            if text.rows:
                counts = torch.zeros(1, len(text.ids), dtype=torch.bool)
                counts[0, list(text.rows)] = True
                # Many positions in one forward are a prefill, whichever steps of the reply they stand for; the mask says which count.
                with phase("prefill", rows=counts.to(model.device)):
                    model(input_ids=torch.tensor([text.ids], device=model.device), use_cache=False, **fixed)
            if on_text is not None:
                on_text(done)
    return collector.statistics()


def replay_difference(
    model: Any,
    linears: dict[str, nn.Linear],
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    ignore_eos: bool = False,
) -> float:
    """How far one example's replay is from its live decode steps.

    Args:
        model: A transformers causal language model in eval mode.
        linears: Layers to compare, by dotted name.
        prompt: Token ids of the prompt.
        max_new_tokens: Longest reply.
        eos_ids: Ids that end the reply.
        ignore_eos: Decode exactly ``max_new_tokens``.

    Returns:
        ``max over layers of ||replay - live|| / ||live||`` for the sums of squares [in] of the decode rows; rounding alone gives about
        1e-6 in float32.

    Raises:
        SdbenchError: The reply has no decode step.
    """
    live = Collector(model, linears, {"decode"}, "sum_sq")
    with live:
        (reply,) = greedy(model, [prompt], max_new_tokens=max_new_tokens, eos_ids=eos_ids, ignore_eos=ignore_eos)
    expected = live.statistics()
    replayed = collect(model, linears, [make_text("decode", prompt, reply=reply.ids)], "sum_sq")
    differences = [float((replayed[name].sum_sq - expected[name].sum_sq).norm() / expected[name].sum_sq.norm()) for name in linears]
    # torch's max keeps a NaN; Python's may lose it.
    return float(torch.tensor(differences).max())
