"""Which plots a run has, by its command; one that cannot be drawn says why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdbench.suites.decode.plot import draw_contexts, draw_profiles
from sdbench.suites.e2e import plot as e2e
from sdbench.suites.kernels import plot as kernels
from sdbench.suites.runs import Report, Row, SavedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawing:
    """A plot of a run.

    Attributes:
        title: Its heading.
        caption: How to read it.
        figure: What was drawn; None where there is nothing to draw.
        reason: Why there is nothing.
    """

    title: str
    caption: str
    figure: "Figure | None"
    reason: str


def drawings(run: SavedRun, report: Report) -> list[Drawing]:
    """The plots of a run; none for a command that has none."""
    made = FIGURES.get(run.record.command)
    return made(run, report) if made else []


def _of_kernels(run: SavedRun, report: Report) -> list[Drawing]:
    rows = report.document["rows"]
    return [
        Drawing(
            "Time over bytes",
            "Each point is the fastest right kernel of its kind on one matrix: median microseconds over the bytes that a call reads. The "
            "dashed line is reading that many bytes alone, measured in this run; on it, a kernel is as fast as memory allows. Grey lines "
            "join the kernels of one matrix.",
            kernels.draw(rows, run.place),
            _reasons(rows, "us_reason") or "no row has a timing",
        )
    ]


def _of_decode(run: SavedRun, report: Report) -> list[Drawing]:
    rows = report.document["rows"]
    contexts = Drawing(
        "Speed over context length",
        "Tokens a second of replies of equal length. Attention grows with the context and no pruning touches it. Dotted: the rate at "
        "which the read bandwidth measured in this run would read what a step reads.",
        draw_contexts(rows),
        _reasons(rows, "reason") or "no row has a rate",
    )
    profiles = Drawing(
        "Where a step's time goes",
        "One decode step by kind of kernel, an arm and context a bar; kernels that overlap count once.",
        draw_profiles(rows),
        "no step was profiled (--profile)",
    )
    return [contexts, profiles]


def _of_e2e(run: SavedRun, report: Report) -> list[Drawing]:
    arms = report.document["arms"]
    fidelity = run.latest("fidelity", "arm", "prefill", "example")
    layers = report.document["layers"]
    found = [
        Drawing(
            "Speed against quality",
            "Up and to the right is better. Bars across: 95% intervals (Wilson for right answers, bootstrap over questions for KL); "
            "upright: p20 to p80 of the repeats. Whether two arms differ is for the paired figures under the tables to say.",
            e2e.draw_speed_quality(arms, fidelity),
            _reasons(arms, "quality_reason") or "no arm has both a rate and a figure of quality",
        )
    ]
    if layers:
        missing = "no layer stands in a numbered block, or none has a figure"
        caption = (
            "By depth, on the judged questions: how far the calibration Hessian is from that of the decode steps, and what pruning "
            "changes in a layer's decode outputs. Lower is better."
        )
        found.append(Drawing("Layer by layer", caption, e2e.draw(layers, ""), missing))
    return found


FIGURES: dict[str, Callable[[SavedRun, Report], list[Drawing]]] = {"kernels": _of_kernels, "decode": _of_decode, "e2e": _of_e2e}
"""Command -> its plots."""


def _reasons(rows: Sequence[Row], key: str) -> str:
    return "; ".join(dict.fromkeys(str(row[key]) for row in rows if row.get(key)))
