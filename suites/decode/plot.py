"""A decode run as plots: tokens a second over context length, and what a step's time goes into."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdbench.suites import plots
from sdbench.suites.decode.batches import batch_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]


@plots.style()
def draw_contexts(rows: Sequence[Row]) -> "Figure | None":
    """A line a way to decode, over context lengths; bars are p20 to p80, dotted lines the rate at which memory alone would allow it.

    Args:
        rows: Judged rows of the suite.

    Returns:
        None where no row has a rate.
    """
    timed = [row for row in rows if row["decode_rate"] and batch_of(row) == 1]
    if not timed:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="tokens of context", ylabel="tok/s")
    axes.xaxis.set_major_locator(FixedLocator(sorted({row["context"] for row in timed})))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    series: dict[str, list[Row]] = {}
    for row in sorted(timed, key=lambda row: row["context"]):
        series.setdefault(_way(row, timed), []).append(row)
    # In the order of the run's table, which the sorting by context has lost.
    looks = plots.looks(_way(row, timed) for row in timed)
    for way, look in looks.items():
        found = series[way]
        contexts, rates = [row["context"] for row in found], [row["decode_rate"] for row in found]
        axes.vlines(contexts, [rate["p20"] for rate in rates], [rate["p80"] for rate in rates], color=look["color"], linewidth=1)
        axes.plot(contexts, [rate["p50"] for rate in rates], **look, label=way)
        bounded = [row for row in found if row["ceiling"]]
        if len(bounded) > 1:
            axes.plot([row["context"] for row in bounded], [row["ceiling"] for row in bounded], color=look["color"], linestyle=":")
    axes.set_ylim(bottom=0)
    plots.legend_below(figure, 3)
    return figure


@plots.style()
def draw_profiles(rows: Sequence[Row]) -> "Figure | None":
    """A bar an arm and context, divided by kind of kernel: microseconds of a step.

    Args:
        rows: Judged rows of the suite.

    Returns:
        None where no step was profiled.
    """
    profiled = [row for row in rows if row["profile"]]
    if not profiled:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.4 + 0.28 * len(profiled)), layout="constrained")
    axes = figure.add_subplot(xlabel="microseconds a step")
    axes.grid(visible=False, axis="y")
    names = [f"{row['arm']}, {row['context']}" for row in profiled]
    ends = [0.0] * len(profiled)
    # What pruning changes first, from the same edge in every arm.
    kinds = sorted(dict.fromkeys(kind for row in profiled for kind in row["profile"]), key=lambda kind: not kind.endswith("products"))
    for kind, look in plots.looks(kinds).items():
        times = [row["profile"].get(kind, {}).get("us", 0.0) for row in profiled]
        axes.barh(range(len(profiled)), times, left=ends, height=0.75, color=look["color"], edgecolor=plots.PAPER, label=kind)
        ends = [end + time for end, time in zip(ends, times, strict=True)]
    axes.set_yticks(range(len(profiled)), names)
    axes.invert_yaxis()
    axes.margins(y=0.02)
    plots.legend_below(figure)
    return figure


def _way(row: Row, rows: Sequence[Row]) -> str:
    """The arm, and how it decodes where the arm has several ways."""
    alone = len({other["path"] for other in rows if other["arm"] == row["arm"]}) == 1
    return row["arm"] if alone else f"{row['arm']}, {row['path']}"
