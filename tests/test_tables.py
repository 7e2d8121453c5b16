"""Tables: CASES row 23, no column of figures is cut at any width."""

import io
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from sdbench.tables import Column, render_table, share, spread, to_markdown

UNHURRIED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A shared machine is slow at times; these tests are about values."""

COLUMNS = [
    Column("arm", key=True),
    Column("answer match", figure=True),
    Column("EOS", figure=True),
    Column("truncated", figure=True),
    Column("tokens/s at 128 tokens", figure=True),
    Column("speed-up", figure=True),
    Column("reason"),
    Column("kernel calls", figure=True),
    Column("peak memory", figure=True),
]
ROWS = [
    ["dense", "195/200", "200/200", "0/200", "1234567.89", "1.00", "", "0", "8,040,123,456"],
    [
        "teacher-forced",
        "12/200",
        "99/200",
        "101/200",
        "12.34",
        "-",
        "lengths differ: 128 tokens against the baseline's 64",
        "1016064",
        "4,870,000,000",
    ],
]


def rendered(columns: list[Column], rows: list[list[str]], width: int, terminal: bool = False, title: str | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    render_table(columns, rows, title, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO, as above


def tokens(lines: list[str]) -> set[str]:
    return {token for line in lines for token in line.split()}


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_cases_23_every_figure_is_whole(width: int, terminal: bool) -> None:
    lines = rendered(COLUMNS, ROWS, width, terminal)
    figures = {row[index] for row in ROWS for index, column in enumerate(COLUMNS) if column.figure}
    assert figures <= tokens(lines)
    assert {word for column in COLUMNS for word in column.name.split()} <= tokens(lines)
    assert max(cell_len(line) for line in lines) <= width
    assert "…" not in "".join(lines)
    assert "teacher-forced" in tokens(lines)


def test_a_table_that_fits_is_one_table() -> None:
    lines = rendered(COLUMNS, ROWS, 200)
    assert sum("dense" in line for line in lines) == 1


def test_a_divided_table_repeats_its_key() -> None:
    lines = rendered(COLUMNS, ROWS, 80)
    pieces = sum("dense" in line for line in lines)
    assert pieces >= 2
    assert sum("teacher-forced" in line for line in lines) == pieces


def test_figures_are_right_aligned() -> None:
    lines = rendered([Column("arm", key=True), Column("rate", figure=True)], [["a", "1.5"], ["b", "12345.5"]], 80)
    assert lines[-2:] == [" a         1.5 ", " b     12345.5 "]


def test_long_texts_wrap_and_lose_nothing() -> None:
    text = "word " * 30 + "x" * 100
    lines = rendered([Column("arm", key=True), Column("text"), Column("n", figure=True)], [["a", text, "7"]], 60)
    assert max(map(len, lines)) <= 60
    assert "".join(lines).count("word") == 30
    assert "".join(lines).count("x") == 101  # one in the heading


def test_model_text_is_verbatim() -> None:
    text = "[bold]8[/bold] :smile: [link=x]"
    assert text in "\n".join(rendered([Column("[b]text")], [[text]], 200, terminal=True, title="[i]title :smile:"))
    plain = rendered([Column("[b]text")], [[text]], 200, title="[i]title :smile:")
    assert [line.strip() for line in plain[:2]] == ["[i]title :smile:", "[b]text"]


def test_a_figure_wider_than_the_terminal_is_still_whole() -> None:
    figure = "9" * 50
    lines = rendered([Column("arm", key=True), Column("n", figure=True), Column("m", figure=True)], [["dense", figure, "5"]], 40)
    assert figure in tokens(lines)


@UNHURRIED
@given(width=st.integers(30, 200), figures=st.lists(st.integers(0, 10**12), min_size=8, max_size=8))
def test_cases_23_any_figures_at_any_width(width: int, figures: list[int]) -> None:
    columns = [Column("n", key=True)] + [Column(f"c{index}", figure=True) for index in range(8)]
    lines = rendered(columns, [["a", *(f"{figure:,}" for figure in figures)]], width)
    assert {f"{figure:,}" for figure in figures} <= tokens(lines)
    assert max(map(len, lines)) <= width


PIPED = """
from sdbench.tables import Column, render_table
render_table([Column("arm", key=True)] + [Column(f"c{n}", figure=True) for n in range(30)], [["dense"] + ["123456.78"] * 30], title="t")
"""


def piped(columns: str | None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {} if columns is None else {"COLUMNS": columns}
    return subprocess.run([sys.executable, "-c", PIPED], capture_output=True, text=True, check=True, env=environment).stdout.splitlines()


def test_cases_23_piped_output_is_one_whole_table() -> None:
    assert piped(None)[-1].split() == ["dense"] + ["123456.78"] * 30


@pytest.mark.parametrize("columns", ["80", "200"])
def test_piped_output_is_as_wide_as_asked_for(columns: str) -> None:
    lines = piped(columns)
    assert int(columns) - 12 < max(map(len, lines)) <= int(columns)
    assert sum(line.split().count("123456.78") for line in lines) == 30


@pytest.mark.parametrize("columns", ["0", "-5", "wide", "80.5", ""])
def test_a_width_that_is_none_is_passed_over(columns: str) -> None:
    assert piped(columns) == piped(None)


def test_a_table_without_rows_has_its_heading() -> None:
    assert rendered([Column("arm"), Column("n", figure=True)], [], 80)[0].split() == ["arm", "n"]


def test_a_ragged_row_is_an_error() -> None:
    for table in (lambda: rendered([Column("a"), Column("b")], [["1"]], 80), lambda: to_markdown([Column("a")], [["1", "2"]])):
        with pytest.raises(ValueError, match="columns"):
            table()


def test_markdown() -> None:
    rows = [["a|b\\|", "1.5"], ["two\nlines <think>", ""]]
    assert to_markdown([Column("arm"), Column("rate", figure=True)], rows) == (
        "| arm | rate |\n| --- | ---: |\n| a\\|b\\\\\\| | 1.5 |\n| two<br>lines &lt;think&gt; |   |\n"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "100.0%"), (0.99999, "99.9%"), (0.5, "50.0%"), (0.0001, "0.1%"), (0.0, "0.0%"), (0.9994, "99.9%")]
)
def test_a_share_of_nearly_all_is_not_all(value: float, text: str) -> None:
    assert share(value) == text


def test_one_sample_has_no_spread() -> None:
    several = {"p20": 0.99, "p50": 1.0, "p80": 1.04}
    assert (spread(several, ".2f"), spread(several, ".2f", " to ")) == ("0.99-1.04", "0.99 to 1.04")
    # Two samples that are printed alike are two.
    assert spread(several) == "1.0-1.0"
    assert spread(dict.fromkeys(several, 1.0)) == spread(None) == "-"
