"""What the suites' plots share: their colours and markers, and writing one to a file. Nothing here imports matplotlib before it draws."""

import math
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.errors import SdbenchError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")

INK, PAPER, GRID, FAINT, REFERENCE = "#000000", "#ffffff", "#e6e6e6", "#bfbfbf", "#666666"
"""Text, ground, grid, lines that join points, lines that points are compared with."""

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
"""Colours of series, in order (Okabe and Ito)."""

MARKERS = "os^Dv<>p*"

_SUBS = ((1.3, (1, 1.5, 2, 3, 5, 7)), (2.5, (1, 2, 5)), (math.inf, (1,)))
"""Up to how many decades which ticks of each fit."""


@contextmanager
def style() -> Iterator[None]:
    """How a plot looks. A ``$`` in a name stays one, and a sign that the plot's font lacks is left to whatever shows the text."""
    import matplotlib

    settings: Any = {
        "text.parse_math": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": GRID,
        "axes.titlesize": "medium",
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each name, in order; no series hangs on its colour alone."""
    return {
        name: {"color": colour, "marker": marker}
        for name, colour, marker in zip(dict.fromkeys(names), cycle(SERIES), cycle(MARKERS), strict=False)
    }


def log_ticks(axis: Any, values: Iterable[float]) -> None:
    """Ticks of a logarithmic axis as plain numbers, the fewer in a decade the more decades there are.

    Args:
        axis: matplotlib's ``axes.xaxis`` or ``axes.yaxis``.
        values: What it shows; those that are not above 0 have no place on it.
    """
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    shown = [value for value in values if value > 0] or [1.0]
    decades = math.log10(max(shown) / min(shown))
    axis.set_major_locator(LogLocator(subs=next(subs for most, subs in _SUBS if decades <= most)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def legend_below(figure: "Figure", columns: int = 4) -> None:
    """The figure's series under its panels, each once."""
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)


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
    require_matplotlib("--plot")
    # Folders that are missing are made when the plot is written: --output makes its own only when the run starts.
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SdbenchError(f"--plot {path}: cannot write to the folder {folder}: {error.strerror}") from error


def require_matplotlib(option: str) -> None:
    """Raises where plots cannot be drawn.

    Args:
        option: What asks for them.

    Raises:
        SdbenchError: matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise SdbenchError(f"{option} needs matplotlib ({error}): pip install 'sdbench[plots]'") from error


def save_plot(path: Path, figure: "Figure | None") -> bool:
    """Writes a figure in the format of the file's suffix, and the folders above it where they are missing.

    Args:
        path: The file, as :func:`check_plot` took it.
        figure: What a suite drew; None where there was nothing to draw.

    Returns:
        False, and nothing is written, without a figure.

    Raises:
        SdbenchError: The file cannot be written.
    """
    if figure is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with style():
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise SdbenchError(f"cannot write the plot {path}: {error.strerror}") from error
    return True
