"""Replaying calibration texts through a model, and how far a replay is from the live decode steps that it stands for."""

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sdbench.calibrate.choices import Weighting
from sdbench.calibrate.collect import Collector, LayerStatistics, StatisticsKind
from sdbench.calibrate.sources import CalibrationText, make_text
from sdbench.engine.greedy import greedy
from sdbench.engine.phase import phase
from sdbench.errors import SdbenchError


@torch.no_grad()
def collect(
    model: Any,
    linears: dict[str, nn.Linear],
    texts: Sequence[CalibrationText],
    kind: StatisticsKind,
    on_text: Callable[[int], None] | None = None,
    weighting: Weighting = "uniform",
) -> dict[str, LayerStatistics]:
    """Statistics of the model over the texts' rows, one forward a text.

    Args:
        model: A transformers causal language model in eval mode.
        linears: Layers to watch, by dotted name.
        texts: What to replay; a text without rows is passed over.
        kind: ``"sum_sq"`` or ``"hessian"``.
        on_text: Called after each text with the number of texts done, for progress.
        weighting: Weight of a row within its text.

    Raises:
        SdbenchError: No text has a row, no row reached a layer, or its inputs hold NaN or Inf.
    """
    require_rows(texts)
    forward = replayed(model)
    collector = Collector(model, linears, {"prefill"}, kind)
    with collector:
        for done, text in enumerate(texts, start=1):
            if text.rows:
                # Many positions in one forward are a prefill, whichever steps of the reply they stand for; the mask says which count.
                with phase("prefill", rows=row_weights(text, weighting).to(model.device)):
                    forward(text)
            if on_text is not None:
                on_text(done)
    return collector.statistics()


def replayed(model: Any) -> Callable[[CalibrationText], Any]:
    """A function that runs the model over a text, without a cache."""
    # One position's logits are enough: a whole text's are larger than everything else the forward allocates.
    fixed = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return lambda text: model(input_ids=torch.tensor([text.ids], device=model.device), use_cache=False, **fixed)


def require_rows(texts: Sequence[CalibrationText]) -> None:
    """Refuses texts that leave nothing to calibrate on.

    Raises:
        SdbenchError: No text has a row.
    """
    if not any(text.rows for text in texts):
        raise SdbenchError(
            "no calibration text has a row that counts (a reply of one token has no decode step); use more or other examples"
        )


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
    replayed = collect(model, linears, [make_text("decode", prompt, reply=reply.ids)], "sum_sq")
    differences = [float((replayed[name].sum_sq - expected[name].sum_sq).norm() / expected[name].sum_sq.norm()) for name in linears]
    # torch's max keeps a NaN; Python's may lose it.
    return float(torch.tensor(differences).max())
