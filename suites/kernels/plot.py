"""A run's timings as a plot: microseconds against bytes a call, over the time that reading those bytes alone took in the same run."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from sdbench.errors import SdbenchError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
LINEAR, DENSE, ROOFLINE = "F.linear", "fastest dense", "reading alone, this run"

Row = dict[str, Any]

# Baselines are filled and patterns open, each with a marker of its own, so that no series hangs on colour. Colours: Okabe and Ito.
_BASELINE_MARKERS = "sDPX*H"
_PATTERN_MARKERS = "os^Dv8<p>"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def check_plot(path: Path) -> None:
    """Refuses, before a run, a plot that could not be written after it.

    Args:
        path: The file to write.

    Raises:
        UsageError: The suffix names no format that is offered, or the path is a folder.
        SdbenchError: matplotlib is missing, or the folder cannot be written to.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: the suffix chooses the format; write one of {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise UsageError(f"--plot {path} is a folder; name a file in it")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise SdbenchError(f"--plot needs matplotlib ({error}): pip install 'sdbench[plots]'") from error
    # Folders that are missing are made when the plot is written: --output makes its own only when the run starts.
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SdbenchError(f"--plot {path}: cannot write to the folder {folder}: {error.strerror}") from error


def save_plot(path: Path, rows: Sequence[Row], gpu: str) -> bool:
    """Draws the rows and writes the file in the format of its suffix.

    Args:
        path: The file, as :func:`check_plot` took it.
        rows: Result rows of the suite.
        gpu: The GPU's name.

    Returns:
        False, and nothing is written, where no row has a timing.

    Raises:
        SdbenchError: The file cannot be written.
    """
    figure = draw(rows, gpu)
    if figure is None:
        return False
    write_figure(path, figure)
    return True


def write_figure(path: Path, figure: "Figure") -> None:
    """Writes a figure in the format of the file's suffix, and the folders above it where they are missing.

    Raises:
        SdbenchError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SdbenchError(f"cannot write the plot {path}: {error.strerror}") from error


def draw(rows: Sequence[Row], gpu: str) -> "Figure | None":
    """The plot: a point a (series, shape), a thin line through the points of each shape, and the curve of reading alone.

    Series are ``F.linear``, the fastest dense kernel of each shape, every other baseline, and the fastest SpMV of each pattern.

    Args:
        rows: Result rows of the suite; those without a timing or a passed check are left out, and partial sums, which are no product yet.
        gpu: The GPU's name, for the title.

    Returns:
        None where no row is left.
    """
    timed = [row for row in rows if row["us"] and row["outcome"] == "correct" and row["kernel"] != "spmv_partial"]
    if not timed:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="MB read a call", ylabel="microseconds a call, cold L2")
    axes.set_title(f"{gpu}, {', '.join(dict.fromkeys(row['dtype'] for row in timed))}: lower and further left is better")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())
    axes.margins(0.08)
    axes.grid(color="0.92")
    axes.plot(*_roofline(timed), color="0.4", linestyle="--", marker=".", label=ROOFLINE)

    series = _series(timed)
    for points in _group([row for one in series for row in one.rows if row["kernel"] in ("dense", "spmv")], _shape).values():
        points = sorted(points, key=lambda row: (row["bytes"], row["us"]["p50"]))
        axes.plot(*_points(points), color="0.75", linewidth=0.8, zorder=1)
        axes.annotate(
            points[-1]["layer"], (points[-1]["bytes"] / 1e6, points[-1]["us"]["p50"]), (0, 9), textcoords="offset points", ha="center"
        )
    for one, colour in zip(series, cycle(_COLOURS), strict=False):
        fill = colour if one.filled else "none"
        axes.plot(*_points(one.rows), one.marker, label=one.label, color=colour, markersize=one.size, markerfacecolor=fill)
    figure.legend(loc="outside right upper")
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
        _Series(f"fastest SpMV {pattern}", _fastest(rows), marker, 5 + 2.5 * number, False)
        for number, ((pattern, rows), marker) in enumerate(zip(patterns.items(), cycle(_PATTERN_MARKERS), strict=False))
    ]
    return filled + hollow


def _roofline(timed: Sequence[Row]) -> tuple[list[float], list[float]]:
    """MB and microseconds of reading alone; a row's roofline is the fraction of the read bandwidth that was measured at its byte count."""
    at = _group(timed, lambda row: row["bytes"])
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
