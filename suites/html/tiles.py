"""The headline of a run: a few figures that stand above its plots."""

from collections.abc import Callable
from dataclasses import dataclass

from sdbench.suites.decode.batches import batch_of
from sdbench.suites.e2e.arms import DENSE
from sdbench.suites.kernels.report import sums
from sdbench.suites.runs import Report, Row
from sdbench.words import counted


@dataclass(frozen=True)
class Tile:
    """One figure.

    Attributes:
        figure: What is set large.
        label: What it is.
        more: What belongs to it.
    """

    figure: str
    label: str
    more: str


def tiles(command: str, report: Report) -> list[Tile]:
    """The headline of a report; empty for a command that has none, or without timings."""
    made = TILES.get(command)
    return made(report) if made else []


def _of_kernels(report: Report) -> list[Tile]:
    return [
        Tile(
            f"{s.linear / s.sparse:.2f}×",
            f"{s.pattern} SpMV over F.linear",
            f"{s.dense / s.sparse:.2f}× over the fastest dense kernel; {s.sparse:.1f} µs for {counted(s.shapes, 'shape')}",
        )
        for s in sums(report.document["rows"])
    ]


def _of_e2e(report: Report) -> list[Tile]:
    return [
        Tile(
            f"{arm['speedup']:.2f}×" if arm["speedup"] else "–",
            f"{arm['arm']} over dense",
            _quality(arm) if arm["speedup"] else f"{arm['speedup_reason'] or 'no speed-up'}; {_quality(arm)}",
        )
        for arm in report.document["arms"]
        if arm["arm"] != DENSE
    ]


def _quality(arm: Row) -> str:
    told = [f"{arm['decode_rate']:.1f} tok/s"] if arm["decode_rate"] else []
    if arm["answer_match"] is not None:
        told.append(f"{arm['answer_match']} of {arm['examples']} right")
    told += [f"KL {found['kl']:.3f} on {prefill} prefill" for prefill, found in (arm.get("fidelity") or {}).items()]
    told += [] if arm["answer_match"] is not None or arm.get("fidelity") else ["quality not measured"]
    # What a rate is worth belongs beside it, not only under the table.
    return "; ".join([", ".join(told), *filter(None, [arm.get("decode_rate_note")])])


def _of_decode(report: Report) -> list[Tile]:
    fastest: dict[int, Row] = {}
    for row in report.document["rows"]:
        if batch_of(row) == 1 and row["speedup"] and row["speedup"] > fastest.get(row["context"], {"speedup": 0})["speedup"]:
            fastest[row["context"]] = row
    return [
        Tile(f"{row['speedup']:.2f}×", f"{row['arm']} over dense", f"{row['decode_rate']['p50']:.1f} tok/s at {context} tokens of context")
        for context, row in sorted(fastest.items())
    ]


TILES: dict[str, Callable[[Report], list[Tile]]] = {"kernels": _of_kernels, "e2e": _of_e2e, "decode": _of_decode}
"""Command -> its headline."""
