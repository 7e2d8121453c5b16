"""Options about calibration, the same for every command that prunes."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import rich_click as click

SOURCES = "decode, decode+sink, self, prefill, teacher-forced, text or mixed"
METHODS = "wanda, sparsegpt, sparsegpt-median or magnitude"

ABOUT_CALIBRATION = frozenset(
    (
        *("calib", "calibration_examples", "calibration_tokens", "sequential", "sink_tokens", "first_decode", "last_decode"),
        *("token_weighting", "mix", "calibration_text", "text_window", "temperature", "top_k", "top_p"),
    )
)
"""Options of e2e that change nothing for a method that needs no calibration; --batch-size is lm-eval's too."""


def calibration_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command, which gets them as ``choices`` (`CalibrationChoices`) and ``sequential``."""

    @wraps(function)
    def with_choices(
        mix: tuple[str, ...],
        calibration_tokens: str | None,
        calibration_text: Path | None,
        text_window: int,
        sink_tokens: int,
        first_decode: int | None,
        last_decode: int | None,
        token_weighting: Any,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        **others: Any,
    ) -> Any:
        from sdbench.calibrate.choices import CalibrationChoices, parse_count, parse_mix

        choices = CalibrationChoices(
            sink=sink_tokens,
            first=first_decode,
            last=last_decode,
            weighting=token_weighting,
            mix=parse_mix(mix),
            tokens=parse_count(calibration_tokens, "--calibration-tokens") if calibration_tokens is not None else None,
            text=calibration_text,
            window=text_window,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        return function(choices=choices, **others)

    for option in reversed(_OPTIONS):
        with_choices = option(with_choices)
    return with_choices


_OPTIONS = (
    click.option(
        "--calibration-tokens",
        help="Rows a layer to calibrate on, such as 65536, 64k or 1M, the same on every arm; --calibration-examples is then the most "
        "examples it may take.  [default: whatever the examples give]",
    ),
    click.option(
        "--sequential", is_flag=True, help="Calibrate each block on the pruned blocks before it, instead of all on the dense model."
    ),
    click.option("--sink-tokens", type=int, default=1, show_default=True, help="First prompt positions that decode+sink counts."),
    click.option("--first-decode", type=int, help="Decode steps of each reply that count, from its start.  [default: all]"),
    click.option("--last-decode", type=int, help="The same, from its end."),
    click.option(
        "--token-weighting",
        type=click.Choice(["uniform", "early", "late"]),
        default="uniform",
        show_default=True,
        help="Weight of a row: all the same, or falling or rising evenly along its text.",
    ),
    click.option(
        "--mix", multiple=True, help="A part of --calib mixed and its share of the examples, such as decode=3; repeat for each part."
    ),
    click.option(
        "--calibration-text",
        type=click.Path(path_type=Path),
        help='Corpus of --calib text: plain text, or JSON lines with a "text" (by the suffix .jsonl).',
    ),
    click.option("--text-window", type=int, default=512, show_default=True, help="Tokens of one window of that corpus."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="Sample calibration replies; 0 decodes them greedily."),
    click.option("--top-k", type=int, help="Sample from so many of the likeliest tokens.  [default: all]"),
    click.option("--top-p", type=float, help="Sample from the likeliest tokens that reach this probability.  [default: all]"),
)
