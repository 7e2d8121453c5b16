"""The kernel suite's table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sdbench.tables import Column, to_markdown

QUANTIZED = ("int8", "fp8")
"""Weight-only baselines. They stand beside the headline and not in it: it compares weights that keep their dtype."""

_OVER = {"linear": "F.linear", "dense": "dense"} | {name: name for name in QUANTIZED}
"""Headings of the speed-ups, by their names in a row."""

KEYS = (Column("layer", key=True), Column("shape", key=True), Column("pattern", key=True), Column("variant", key=True), Column("outcome"))
REDUCED = (Column("checked as"),)
TIMES = (
    Column("us", figure=True),
    Column("p20-p80", figure=True),
    Column("GB/s", figure=True),
    Column("% read roofline", figure=True),
    *(Column(f"x {heading}", figure=True) for heading in _OVER.values()),
)
ERROR = (Column("error", figure=True),)


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[Column], list[list[str]]]:
    """Columns and formatted cells, one row a (shape, pattern, variant), the baselines of a shape first.

    Without a single timing the columns of figures give way to the reduced shape that was checked.

    Args:
        rows: Result rows of the suite.
    """
    columns = [*KEYS, *(TIMES if any(row["us"] for row in rows) else REDUCED), *ERROR]
    order = {tuple(row["of_shape"]): number for number, row in reversed(list(enumerate(rows)))}
    ordered = sorted(rows, key=lambda row: (order[tuple(row["of_shape"])], row["pattern"] or "", row["kernel"], row["variant"]))
    cells = [_cells(row) for row in ordered]
    return columns, [[row[column.name] for column in columns] for row in cells]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table, its sums and its notes, for a job summary or a pull request."""
    return to_markdown(*table(rows)) + "".join(f"\n- {line}" for line in (*headline(rows), *notes(rows))) + "\n"


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the table does not show: why a variant was left out, and configs that failed though another one was right."""
    lines: dict[str, None] = {}
    for row in rows:
        if row["outcome"] == "constraint":
            lines[f"{row['variant']} at {row['pattern']} {row['message']}"] = None
            continue
        bad = [f"{count} {outcome}" for outcome, count in row["outcomes"].items() if outcome != "correct"]
        if bad:
            lines[f"{_named(row)}: of {row['configs']} configs {', '.join(bad)}"] = None
    return list(lines)


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Variants without a single correct config though they take the problem, one line each."""
    failed = [row for row in rows if row["outcome"] not in ("correct", "constraint")]
    return [f"{_named(row)}: {row['outcome']} ({row['message']})" for row in failed]


@dataclass(frozen=True)
class Sums:
    """Microseconds over all shapes, the best variant of each kind.

    Attributes:
        pattern: N:M of the sparse sum.
        sparse: The fastest correct SpMV variants, y finished.
        partial: The fastest that leave their partial sums to a consumer; None where a shape has none.
        linear: ``F.linear``.
        dense: The fastest dense kernels.
        quantized: Weight-only kernels by name; one with an untimed shape has no sum.
    """

    pattern: str
    sparse: float
    partial: float | None
    linear: float
    dense: float
    quantized: dict[str, float]


def sums(rows: Sequence[dict[str, Any]]) -> list[Sums]:
    """One sum a pattern; a pattern with an untimed shape has none."""
    shapes = {tuple(row["of_shape"]) for row in rows}
    timed = [row for row in rows if row["us"] and row["outcome"] == "correct"]
    linear = _sum_of_best([row for row in timed if row["variant"] == "linear"], shapes)
    dense = _sum_of_best([row for row in timed if row["kernel"] == "dense"], shapes)
    quantized = {}
    for name in QUANTIZED:
        total = _sum_of_best([row for row in timed if (row["kernel"], row["variant"]) == ("quantized", name)], shapes)
        if total:
            quantized[name] = total
    found = []
    for pattern in dict.fromkeys(row["pattern"] for row in rows if row["pattern"]):
        sparse = _sum_of_best([row for row in timed if (row["kernel"], row["pattern"]) == ("spmv", pattern)], shapes)
        partial = _sum_of_best([row for row in timed if (row["kernel"], row["pattern"]) == ("spmv_partial", pattern)], shapes)
        if sparse and linear and dense:
            found.append(Sums(pattern, sparse, partial, linear, dense, quantized))
    return found


def headline(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each pattern the sum over the shapes against both dense baselines, and the sums of int8 and fp8; empty without timings."""
    lines = []
    for s in sums(rows):
        quantized = "".join(f", {name} sum {total:.1f} us" for name, total in s.quantized.items())
        lines.append(f"{s.pattern}: sum {_against(s.sparse, s)}{quantized}")
        if s.partial:
            lines.append(f"{s.pattern} with partial sums left to a consumer that adds them: sum {_against(s.partial, s)}")
    return lines


def _against(total: float, s: Sums) -> str:
    return f"{total:.1f} us, {s.linear / total:.2f}x over F.linear, {s.dense / total:.2f}x over the fastest dense"


def slowest_speedup(rows: Sequence[dict[str, Any]]) -> float | None:
    """The smallest speed-up of a pattern's sum over the fastest dense; None without timings."""
    return min((s.dense / s.sparse for s in sums(rows)), default=None)


def _named(row: dict[str, Any]) -> str:
    name = row["variant"] + (" (sums)" if row["kernel"] == "spmv_partial" else "")
    return f"{name} on {row['layer']}" + (f" at {row['pattern']}" if row["pattern"] else "")


def _sum_of_best(rows: Sequence[dict[str, Any]], shapes: set[tuple[int, ...]]) -> float | None:
    best = [min((row["us"]["p50"] for row in rows if tuple(row["of_shape"]) == shape), default=None) for shape in shapes]
    times = [time for time in best if time is not None]
    return sum(times) if len(times) == len(shapes) else None


def _cells(row: dict[str, Any]) -> dict[str, str]:
    us, speedup = row["us"], row["speedup"]
    return {
        "layer": row["layer"],
        "shape": "x".join(map(str, row["of_shape"])),
        "pattern": row["pattern"] or "dense",
        "variant": row["variant"] + (", sums" if row["kernel"] == "spmv_partial" else "") + (" *" if row["best"] else ""),
        "outcome": row["outcome"],
        "checked as": "x".join(map(str, row["shape"])),
        "us": f"{us['p50']:.2f}" if us else "-",
        "p20-p80": f"{us['p20']:.2f}-{us['p80']:.2f}" if us else "-",
        "GB/s": f"{row['gbps']:.0f}" if row["gbps"] else "-",
        "% read roofline": f"{row['roofline'] * 100:.0f}" if row["roofline"] else "-",
        **{f"x {heading}": f"{speedup[name]:.2f}" if speedup.get(name) else "-" for name, heading in _OVER.items()},
        "error": f"{row['error']:.1e}" if row["error"] is not None else "-",
    }
