"""Figures of a run: decode rate, speed-up, the counted part of a reply, quantiles. A figure that can't be had is None."""

import math
from collections.abc import Sequence

from sdbench.words import counted


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


def crossover(gains: Sequence[tuple[int, float]], unit: str) -> str:
    """Up to which of several sizes something pays, in words.

    Args:
        gains: A size and the gain there, of which 1 is none, by ascending size.
        unit: What a size counts, such as "batch".
    """
    paying, sizes = [size for size, gain in gains if gain >= 1], [size for size, _ in gains]
    if not paying:
        return f"pays at no {unit} that was timed"
    if paying == sizes:
        return f"pays up to {unit} {sizes[-1]}, the largest that was timed"
    if paying == sizes[: len(paying)]:
        return f"stops paying at {unit} {sizes[len(paying)]}"
    return f"pays at {unit} {', '.join(map(str, paying))} alone"


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
        return None, f"lengths differ: {counted(tokens, 'token')} against the baseline's {baseline_tokens}"
    if rate is None or baseline_rate is None:
        return None, "no rate" if rate is None else "no baseline rate"
    for name, figure in (("rate", rate), ("baseline rate", baseline_rate)):
        if not math.isfinite(figure) or figure <= 0:
            return None, f"the {name} is {figure:g}"
    return rate / baseline_rate, None
