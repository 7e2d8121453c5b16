"""Run directories in memory, with the rows that a test gives them."""

from pathlib import Path
from typing import Any

from sdbench.records import RunRecord
from sdbench.suites.runs import SavedRun


def saved(name: str, command: str, rows: Any, samples: Any = (), **record: Any) -> SavedRun:
    whole = {
        "schema": "sdbench.run/1",
        "command": command,
        "arguments": {"seed": 0},
        "environment": {"gpu": {"name": "NVIDIA H200"}},
        "versions": {"torch": "2.11.0"},
        "git": None,
        "created": "2026-12-01T00:00:00+00:00",
        "outcome": "complete",
    }
    return SavedRun(Path(name), RunRecord.model_validate(whole | record), list(rows), list(samples))


def around(median: float) -> dict[str, float]:
    """A median and a narrow spread."""
    return {"p20": 0.9999 * median, "p50": median, "p80": 1.0001 * median}


def product(us: Any, outcome: str | None = "correct", **changes: Any) -> dict[str, Any]:
    """A result row; ``us`` is a median with a narrow spread, (p20, p50, p80), or what stands in its place."""
    times = around(us) if isinstance(us, float) else us
    times = dict(zip(("p20", "p50", "p80"), us, strict=True)) if isinstance(us, tuple) else times
    row = {
        "record": "result",
        "kernel": "spmv",
        "variant": "lane_row",
        "pattern": "2:4",
        "layer": "o",
        "of_shape": [16, 32],
        "dtype": "bf16",
    }
    return row | {"us": times, "outcome": outcome, "message": "why not"} | changes


def arm(name: str, rates: Any, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"record": "arm", "arm": name, "pattern": "2:4", "method": "wanda", "equal_tokens": 128}
    row |= {"kernel_calls": 7, "expected_kernel_calls": 7, "answer_match": None, "eos": None}
    if isinstance(rates, tuple):
        row |= {"decode_rate": rates[1], "decode_rate_spread": dict(zip(("p20", "p50", "p80"), rates, strict=True))}
    else:
        row |= {"decode_rate": rates, "decode_rate_spread": around(rates) if isinstance(rates, float) else None}
    return row | changes


def answers(name: str, right: str, **changes: Any) -> list[dict[str, Any]]:
    """Samples of an arm: "1" right, "0" wrong; none of them ends."""
    made = {"arm": name, "eos": False}
    return [made | {"example": f"{n:03}", "prompt_hash": f"h{n}", "match": one == "1"} | changes for n, one in enumerate(right)]


def fidelity(name: str, *kls: float, prefill: str = "dense", positions: int = 10) -> list[dict[str, Any]]:
    made = {"record": "fidelity", "arm": name, "prefill": prefill, "positions": positions, "agreement": 0.5, "first_divergence": None}
    return [made | {"example": f"q{number}", "kl": kl} for number, kl in enumerate(kls)]
