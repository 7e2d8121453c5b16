"""Tables for terminals and Markdown. A figure is never cut: a table that is too wide becomes several, each with the key columns."""

import html
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 3
"""Characters a column adds to its width: a space of padding on each side and, between two columns, rich's divider."""

PIPE_WIDTH = 100_000
"""Width of standard output that is no terminal, where $COLUMNS asks for none: a file has no edge, so there a table is never divided."""


@dataclass(frozen=True)
class Column:
    """A column of formatted cells.

    Attributes:
        name: Heading; may wrap at spaces.
        figure: Right-aligned and never wrapped; other columns may wrap.
        key: Repeated in every piece of a divided table.
    """

    name: str
    figure: bool = False
    key: bool = False


def render_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str | None = None, console: Console | None = None
) -> None:
    """Prints a table that fits the console, divided into stacked tables where its columns do not fit side by side.

    Args:
        columns: Headings and kinds.
        rows: Formatted cells, one a column; printed verbatim, never read as markup or emoji codes.
        title: A line above the table.
        console: Where to print; None for standard output, as wide as its terminal or, without one, as $COLUMNS or else the table.

    Raises:
        ValueError: A row has more or fewer cells than there are columns.
    """
    _require_cells(columns, rows)
    console = console or Console(file=sys.stdout, width=None if sys.stdout.isatty() else _pipe_width())
    if title:
        console.print(Text(title, style="bold"), soft_wrap=True)
    widths = [_width(column, [row[index] for row in rows], console.width) for index, column in enumerate(columns)]
    for number, piece in enumerate(_pieces(columns, widths, console.width)):
        # A width of its own: by the console's, a single column of figures wider than the terminal would be folded.
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, width=_total(widths, piece))
        for index in piece:
            column = columns[index]
            table.add_column(
                Text(column.name), width=widths[index], justify="right" if column.figure else "left", vertical="bottom", overflow="fold"
            )
        for row in rows:
            table.add_row(*(Text(row[index]) for index in piece))
        if number:
            console.print()
        console.print(table, crop=False)


def share(value: float) -> str:
    """A share in percent; one that is not all and not nothing never reads 100.0% or 0.0%."""
    return f"{value if value in (0, 1) else min(max(value, 0.001), 0.999):.1%}"


def spread(times: Mapping[str, float] | None, form: str = ".1f", to: str = "-") -> str:
    """The 20th to 80th percentile of several samples; a dash without any, and for a single one, which is both.

    Args:
        times: ``{"p20", "p50", "p80"}`` in any one unit.
        form: Format of a figure.
        to: What stands between them.
    """
    return f"{times['p20']:{form}}{to}{times['p80']:{form}}" if times and times["p20"] != times["p80"] else "-"


def to_markdown(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """The table as GitHub Markdown, cells escaped so that none of them ends a cell, a line or a tag.

    Raises:
        ValueError: A row has more or fewer cells than there are columns.
    """
    _require_cells(columns, rows)
    lines = [[_escape(column.name) for column in columns], ["---:" if column.figure else "---" for column in columns]]
    lines += [[_escape(cell) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _pipe_width() -> int:
    """$COLUMNS, unless it is no positive whole number: as :func:`shutil.get_terminal_size` reads it."""
    try:
        return max(int(os.environ["COLUMNS"]), 0) or PIPE_WIDTH
    except (KeyError, ValueError):
        return PIPE_WIDTH


def _require_cells(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} cells in a table of {len(columns)} columns: {row!r}")


def _width(column: Column, cells: Sequence[str], console_width: int) -> int:
    words = max((cell_len(word) for word in column.name.split()), default=1)
    widest = max((cell_len(line) for cell in cells for line in cell.split("\n")), default=0)
    if column.figure:
        return max(words, widest)
    # A long text wraps at a third of the line, or at half of it rather than inside a word: room is for figures.
    longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
    room = max(console_width // 3, min(longest, console_width // 2))
    return max(words, min(max(widest, cell_len(column.name)), room))


def _pieces(columns: Sequence[Column], widths: Sequence[int], console_width: int) -> list[list[int]]:
    """Column indices of each stacked table: the keys, then as many others as fit, and at least one."""
    if _total(widths, range(len(columns))) <= console_width:
        return [list(range(len(columns)))]
    keys = [index for index, column in enumerate(columns) if column.key]
    others = [index for index, column in enumerate(columns) if not column.key]
    pieces = [list(keys)]
    for index in others:
        if len(pieces[-1]) > len(keys) and _total(widths, [*pieces[-1], index]) > console_width:
            pieces.append(list(keys))
        pieces[-1].append(index)
    return pieces


def _total(widths: Sequence[int], piece: Sequence[int]) -> int:
    return sum(widths[index] for index in piece) + GAP * len(piece) - 1


def _escape(cell: str) -> str:
    text = html.escape(cell, quote=False).replace("\\", "\\\\").replace("|", "\\|")
    return "<br>".join(text.splitlines()) if text else " "
