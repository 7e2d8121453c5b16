"""The kernel suite's table and sums, over rows with figures as a GPU would give them."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from sdbench.suites.kernels.report import headline, judge, report, slowest_speedup, sums, table
from sdbench.tables import render_table

TIMES = {
    ("dense", "gemv"): 8.0,
    ("dense", "linear"): 12.0,
    ("quantized", "fp8"): 6.0,
    ("quantized", "int8"): 5.0,
    ("spmv", "lane_row"): 4.0,
    ("spmv", "portable"): 40.0,
    ("semi_structured", "cusparselt"): 2.0,
}


def row(kernel: str, variant: str, p50: float | None, layer: str = "qkv", shape: tuple[int, int] = (6144, 2560)) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "variant": variant,
        "pattern": "2:4" if kernel in ("spmv", "semi_structured") else None,
        "layer": layer,
        "shape": list(shape),
        "of_shape": list(shape),
        "outcome": "correct" if p50 else "constraint",
        "us": {"p20": p50 - 0.25, "p50": p50, "p80": p50 + 0.25} if p50 else None,
        "gbps": 4123.4 if p50 else None,
        "roofline": 0.876 if p50 else None,
        "error": 1e-7 if p50 else None,
    }


def run(*missing: str) -> list[dict[str, Any]]:
    rows = [row(*name, time) for name, time in TIMES.items()]
    rows += [row(*name, None if name[1] in missing else 2 * time, "o", (2560, 4096)) for name, time in TIMES.items()]
    return judge(rows)


def find(rows: list[dict[str, Any]], variant: str, layer: str) -> dict[str, Any]:
    return next(found for found in rows if (found["variant"], found["layer"]) == (variant, layer))


def test_speedups_are_over_the_same_shape_of_the_same_run() -> None:
    rows = run()
    for layer in ("qkv", "o"):
        assert find(rows, "lane_row", layer)["speedup"] == {"linear": 3.0, "dense": 2.0, "int8": 1.25, "fp8": 1.5}
        # int8 is faster than every dense kernel and is none: "dense" stays bf16.
        assert find(rows, "int8", layer)["speedup"] == {"linear": 2.4, "dense": 1.6, "int8": 1.0, "fp8": 1.2}


def test_a_missing_baseline_is_null_where_it_is_missing() -> None:
    rows = run("int8")
    assert find(rows, "lane_row", "qkv")["speedup"]["int8"] == 1.25
    assert find(rows, "lane_row", "o")["speedup"] == {"linear": 3.0, "dense": 2.0, "int8": None, "fp8": 1.5}
    assert set(find(rows, "int8", "o")["speedup"].values()) == {None}


def test_each_kernel_has_its_fastest() -> None:
    assert {found["variant"] for found in run() if found["best"]} == {"gemv", "int8", "lane_row", "cusparselt"}


def test_the_headline_is_spmv_against_dense() -> None:
    """cuSPARSELt has the same pattern and int8 is faster than dense, and neither takes part."""
    (found,) = sums(run())
    assert (found.sparse, found.linear, found.dense, found.quantized) == (12.0, 36.0, 24.0, {"int8": 15.0, "fp8": 18.0})
    assert headline(run()) == [
        "2:4: sum of 2 shapes 12.0 us, 3.00x over F.linear, 2.00x over the fastest dense, int8 sum 15.0 us, fp8 sum 18.0 us",
    ]
    assert slowest_speedup(run()) == 2.0


def test_a_baseline_with_an_untimed_shape_has_no_sum() -> None:
    assert headline(run("int8", "cusparselt")) == [
        "2:4: sum of 2 shapes 12.0 us, 3.00x over F.linear, 2.00x over the fastest dense, fp8 sum 18.0 us",
    ]


def test_baselines_stand_first_and_have_columns() -> None:
    columns, cells = table(run("int8"))
    names = [column.name for column in columns]
    assert names[-5:] == ["x F.linear", "x dense", "x int8", "x fp8", "error"]
    variants = [line[names.index("variant")].removesuffix(" *") for line in cells]
    assert variants == ["gemv", "linear", "fp8", "int8", "cusparselt", "lane_row", "portable"] * 2
    assert [line[names.index("x int8")] for line in cells[5::7]] == ["1.25", "-"]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_figure_is_cut(width: int) -> None:
    """CASES 23, with the columns of int8 and fp8."""
    out = io.StringIO()
    columns, cells = table(run())
    render_table(columns, cells, console=Console(file=out, width=width))
    lines = Text.from_ansi(out.getvalue()).plain.splitlines()
    assert max(map(len, lines)) <= width
    for line in cells:
        printed = [set(text.split()) for text in lines if {line[1], *line[3].split()} <= set(text.split())]
        assert set(" ".join(line).split()) <= set().union(*printed)


ALONE = "int8, fp8 and cuSPARSELt are timed at one token alone"


def several(tokens: int, dense: float, sparse: float) -> list[dict[str, Any]]:
    rows = [row("dense", "linear", 2 * dense), row("dense", "gemm", dense), row("spmv", "walk", sparse)]
    rows[2]["kernel"] = "spmm"
    return [one | {"tokens": tokens} for one in rows]


def test_a_batch_is_compared_with_its_own_baselines_and_the_crossover_is_told() -> None:
    rows = judge([*run(), *several(4, 10.0, 8.0), *several(8, 10.0, 12.5)])
    # Of the rows with several tokens only qkv was measured: each batch counts its own shapes.
    assert [(s.tokens, s.shapes, s.dense, s.sparse) for s in sums(rows)] == [(1, 2, 24.0, 12.0), (4, 1, 10.0, 8.0), (8, 1, 10.0, 12.5)]
    assert slowest_speedup(rows) == 2.0
    assert rows[-1]["speedup"]["dense"] == 0.8 and rows[-1]["best"]
    lines = headline(rows)
    assert "2:4, 4 tokens: sum of 1 shape 8.0 us, 2.50x over F.linear, 1.25x over the fastest dense" in lines
    assert lines[-1] == "2:4 stops paying at batch 8: 2.00x at 1, 1.25x at 4, 0.80x at 8, over the fastest dense; " + ALONE
    still = headline(judge([*run(), *several(4, 10.0, 8.0)]))[-1]
    assert still.startswith("2:4 pays up to batch 4, the largest that was timed: 2.00x at 1, 1.25x at 4")
    assert "tokens" in [column.name for column in table(rows)[0]] and "tokens" not in [column.name for column in table(run())[0]]


def test_a_variant_that_rounds_its_output_is_named_under_the_table() -> None:
    def lines(*rows: dict[str, Any]) -> str:
        return "\n".join(report({"device": "cpu"}, {}, judge(list(rows)), []).lines)

    noted = {"outcomes": {"correct": 1}, "configs": 1, "message": "needs a GPU"}
    linear, ours = row("dense", "linear", 4.0) | noted, row("spmv", "lane_row", 4.0) | noted
    library = row("semi_structured", "cusparselt", 4.0) | noted
    told = "rounds y to bf16, which is most of its error; y of others is float32"
    assert f"linear {told}" in lines(linear | {"dtype": "bf16"}, ours | {"dtype": "bf16"})
    both = lines(linear | {"dtype": "fp16"}, library | {"dtype": "fp16"})
    assert "linear and cusparselt round y to fp16, which is most of their error" in both
    refused = row("semi_structured", "cusparselt", None) | noted
    for rows in ((linear | {"dtype": "fp32"},), (ours | {"dtype": "bf16"},), (refused | {"dtype": "bf16"},)):
        assert "y of others is float32" not in lines(*rows)
