"""A run's timings as a plot: microseconds against bytes a call, over the time that reading those bytes alone took in the same run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any

from sdbench.suites import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINEAR, DENSE, ROOFLINE = "F.linear", "fastest dense", "reading alone, this run"

Row = dict[str, Any]

# Baselines are filled and patterns open, each with a marker of its own, so that no series hangs on colour.
_BASELINE_MARKERS = "sDPX*H"
_PATTERN_MARKERS = "os^Dv8<p>"


@plots.style()
def draw(rows: Sequence[Row], gpu: str) -> "Figure | None":
    """The plot: a point a (series, shape), a thin line through the points of each shape, and the curve of reading alone.

    Series are ``F.linear``, the fastest dense kernel of each shape, every other baseline, and the fastest SpMV of each pattern.

    Args:
        rows: Result rows of the suite; left out are those of several tokens, those without a timing or a passed check, and partial sums,
            which are no product yet.
        gpu: The GPU's name, for the title.

    Returns:
        None where no row is left.
    """
    single = [row for row in rows if row.get("tokens", 1) == 1 and row["kernel"] != "spmv_partial"]
    timed = [row for row in single if row["us"] and row["outcome"] == "correct"]
    if not timed:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="MB read a call", ylabel="microseconds a call, cold L2")
    axes.set_title(f"{gpu}, {', '.join(dict.fromkeys(row['dtype'] for row in timed))}: lower and further left is better")
    for axis, values in zip((axes.xaxis, axes.yaxis), _points(timed), strict=True):
        plots.log_ticks(axis, values)
    axes.margins(0.08)
    axes.plot(*_roofline(timed), color=plots.REFERENCE, linestyle="--", marker=".", label=ROOFLINE)

    series = _series(timed)
    for points in _group([row for one in series for row in one.rows if row["kernel"] in ("dense", "spmv")], _shape).values():
        points = sorted(points, key=lambda row: (row["bytes"], row["us"]["p50"]))
        axes.plot(*_points(points), color=plots.FAINT, linewidth=0.8, zorder=1)
        axes.annotate(
            points[-1]["layer"], (points[-1]["bytes"] / 1e6, points[-1]["us"]["p50"]), (0, 9), textcoords="offset points", ha="center"
        )
    for one, colour in zip(series, cycle(plots.SERIES), strict=False):
        fill = colour if one.filled else "none"
        look: dict[str, Any] = {"color": colour, "markersize": one.size, "markerfacecolor": fill, "markeredgewidth": 1.5}
        axes.plot(*_points(one.rows), one.marker, label=one.label, **look)
    plots.legend_below(figure)
    return figure


@dataclass(frozen=True)
class _Series:
    label: str
    rows: list[Row]
    marker: str
    size: float
    filled: bool


def _series(timed: Sequence[Row]) -> list[_Series]:
    dense = [row for row in timed if row["kernel"] == "dense"]
    baselines = {LINEAR: [row for row in dense if row["variant"] == "linear"], DENSE: _fastest(dense)}
    for row in timed:
        if row["kernel"] not in ("dense", "spmv"):
            baselines.setdefault(" ".join(filter(None, (row["variant"], row["pattern"]))), []).append(row)
    patterns = _group([row for row in timed if row["kernel"] == "spmv"], lambda row: row["pattern"])
    filled = [
        _Series(label, rows, marker, 8, True)
        for (label, rows), marker in zip(baselines.items(), cycle(_BASELINE_MARKERS), strict=False)
        if rows
    ]
    # Patterns of one density read the same bytes in nearly the same time: growing markers stay apart where they share a centre.
    hollow = [
        _Series(f"fastest SpMV {pattern}", _fastest(rows), marker, 7 + 2.5 * number, False)
        for number, ((pattern, rows), marker) in enumerate(zip(patterns.items(), cycle(_PATTERN_MARKERS), strict=False))
    ]
    return filled + hollow


def _roofline(timed: Sequence[Row]) -> tuple[list[float], list[float]]:
    """MB and microseconds of reading alone; a row's roofline is the fraction of the read bandwidth that was measured at its byte count."""
    at = _group([row for row in timed if row["roofline"]], lambda row: row["bytes"])
    sizes = sorted(at)
    return [size / 1e6 for size in sizes], [median(row["us"]["p50"] * row["roofline"] for row in at[size]) for size in sizes]


def _fastest(rows: Sequence[Row]) -> list[Row]:
    return [min(same, key=lambda row: row["us"]["p50"]) for same in _group(rows, _shape).values()]


def _shape(row: Row) -> tuple[int, ...]:
    return tuple(row["of_shape"])


def _group(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """MB and microseconds of each row."""
    return [row["bytes"] / 1e6 for row in rows], [row["us"]["p50"] for row in rows]
