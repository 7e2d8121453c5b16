"""Runs as one HTML file that needs nothing else: no network, no fonts, light and dark as the reader's system has it."""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from sdbench import __version__
from sdbench.errors import SdbenchError
from sdbench.results import strict_json
from sdbench.suites.html.figures import Drawing, drawings
from sdbench.suites.html.replies import Question, replies
from sdbench.suites.html.svg import inline_svg
from sdbench.suites.html.tiles import Tile, tiles
from sdbench.suites.runs import Report, Row, SavedRun, Table

HERE = Path(__file__).parent

NAMES = {
    "kernels": ("layer", "pattern", "variant"),
    "tune": ("layer", "pattern", "variant"),
    "e2e": ("arm",),
    "decode": ("arm", "path", "context"),
    "prune": ("layer",),
}
"""Command -> the fields that say which row a reason is about."""


@dataclass(frozen=True)
class Plot:
    """A plot, drawn; or why there is none."""

    title: str
    caption: str
    svg: Markup | None
    reason: str


@dataclass(frozen=True)
class Missing:
    """Figures that are null for one reason."""

    field: str
    reason: str
    rows: Sequence[str]


@dataclass(frozen=True)
class Section:
    """A run on the page.

    Attributes:
        anchor: Its id.
        run: Its run directory.
        report: Its tables and lines.
        tables: All tables, the main one first; neighbours that differ in their figures alone in one group.
        tiles: Headline figures.
        plots: Its plots.
        missing: Why figures are null.
        questions: Some replies of its arms.
        facts: What was run where, by topic.
    """

    anchor: str
    run: SavedRun
    report: Report
    tables: Sequence[Sequence[Table]]
    tiles: Sequence[Tile]
    plots: Sequence[Plot]
    missing: Sequence[Missing]
    questions: Sequence[Question]
    facts: Mapping[str, Mapping[str, Any]]

    @property
    def asked(self) -> str:
        """What was run, in a few words."""
        arguments = self.run.record.arguments
        return str(arguments.get("model") or arguments.get("shapes"))

    @property
    def pattern(self) -> str:
        """Its patterns."""
        pattern = self.run.record.arguments.get("pattern") or "-"
        return pattern if isinstance(pattern, str) else ", ".join(pattern)


def page(runs: Sequence[tuple[SavedRun, Report]]) -> str:
    """The whole page.

    Args:
        runs: Run directories and their reports, headers included.

    Raises:
        SdbenchError: A run's rows cannot be drawn.
    """
    sections = [_section(f"run-{number}", run, report) for number, (run, report) in enumerate(runs, start=1)]
    script = (HERE / "sort.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, finalize=verbatim, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"value": _value, "when": _when}
    return environment.get_template("page.html.jinja").render(
        sections=sections,
        version=__version__,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
    )


def verbatim(value: Any) -> Any:
    """A text that a browser shows as it is: parsers turn CR into LF and drop NUL, and half of a surrogate pair has no bytes."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    text = re.sub("[\ud800-\udfff]", "\ufffd", value).replace("\0", "\u2400")
    return Markup(str(escape(text)).replace("\r", "&#13;")) if "\r" in text else text


def _section(anchor: str, run: SavedRun, report: Report) -> Section:
    try:
        plots = [_plot(f"{anchor}-{number}", one) for number, one in enumerate(drawings(run, report), start=1)]
        headline = tiles(run.record.command, report)
    except (KeyError, TypeError) as error:
        raise SdbenchError(f"{run.path}: rows that cannot be drawn ({type(error).__name__}: {error})") from error
    tables = [Table(report.title, report.columns, report.cells, report.lines), *report.more]
    return Section(
        anchor=anchor,
        run=run,
        report=report,
        # By what stands around the figures: a profile of every arm and context is a table each.
        tables=[list(alike) for _, alike in groupby(tables, key=lambda table: (tuple(table.columns), tuple(table.lines)))],
        tiles=headline,
        plots=plots,
        missing=_missing(report.records, NAMES[run.record.command]),
        questions=replies(run),
        facts=_facts(run),
    )


def _plot(name: str, drawing: Drawing) -> Plot:
    svg = Markup(inline_svg(drawing.figure, name, drawing.title)) if drawing.figure else None
    return Plot(drawing.title, drawing.caption, svg, drawing.reason)


def _missing(records: Sequence[Row], names: Sequence[str]) -> list[Missing]:
    """Every null figure whose row has its reason, those of one reason together."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
        name = " ".join(str(record[key]) for key in names if record.get(key) is not None)
        for field, reason in _reasons(record):
            found.setdefault((field, reason), {})[name] = None
    return [Missing(field, reason, list(rows)) for (field, reason), rows in found.items()]


def _reasons(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in record.items():
        name = key.removesuffix("_reason")
        if isinstance(value, Mapping):
            if key.endswith("_reason"):
                yield from ((f"{prefix}{name} of {part}", str(reason)) for part, reason in value.items())
            else:
                yield from _reasons(value, f"{prefix}{key} ")
        elif key in ("reason", "message") and value and record.get("outcome") != "correct":
            yield f"{prefix}{record.get('outcome') or 'result'}".replace("_", " "), str(value)
        elif key.endswith("_reason") and value and record.get(name) is None:
            yield f"{prefix}{name}".replace("_", " "), str(value)


def _facts(run: SavedRun) -> dict[str, dict[str, Any]]:
    record, environment, git = run.record, dict(run.now("environment")), run.now("git")
    machine = {name: environment.get(name) for name in ("gpu", "gpu_count", "cpu", "platform", "cuda")}
    return {
        f"sdbench {record.command}": record.arguments,
        "Machine": dict(_flat(machine)),
        "Versions": run.now("versions"),
        "Source": git or {"git": "no commit recorded"},
        "Run": {"folder": str(run.path), "created": record.created, "rows": len(run.rows), "samples": len(run.samples)},
    }


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, one in value.items():
        if isinstance(one, Mapping):
            yield from _flat(one, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}".replace("_", " "), one


def _value(value: Any) -> str:
    """A setting as a text: what is no text already in JSON's own form."""
    return value if isinstance(value, str) else ", ".join(map(_value, value)) or "none" if isinstance(value, list) else strict_json(value)


def _when(moment: str) -> str:
    """A moment as ``run.json`` has it, in a form for readers."""
    return moment.replace("T", " ").replace("+00:00", " UTC")
