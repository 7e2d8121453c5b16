"""What may be chosen about calibration beside the source's name; the same choices hold on every arm of a run."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sdbench.errors import UsageError

Weighting = Literal["uniform", "early", "late"]
"""How much a row counts: all the same, or falling or rising evenly along the rows of its text."""


@dataclass(frozen=True)
class CalibrationChoices:
    """How calibration texts are made and which of their rows count.

    Attributes:
        sink: First prompt positions that ``decode+sink`` counts beside the decode steps.
        first: Decode steps of each reply that count, from its start; None for all.
        last: The same, from its end.
        weighting: Weight of a row within its text.
        mix: (source, weight) pairs that ``mixed`` is made of; weights are shares of the examples.
        tokens: Rows a layer after which calibration ends, the same on every arm; None for whatever the examples give.
        text: Corpus of ``text``: plain text, or JSON lines with a ``text`` field.
        window: Tokens of one window of that corpus.
        temperature: 0 for greedy replies; else what the logits are divided by before a token is drawn.
        top_k: Only the so many likeliest tokens are drawn from; None for all.
        top_p: Only the likeliest tokens that together reach this probability are drawn from; None for all.

    Raises:
        UsageError: A value out of range, or two that exclude each other; names the option.
    """

    sink: int = 1
    first: int | None = None
    last: int | None = None
    weighting: Weighting = "uniform"
    mix: tuple[tuple[str, float], ...] = ()
    tokens: int | None = None
    text: Path | None = None
    window: int = 512
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        counts = {
            "sink-tokens": self.sink,
            "first-decode": self.first,
            "last-decode": self.last,
            "calibration-tokens": self.tokens,
            "text-window": self.window,
            "top-k": self.top_k,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise UsageError(f"--{name} is {value}; it must be at least 1")
        if self.first is not None and self.last is not None:
            raise UsageError("--first-decode and --last-decode exclude each other: choose one end of the reply")
        if self.weighting not in get_args(Weighting):
            raise UsageError(f"--token-weighting {self.weighting!r}: choose {', '.join(get_args(Weighting))}")
        for source, weight in self.mix:
            if not 0 < weight < math.inf:
                raise UsageError(f"--mix {source}={weight:g}: a weight is a positive number")
        if repeated := {source for source, _ in self.mix if [name for name, _ in self.mix].count(source) > 1}:
            raise UsageError(f"--mix names {min(repeated)} twice: give each source one weight")
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature is {self.temperature:g}; 0 decodes greedily, a positive number samples")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p is {self.top_p:g}; it is a probability above 0 and up to 1")
        if not self.temperature and (self.top_k or self.top_p):
            raise UsageError("--top-k and --top-p choose among sampled tokens; give a --temperature above 0 too")

    def require(self, sources: Collection[str]) -> None:
        """Checks the choices against the sources that a run uses, so that none is without effect and none lacks what it needs.

        Args:
            sources: Names of the run's calibration sources.

        Raises:
            UsageError: An option that a source needs is missing, or one is given that no source reads.
        """
        used = set(sources) | ({name for name, _ in self.mix} if "mixed" in sources else set())
        if "mixed" in sources and not self.mix:
            raise UsageError("calibration source mixed: name its parts, such as --mix decode=3 --mix prefill=1")
        if "text" in used and self.text is None:
            raise UsageError("calibration source text: name a corpus with --calibration-text FILE")
        steps = used & {"decode", "decode+sink"}
        replies = steps | used & {"self"}
        readers = {
            "--mix": (self.mix, "mixed" in sources, "mixed"),
            "--calibration-text": (self.text, "text" in used, "text"),
            "--text-window": (self.window != 512, "text" in used, "text"),
            "--sink-tokens": (self.sink != 1, "decode+sink" in used, "decode+sink"),
            "--first-decode": (self.first, steps, "decode or decode+sink"),
            "--last-decode": (self.last, steps, "decode or decode+sink"),
            "--temperature": (self.temperature, replies, "decode, decode+sink or self"),
        }
        for option, (given, read, names) in readers.items():
            if given and not read:
                raise UsageError(f"{option} changes nothing without the calibration source {names}; add --calib or leave it out")

    def arguments(self) -> dict[str, Any]:
        """The choices as plain values, without the corpus's path."""
        return {
            "sink_tokens": self.sink,
            "first_decode": self.first,
            "last_decode": self.last,
            "token_weighting": self.weighting,
            "mix": dict(self.mix),
            "calibration_tokens": self.tokens,
            "calibration_text": self.text and self.text.name,
            "text_window": self.window,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


def parse_mix(parts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Reads ``SOURCE=WEIGHT`` texts.

    Raises:
        UsageError: A text is not of that form.
    """
    mix = []
    for part in parts:
        source, _, weight = part.rpartition("=")
        try:
            mix.append((source, float(weight)))
        except ValueError:
            source = ""
        if not source:
            raise UsageError(f"--mix {part!r}: write SOURCE=WEIGHT, such as decode=3")
    return tuple(mix)


def parse_count(text: str, option: str) -> int:
    """Reads a number of tokens: ``65536``, ``64k`` (thousands) or ``1M`` (millions).

    Raises:
        UsageError: The text is no such number.
    """
    factor = {"k": 1000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal():
        raise UsageError(f"{option} {text!r}: write a whole number, such as 65536, 64k or 1M")
    return int(digits) * factor
