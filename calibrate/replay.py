"""Replaying calibration texts through a model, and how far a replay is from the live decode steps that it stands for."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sdbench.calibrate.choices import Weighting
from sdbench.calibrate.collect import Collector, InputSums, LayerStatistics, StatisticsKind, statistics_of
from sdbench.calibrate.sources import CalibrationText, make_text
from sdbench.engine.greedy import FILLER, greedy
from sdbench.engine.phase import phase
from sdbench.errors import SdbenchError

BATCH_POSITIONS = 8192
"""Positions of one replayed forward, padding included: enough to keep a GPU busy, and a few hundred MB of activations."""


PADDING = 8
"""Positions after the text in the comparison with live decode steps."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Texts that are replayed in one forward, padded on the right: under causal attention no counted position sees the padding.

    Args:
        ids: [texts, positions] int64, on the model's device.
        rows: [texts, positions], what each position counts, as a phase takes it; on the CPU.
    """

    ids: Tensor
    rows: Tensor


def batches(model: Any, texts: Sequence[CalibrationText], weighting: Weighting) -> list[Batch]:
    """The texts that have rows, longest first, as few forwards as `BATCH_POSITIONS` allows.

    Raises:
        SdbenchError: No text has a row.
    """
    if not any(text.rows for text in texts):
        raise SdbenchError(
            "no calibration text has a row that counts (a reply of one token has no decode step); use more or other examples"
        )
    # Whole texts' logits would be larger than everything else: a model that cannot leave them out gets one text at a time.
    positions = BATCH_POSITIONS if _fixed(model) else 1
    made: list[list[CalibrationText]] = []
    for text in sorted((text for text in texts if text.rows), key=lambda text: -len(text.ids)):
        if not made or (len(made[-1]) + 1) * len(made[-1][0].ids) > positions:
            made.append([])
        made[-1].append(text)
    return [_padded(batch, weighting, model.device) for batch in made]


def _padded(texts: Sequence[CalibrationText], weighting: Weighting, device: torch.device) -> Batch:
    width = max(len(text.ids) for text in texts)
    ids = torch.tensor([[*text.ids, *[FILLER] * (width - len(text.ids))] for text in texts])
    rows = [nn.functional.pad(row_weights(text, weighting), (0, width - len(text.ids))) for text in texts]
    return Batch(ids.to(device), torch.cat(rows))


@torch.no_grad()
def collect_sums(
    model: Any,
    linears: Mapping[str, nn.Linear],
    texts: Sequence[CalibrationText],
    kind: StatisticsKind,
    on_text: Callable[[int], None] | None = None,
    weighting: Weighting = "uniform",
) -> dict[str, InputSums]:
    """Sums of the model's inputs over the texts' rows, of all layers at once.

    Args:
        model: A transformers causal language model in eval mode.
        linears: Layers to watch, by dotted name.
        texts: What to replay; a text without rows is passed over.
        kind: ``"sum_sq"`` or ``"hessian"``.
        on_text: Called for each text with the number of texts done, for progress.
        weighting: Weight of a row within its text.

    Raises:
        SdbenchError: No text has a row, or no row reached a layer.
    """
    forward = replayed(model)
    collector = Collector(model, linears, {"prefill"}, kind)
    done = 0
    with collector:
        for batch in batches(model, texts, weighting):
            # Many positions in one forward are a prefill, whichever steps of the reply they stand for; the mask says which count.
            with phase("prefill", rows=batch.rows):
                forward(batch.ids)
            for _ in batch.ids if on_text is not None else ():
                done += 1
                on_text(done)  # type: ignore[misc]  # no loop without it
    return collector.sums()


def collect(
    model: Any,
    linears: Mapping[str, nn.Linear],
    texts: Sequence[CalibrationText],
    kind: StatisticsKind,
    on_text: Callable[[int], None] | None = None,
    weighting: Weighting = "uniform",
) -> dict[str, LayerStatistics]:
    """`collect_sums`, normalised by rows.

    Raises:
        SdbenchError: No text has a row, no row reached a layer, or its inputs hold NaN or Inf.
    """
    return statistics_of(collect_sums(model, linears, texts, kind, on_text, weighting))


def replayed(model: Any) -> Callable[[Tensor], Any]:
    """A function that runs the model over token ids [texts, positions], without a cache."""
    fixed = _fixed(model)
    return lambda ids: model(input_ids=ids, use_cache=False, **fixed)


def _fixed(model: Any) -> dict[str, int]:
    """One position's logits are enough."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def row_weights(text: CalibrationText, weighting: Weighting) -> Tensor:
    """What each position of a text counts, as a phase takes it.

    With T rows, row t = 1 ... T of ``"late"`` weighs 2t / (T + 1), and ``"early"`` is its mirror image: the mean is 1, so that a text
    weighs as much as without.

    Returns:
        [1, positions]: bool where the weighting is uniform, else float32 with 0 for positions that don't count.
    """
    rows, count = list(text.rows), len(text.rows)
    if weighting == "uniform":
        counts = torch.zeros(1, len(text.ids), dtype=torch.bool)
        counts[0, rows] = True
        return counts
    ramp = torch.arange(1, count + 1, dtype=torch.float32) * (2 / (count + 1))
    weights = torch.zeros(1, len(text.ids))
    weights[0, rows] = ramp if weighting == "late" else ramp.flip(0)
    return weights


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
    text = make_text("decode", prompt, reply=reply.ids)
    # Replays are padded on the right: what stands there must not reach the rows.
    replayed = collect(model, linears, [replace(text, ids=(*text.ids, *[FILLER] * PADDING))], "sum_sq")
    differences = [float((replayed[name].sum_sq - expected[name].sum_sq).norm() / expected[name].sum_sq.norm()) for name in linears]
    # torch's max keeps a NaN; Python's may lose it.
    return float(torch.tensor(differences).max())
