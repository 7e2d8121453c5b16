"""``sdbench compare`` as a user calls it."""

import io
import json
import sys
from typing import Any

import pytest
from rich.text import Text

from .test_report_cli import row as result

ASKED = {"pattern": ["2:4"], "shapes": "o", "dtype": "bf16", "device": "cuda"}


def row(variant: str, p50: float | None, outcome: str = "correct") -> dict[str, Any]:
    changes = {"message": "[b]told :smile:", "error": 1.0} if outcome != "correct" else {}
    return result("spmv", variant, "o", p50, outcome=outcome, **changes)


@pytest.fixture
def runs(saved_run) -> None:
    saved_run("base", "kernels", ASKED, [row("a", 10.0), row("b", 10.0), row("c", 10.0), row("d", None)])
    saved_run("new", "kernels", ASKED, [row("a", 10.25), row("b", 12.5), row("c", None, "incorrect"), row("d", 0.0)])


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_regression_ends_with_4(sdbench, runs):
    done = sdbench("compare", "base", "new")
    assert done.code == 4
    assert done.err == ("sdbench: error: 2 regressions: spmv c 2:4 o 16x32 bf16 (outcome) broken; spmv b 2:4 o 16x32 bf16 (us) slower\n")
    title, *_, last = done.out.splitlines()
    assert (title, last) == ("new against base (x BASE above 1 is faster)", "1 broken, 1 slower, 1 no ratio, 1 same")
    rows = [" ".join(line.split()) for line in done.out.splitlines() if " spmv " in line]
    assert rows == [
        "broken spmv c 2:4 o 16x32 bf16 outcome correct - incorrect - - [b]told :smile:",
        "slower spmv b 2:4 o 16x32 bf16 us 10.00 9.75-10.25 12.50 12.25-12.75 0.800",
        "no ratio spmv d 2:4 o 16x32 bf16 us - - - - - no figure in BASE",
        "same spmv a 2:4 o 16x32 bf16 us 10.00 9.75-10.25 10.25 10.00-10.50 0.976 slower within noise: the spreads overlap",
    ]


def test_none_ends_with_0(sdbench, runs, saved_run):
    assert sdbench("compare", "base", "base").code == 0
    saved_run("near", "kernels", ASKED, [row("a", 10.5)])
    assert [sdbench("compare", "base", "near", "--fail-over", share).code for share in ("5%", "4.9%", "0%")] == [0, 0, 0]  # spreads touch
    saved_run("far", "kernels", ASKED, [row("a", 11.0)])
    assert [sdbench("compare", "base", "far", "--fail-over", share).code for share in ("5%", "9.9%", "10%", "250%")] == [4, 4, 0, 0]


def test_json_is_one_strict_document_and_nothing_else(sdbench, runs):
    """CASES 20: a time of 0 and a missing one are a null ratio."""
    done = sdbench("compare", "base", "new", "--json")
    assert done.code == 4
    whole = strict(done.out)
    assert whole["schema"] == "sdbench.compare/1" and whole["command"] == "kernels"
    assert (whole["fail_over"], whole["regressions"], whole["warnings"]) == (0.05, 2, [])
    assert (whole["base"], whole["new"]) == ({"path": "base", "outcome": "complete"}, {"path": "new", "outcome": "complete"})
    assert [(one["verdict"], one["key"]["variant"], one["ratio"]) for one in whole["rows"]] == [
        ("broken", "c", None), ("slower", "b", 0.8), ("no ratio", "d", None), ("same", "a", 10 / 10.25),
    ]  # fmt: skip
    assert whole["rows"][1]["new_spread"] == [12.25, 12.75]


def test_many_regressions_are_named_in_part(sdbench, saved_run):
    saved_run("base", "kernels", ASKED, [row(name, 10.0) for name in "abcde"])
    saved_run("new", "kernels", ASKED, [row(name, 20.0) for name in "abcde"])
    assert sdbench("compare", "base", "new").err.endswith("spmv c 2:4 o 16x32 bf16 (us) slower; 2 more\n")


def test_warnings_stand_above_the_table(sdbench, saved_run):
    saved_run("base", "kernels", ASKED, [row("a", 10.0)])
    saved_run("new", "kernels", ASKED, [row("a", 10.0)], environment={"gpu": {"name": "A100"}})
    done = sdbench("compare", "base", "new")
    assert done.code == 0
    assert done.out.splitlines()[0] == "warning: BASE ran on NVIDIA H200 and NEW on A100: times say more about these than about the code"


@pytest.mark.parametrize("share", ["5", "0.05", "-5%", "%", "nan%", "inf%", "five%"])
def test_a_share_is_written_with_its_sign(share, sdbench, runs):
    sdbench("compare", "base", "new", "--fail-over", share).refuses(
        2, "'--fail-over'", f"{share!r} is no share of the time; write it as 5%"
    )


def test_bad_input(sdbench, runs, saved_run):
    sdbench("compare", "base").refuses(2, "NEW")
    sdbench("compare", "base", "nowhere").refuses(2, "nowhere is no run directory")
    saved_run("tuned", "tune", ASKED, [row("a", 10.0)])
    sdbench("compare", "base", "tuned").refuses(2, "compare like with like")
    saved_run("empty", "kernels", ASKED, outcome="failed")
    sdbench("compare", "base", "empty").refuses(5, "base and empty have no row in common: nothing to compare")


def test_no_figure_is_cut_on_80_columns(sdbench, runs, monkeypatch):
    """CASES 23."""
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    wide = sdbench("compare", "base", "new").out.splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", out)
    assert sdbench("compare", "base", "new").code == 4
    lines = [line for line in Text.from_ansi(out.getvalue()).plain.splitlines() if line.startswith(" ")]
    assert max(map(len, lines)) <= 80
    words = {word for line in lines for word in line.split()}
    assert {word for line in wide if line.startswith(" ") for word in line.split()} <= words
