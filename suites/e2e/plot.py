"""Layer by layer as a plot: what calibration misses of the decode steps, and what pruning costs there, by depth and arm."""

import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from sdbench.suites.kernels.plot import write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = (
    ("discrepancy", "discrepancy from the decode Hessian", "log"),
    ("reconstruction_error", "relative error of its decode outputs", "linear"),
)
_MARKERS = "os^Dv<>p*"

Row = dict[str, Any]


def save_plot(path: Path, layers: Sequence[Row], title: str) -> bool:
    """Draws the layers' rows and writes the file in the format of its suffix.

    Args:
        path: The file, as `sdbench.suites.kernels.plot.check_plot` took it.
        layers: Rows of ``--diagnose``.
        title: Heading.

    Returns:
        False, and nothing is written, where there is nothing to draw.

    Raises:
        SdbenchError: The file cannot be written.
    """
    figure = draw(layers, title)
    if figure is None:
        return False
    write_figure(path, figure)
    return True


def draw(layers: Sequence[Row], title: str) -> "Figure | None":
    """A panel a figure, a line an arm: the median over each block's linears against the block's number.

    Args:
        layers: Rows of ``--diagnose``; layers outside of numbered blocks are left out.
        title: Heading.

    Returns:
        None where no row is left.
    """
    series = {key: points for key, _, _ in PANELS if (points := _by_arm(layers, key))}
    if not series:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(5 * len(series), 4.5), layout="constrained")
    figure.suptitle(title)
    shown = [panel for panel in PANELS if panel[0] in series]
    for number, (key, label, scale) in enumerate(shown, start=1):
        axes = figure.add_subplot(1, len(shown), number, xlabel="block, median of its linears", ylabel=label, yscale=scale)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if scale == "log":
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(color="0.92")
        for (arm, blocks), marker in zip(series[key].items(), cycle(_MARKERS), strict=False):
            axes.plot(list(blocks), list(blocks.values()), marker=marker, markersize=4, linewidth=1, label=arm)
        axes.legend()
    return figure


def _by_arm(layers: Sequence[Row], key: str) -> dict[str, dict[int, float]]:
    """By arm, the median of a figure over the linears of each block."""
    values: dict[str, dict[int, list[float]]] = {}
    for row in layers:
        block = re.search(r"\.(\d+)\.", row["layer"])
        if block and row.get(key) is not None:
            values.setdefault(row["arm"], {}).setdefault(int(block[1]), []).append(row[key])
    return {arm: {block: median(found) for block, found in sorted(blocks.items())} for arm, blocks in values.items()}
