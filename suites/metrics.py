"""Figures of a run: decode rate, speed-up, the counted part of a reply, quantiles. A figure that can't be had is None."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np


def decode_rate(tokens: int, decode_seconds: float) -> float | None:
    """Decode rate in tokens a second: (tokens - 1) / decode seconds.

    The first token comes from the prefill's logits, so a reply of T tokens takes T - 1 decode steps.

    Args:
        tokens: Generated tokens, the EOS included.
        decode_seconds: Time of the decode steps alone, without prefill.

    Returns:
        The rate, or None for fewer than two tokens or a time that is not a positive number.
    """
    if tokens < 2 or not math.isfinite(decode_seconds) or decode_seconds <= 0:
        return None
    return (tokens - 1) / decode_seconds


def speedup(rate: float | None, baseline_rate: float | None, tokens: int, baseline_tokens: int) -> tuple[float | None, str | None]:
    """Speed-up over a baseline, which exists only between replies of equal length.

    Args:
        rate: Tokens a second of the arm.
        baseline_rate: Tokens a second of the baseline, in the same unit and of the same run.
        tokens: Tokens that the arm's rate was measured over.
        baseline_tokens: Those of the baseline.

    Returns:
        (speed-up, None), or (None, the reason why there is none).
    """
    if tokens != baseline_tokens:
        return None, f"lengths differ: {tokens} tokens against the baseline's {baseline_tokens}"
    if rate is None or baseline_rate is None:
        return None, "no rate" if rate is None else "no baseline rate"
    for name, figure in (("rate", rate), ("baseline rate", baseline_rate)):
        if not math.isfinite(figure) or figure <= 0:
            return None, f"the {name} is {figure:g}"
    return rate / baseline_rate, None


@dataclass(frozen=True)
class Trimmed:
    """The counted part of a reply.

    Attributes:
        ids: Tokens up to and including the first EOS, at most ``max_tokens``.
        eos: The reply ended by an EOS token.
        truncated: It was cut at ``max_tokens`` before any EOS.
    """

    ids: tuple[int, ...]
    eos: bool
    truncated: bool


def trim_reply(ids: Sequence[int], eos_ids: Collection[int], max_tokens: int) -> Trimmed:
    """Counts a reply: everything after the first EOS is padding, and a reply that ends early has its own length, not ``max_tokens``.

    Args:
        ids: Generated token ids, prompt left out.
        eos_ids: Every EOS id of the generation config.
        max_tokens: Longest reply allowed.
    """
    kept = tuple(ids[:max_tokens])
    for position, token in enumerate(kept):
        if token in eos_ids:
            return Trimmed(kept[: position + 1], eos=True, truncated=False)
    return Trimmed(kept, eos=False, truncated=len(kept) == max_tokens)


@dataclass(frozen=True)
class Quantiles:
    """Median with the 20th and 80th percentile, in the unit of the samples."""

    p20: float
    p50: float
    p80: float


def quantiles(values: Iterable[float]) -> tuple[Quantiles | None, str | None]:
    """Median, p20 and p80 (linear interpolation) of the samples.

    Returns:
        (quantiles, None), or (None, the reason): no samples at all, or any that is NaN or infinite.
    """
    samples = np.asarray(list(values), dtype=np.float64)
    if samples.size == 0:
        return None, "no samples"
    bad = int(np.count_nonzero(~np.isfinite(samples)))
    if bad:
        return None, f"{bad} of {samples.size} samples are not finite"
    p20, p50, p80 = np.quantile(samples, [0.2, 0.5, 0.8])
    return Quantiles(float(p20), float(p50), float(p80)), None
