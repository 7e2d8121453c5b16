"""The kernel suite's results as a table, sums and notes: a run's, and a tuner's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdbench.results import with_status
from sdbench.suites.metrics import crossover
from sdbench.suites.runs import Report, Row, SavedRun, measured
from sdbench.tables import Column
from sdbench.words import counted

SCHEMA, TUNE_SCHEMA = "sdbench.kernels/1", "sdbench.tune/1"

NO_GPU = "no CUDA device: every variant is checked in Triton's interpreter, large shapes reduced; there are no timings"

QUANTIZED = ("int8", "fp8")
"""Weight-only baselines. They stand beside the headline and not in it: it compares weights that keep their dtype."""

_OVER = {"linear": "F.linear", "dense": "dense"} | {name: name for name in QUANTIZED}
"""Headings of the speed-ups, by their names in a row."""

BATCH = (Column("tokens", key=True),)
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

WHAT_ERROR = "error: relative Frobenius error of y against the float64 product with the matrix as the variant holds it, pruned or rounded"
ROUNDED = ("linear", "cusparselt")
"""Variants of libraries, whose y has the dtype of the weights."""

WHAT_TIMES = (
    "*: the fastest correct variant of its kernel, shape and pattern; us: median of a call, cold L2, and its 20th to 80th percentile",
    "% read roofline: GB/s over the read bandwidth that this run measured at as many bytes; x: times as fast as that baseline of this run",
)


TUNE_COLUMNS = (
    *KEYS[:-1],
    Column("us", figure=True),
    Column("p20-p80", figure=True),
    Column("from"),
    Column("best config"),
    Column("configs by outcome"),
)


def of_run(run: SavedRun) -> Report:
    """The report of a run directory of ``sdbench kernels``."""
    chains = [measured(row) for row in run.latest("chain", "variant", "pattern", "layers")]
    return report(run.record.arguments, run.now("environment"), judge(_results(run)), chains)


def of_tune_run(run: SavedRun) -> Report:
    """The report of a run directory of ``sdbench tune``."""
    return tune_report(run.now("environment"), _results(run))


def report(arguments: Mapping[str, Any], environment: Mapping[str, Any], rows: Sequence[Row], chains: Sequence[Row]) -> Report:
    """What ``sdbench kernels`` shows.

    Args:
        arguments: The run's, as ``run.json`` has them.
        environment: The machine.
        rows: Result rows, judged.
        chains: Rows of the chains.
    """
    columns, cells = table(rows)
    timed = any(row["us"] for row in rows)
    lines = [*headline(rows), *chain_lines(chains), *notes(rows), *(WHAT_TIMES if timed else ()), *_error_lines(rows)]
    if arguments["device"] == "cpu":
        lines.append(NO_GPU)
    document = {"schema": SCHEMA, "environment": environment, "rows": _plain(rows), "chains": _plain(chains)}
    what = "Packed products" if any(_tokens(row) > 1 for row in rows) else "SpMV at batch 1"
    return Report(f"{what} (* fastest correct variant of its kind)", columns, cells, lines, document, [*rows, *chains])


def tune_report(environment: Mapping[str, Any], rows: Sequence[Row]) -> Report:
    """What ``sdbench tune`` shows; problems that a variant does not take are left out.

    Args:
        environment: The machine.
        rows: Result rows.
    """
    several = any(_tokens(row) > 1 for row in rows)
    columns = (*TUNE_COLUMNS[:2], *(BATCH if several else ()), *TUNE_COLUMNS[2:])
    cells = [_tune_cells(row, several) for row in rows if row["outcome"] != "constraint"]
    compiling = f"{sum(row['compile_seconds'] for row in rows):.1f} s of compiling, in no figure above"
    document = {"schema": TUNE_SCHEMA, "environment": environment, "rows": _plain(rows)}
    return Report(f"Fastest right configs on {environment['gpu']['name']}", columns, cells, [compiling], document, rows)


def judge(rows: Sequence[Row]) -> list[Row]:
    """Adds the speed-ups over the baselines of the same run, and marks the fastest correct variant of each group.

    Args:
        rows: Result rows as a run directory holds them.
    """
    return [row | {"speedup": _speedup(row, rows), "best": _is_best(row, rows)} for row in rows]


def table(rows: Sequence[Row]) -> tuple[list[Column], list[list[str]]]:
    """Columns and formatted cells, one row a (shape, pattern, variant), the baselines of a shape first.

    Without a single timing the columns of figures give way to the shape that was checked, reduced where it is large.

    Args:
        rows: Result rows of the suite.
    """
    several = any(row.get("tokens", 1) > 1 for row in rows)
    columns = [*KEYS[:2], *(BATCH if several else ()), *KEYS[2:], *(TIMES if any(row["us"] for row in rows) else REDUCED), *ERROR]
    order = {tuple(row["of_shape"]): number for number, row in reversed(list(enumerate(rows)))}
    ordered = sorted(
        rows, key=lambda row: (order[tuple(row["of_shape"])], _tokens(row), row["pattern"] or "", row["kernel"], row["variant"])
    )
    cells = [_cells(row) for row in ordered]
    return columns, [[row[column.name] for column in columns] for row in cells]


def notes(rows: Sequence[Row]) -> list[str]:
    """What the table does not show: why a variant was left out, and configs that failed though another one was right."""
    lines: dict[str, None] = {}
    for row in rows:
        if row["outcome"] == "constraint":
            lines[f"{row['variant']} at {row['pattern']} {row['message']}"] = None
            continue
        bad = [f"{count} {outcome}" for outcome, count in row["outcomes"].items() if outcome != "correct"]
        if bad:
            lines[f"{_named(row)}: of {counted(row['configs'], 'config')} {', '.join(bad)}"] = None
    return list(lines)


def chain_lines(rows: Sequence[Row]) -> list[str]:
    """One line a chain, for the table's foot."""
    lines = []
    for row in rows:
        name = {"linear": "F.linear", "dense": "fastest dense"}.get(row["variant"], row["pattern"] or "")
        name += ", partial sums that nothing reads" if row["variant"] == "spmv_partial" else ""
        if not row["us"]:
            lines.append(f"chain of {counted(row['layers'], 'layer')}, {name}: {row['outcome']} ({row['us_reason']})")
            continue
        speedup = row["speedup"]["dense"]
        over = f", {speedup:.2f}x over the fastest dense" if speedup and row["pattern"] else ""
        lines.append(f"chain of {counted(row['layers'], 'layer')}, {name}: {row['us']['p50']:.0f} us{over}")
    return lines


def _error_lines(rows: Sequence[Row]) -> list[str]:
    """What the column of errors says, and whose error is that of a y in half precision; none without rows."""
    rounded = [row for row in rows if row["variant"] in ROUNDED and row.get("dtype") in ("bf16", "fp16") and row["error"] is not None]
    names, dtypes = (" and ".join(dict.fromkeys(row[field] for row in rounded)) for field in ("variant", "dtype"))
    who, whose = (f"{names} round", "their") if " and " in names else (f"{names} rounds", "its")
    told = f"{who} y to {dtypes}, which is most of {whose} error; y of others is float32"
    return ([WHAT_ERROR] if rows else []) + ([told] if rounded else [])


def failures(rows: Sequence[Row]) -> list[str]:
    """Variants without a single correct config though they take the problem, one line each."""
    failed = [row for row in rows if row["outcome"] not in ("correct", "constraint")]
    return [f"{_named(row)}: {row['outcome']} ({row['message']})" for row in failed]


@dataclass(frozen=True)
class Sums:
    """Microseconds over all shapes, the best variant of each kind.

    Attributes:
        pattern: N:M of the sparse sum.
        tokens: Rows of x.
        shapes: How many there are.
        sparse: The fastest correct SpMV variants, y finished; of several tokens, SpMM variants.
        partial: The fastest that leave their partial sums to a consumer; None where a shape has none.
        linear: ``F.linear``.
        dense: The fastest dense kernels.
        quantized: Weight-only kernels by name; one with an untimed shape has no sum.
    """

    pattern: str
    tokens: int
    shapes: int
    sparse: float
    partial: float | None
    linear: float
    dense: float
    quantized: dict[str, float]


def sums(rows: Sequence[Row]) -> list[Sums]:
    """One sum a pattern and number of tokens; one with an untimed shape has none."""
    found = []
    for tokens in sorted({_tokens(row) for row in rows}):
        found += _sums_at(tokens, [row for row in rows if _tokens(row) == tokens])
    return found


def _sums_at(tokens: int, rows: Sequence[Row]) -> list[Sums]:
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
        ours = [row for row in timed if row["pattern"] == pattern]
        sparse = _sum_of_best([row for row in ours if row["kernel"] == ("spmv" if tokens == 1 else "spmm")], shapes)
        partial = _sum_of_best([row for row in ours if row["kernel"] == "spmv_partial"], shapes)
        if sparse and linear and dense:
            found.append(Sums(pattern, tokens, len(shapes), sparse, partial, linear, dense, quantized))
    return found


def headline(rows: Sequence[Row]) -> list[str]:
    """For each pattern the sum over the shapes against both dense baselines, and the sums of int8 and fp8; empty without timings."""
    lines = []
    found = sums(rows)
    for s in found:
        # A run that ended early may lack shapes: a sum says how many it has.
        shapes = counted(s.shapes, "shape")
        name = s.pattern if s.tokens == 1 else f"{s.pattern}, {s.tokens} tokens"
        quantized = "".join(f", {kind} sum {total:.1f} us" for kind, total in s.quantized.items())
        lines.append(f"{name}: sum of {shapes} {_against(s.sparse, s)}{quantized}")
        if s.partial:
            lines.append(f"{name} with partial sums left to a consumer that adds them: sum of {shapes} {_against(s.partial, s)}")
    return lines + _crossovers(found)


def _crossovers(found: Sequence[Sums]) -> list[str]:
    """For each pattern that was timed at several numbers of tokens, up to which of them it pays."""
    lines = []
    for pattern in dict.fromkeys(s.pattern for s in found):
        gains = [(s.tokens, s.dense / s.sparse) for s in found if s.pattern == pattern]
        if len(gains) > 1:
            each = ", ".join(f"{gain:.2f}x at {tokens}" for tokens, gain in gains)
            lines.append(
                f"{pattern} {crossover(gains, 'batch')}: {each}, over the fastest dense; int8, fp8 and cuSPARSELt are timed at one token "
                "alone"
            )
    return lines


def _against(total: float, s: Sums) -> str:
    return f"{total:.1f} us, {s.linear / total:.2f}x over F.linear, {s.dense / total:.2f}x over the fastest dense"


def slowest_speedup(rows: Sequence[Row]) -> float | None:
    """The smallest speed-up of a pattern's sum at one token over the fastest dense; None without timings."""
    return min((s.dense / s.sparse for s in sums(rows) if s.tokens == 1), default=None)


def _named(row: Row) -> str:
    name = row["variant"] + (" (sums)" if row["kernel"] == "spmv_partial" else "")
    several = f", {_tokens(row)} tokens" if _tokens(row) > 1 else ""
    return f"{name} on {row['layer']}" + (f" at {row['pattern']}" if row["pattern"] else "") + several


def _sum_of_best(rows: Sequence[Row], shapes: set[tuple[int, ...]]) -> float | None:
    best = [min((row["us"]["p50"] for row in rows if tuple(row["of_shape"]) == shape), default=None) for shape in shapes]
    times = [time for time in best if time is not None]
    return sum(times) if len(times) == len(shapes) else None


def _tokens(row: Row) -> int:
    """Rows of x; those of before there were several have none."""
    return int(row.get("tokens", 1))


def _results(run: SavedRun) -> list[Row]:
    return [measured(row) for row in run.latest("result", "kernel", "variant", "pattern", "layer", "tokens")]


def _plain(rows: Sequence[Row]) -> list[Row]:
    # The same document from a run directory, whose rows have their status already, as from memory.
    return [with_status(row) for row in rows]


def _speedup(row: Row, rows: Sequence[Row]) -> dict[str, float | None]:
    baselines = {
        (other["kernel"], other["variant"]): other["us"]["p50"]
        for other in rows
        if other["pattern"] is None and _tokens(other) == _tokens(row) and other["of_shape"] == row["of_shape"] and other["us"]
    }
    times = {
        "linear": baselines.get(("dense", "linear")),
        "dense": min((time for (kernel, _), time in baselines.items() if kernel == "dense"), default=None),
        **{name: baselines.get(("quantized", name)) for name in QUANTIZED},
    }
    p50 = row["us"]["p50"] if row["us"] else None
    return {name: time / p50 if time and p50 else None for name, time in times.items()}


def _is_best(row: Row, rows: Sequence[Row]) -> bool:
    kind = (row["kernel"], row["pattern"], row["of_shape"], _tokens(row))
    group = [other for other in rows if (other["kernel"], other["pattern"], other["of_shape"], _tokens(other)) == kind]
    right = [other["us"]["p50"] for other in group if other["us"] and other["outcome"] == "correct"]
    return bool(row["us"] and right and row["us"]["p50"] == min(right))


def _cells(row: Row) -> dict[str, str]:
    us, speedup = row["us"], row["speedup"]
    return {
        "layer": row["layer"],
        "shape": "x".join(map(str, row["of_shape"])),
        "tokens": str(_tokens(row)),
        "pattern": row["pattern"] or "dense",
        "variant": row["variant"] + (", sums" if row["kernel"] == "spmv_partial" else "") + (" *" if row["best"] else ""),
        "outcome": row["outcome"],
        "checked as": "x".join(map(str, row["shape"])),
        "us": f"{us['p50']:.2f}" if us else "-",
        "p20-p80": f"{us['p20']:.2f}-{us['p80']:.2f}" if us else "-",
        "GB/s": f"{row['gbps']:.0f}" if row["gbps"] else "-",
        "% read roofline": f"{row['roofline'] * 100:.0f}" if row["roofline"] else "-",
        **{f"x {heading}": f"{speedup[name]:.2f}" if speedup.get(name) else "-" for name, heading in _OVER.items()},
        "error": row.get("error_status", "-") if row["error"] is None else f"{row['error']:.1e}",
    }


def _tune_cells(row: Row, several: bool) -> list[str]:
    us = row["us"]
    return [
        row["layer"],
        "x".join(map(str, row["of_shape"])),
        *([str(_tokens(row))] if several else []),
        row["pattern"] or "dense",
        f"{row['kernel']}/{row['variant']}",
        f"{us['p50']:.2f}" if us else "-",
        f"{us['p20']:.2f}-{us['p80']:.2f}" if us else "-",
        row["config_source"],
        " ".join(f"{name}={value}" for name, value in row["config"].items()) if row["outcome"] == "correct" else "-",
        ", ".join(f"{count} {outcome}" for outcome, count in row["outcomes"].items()),
    ]
