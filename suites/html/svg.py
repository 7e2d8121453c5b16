"""A matplotlib figure as SVG inside a page: text stays text, colours are the page's, and points tell their figures under the pointer."""

import io
import re
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np

from sdbench.suites import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIABLES = {
    plots.INK: "currentColor",
    plots.PAPER: "var(--card)",
    plots.GRID: "var(--grid)",
    plots.FAINT: "var(--faint)",
    plots.REFERENCE: "var(--muted)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(plots.SERIES) if colour != plots.INK},
}
"""What stands in the page for each colour of a plot, so that it changes with the page from light to dark."""

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def inline_svg(figure: "Figure", name: str, label: str) -> str:
    """The figure as an ``<svg>`` element.

    Args:
        figure: What a suite drew.
        name: Prefix of its ids, another for each figure of a page.
        label: What it shows, for those who cannot see it.
    """
    import matplotlib
    from matplotlib.text import Text

    for artist in figure.findobj(Text):
        artist.set_text(_plain(artist.get_text()))
    told = dict(_points(figure))
    file = io.StringIO()
    with plots.style(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(file.getvalue().encode())
    # What made the file, and a style that the page's own has.
    for parent, name_of in ((root, "metadata"), *((defs, "style") for defs in root.findall(f"{{{_SVG}}}defs"))):
        for extra in parent.findall(f"{{{_SVG}}}{name_of}"):
            parent.remove(extra)
    width = float(root.attrib.pop("width").removesuffix("pt")) * 4 / 3
    del root.attrib["height"]
    root.attrib |= {"role": "img", "aria-label": _plain(label), "style": f"max-width: {width:.0f}px"}
    for group in root.iter(f"{{{_SVG}}}g"):
        for mark, text in zip(_marks(group), told.get(group.get("id", ""), []), strict=False):
            ElementTree.SubElement(mark, f"{{{_SVG}}}title").text = _plain(text)
    for element in root.iter():
        element.attrib |= {key: _rewritten(key, value, name) for key, value in element.attrib.items()}
    return ElementTree.tostring(root, encoding="unicode")


def _points(figure: "Figure") -> Iterator[tuple[str, list[str]]]:
    """By the id that each artist is given here: the figures of its points."""
    ids = map("points-{}".format, count())
    for axes in figure.axes:
        across, up = axes.get_xlabel(), axes.get_ylabel()
        for line in axes.get_lines():
            label = str(line.get_label())
            if not label.startswith("_") and line.get_marker() not in ("None", None):
                points = np.column_stack([line.get_xdata(), line.get_ydata()]).tolist()
                line.set_gid(name := next(ids))
                yield name, [_told(label, across, x, up, y) for x, y in points]
        ticks = [tick.get_text() for tick in axes.get_yticklabels()]
        for bars in axes.containers:
            for bar, tick in zip(bars.patches, ticks, strict=False):  # type: ignore[attr-defined]  # of bars, which have patches
                bar.set_gid(name := next(ids))
                yield name, [f"{tick}: {bars.get_label()}\n{across}: {bar.get_width():.6g}"]


def _told(label: str, across: str, x: float, up: str, y: float) -> str:
    return "\n".join([label, f"{across}: {x:.6g}", *([f"{up}: {y:.6g}"] if up else [])])


def _plain(text: str) -> str:
    """A text that XML can hold, and that a browser's parser leaves as it is."""
    return _NO_XML.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def _marks(group: ElementTree.Element) -> list[ElementTree.Element]:
    """The markers of a line, or the shape of a bar."""
    return list(group.iter(f"{{{_SVG}}}use")) or group.findall(f"{{{_SVG}}}path")


def _rewritten(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key.endswith("href"):
        return value.replace("#", f"#{name}-", 1)
    if key in ("style", "clip-path"):
        value = value.replace("url(#", f"url(#{name}-")
        return re.sub("#[0-9a-f]{6}", lambda found: VARIABLES.get(found[0], found[0]), value)
    return value
