"""Tables of a run beside its arms: fidelity to the dense replies, and what calibration misses and pruning costs by kind of layer."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from sdbench.suites.runs import Table
from sdbench.suites.statistics import KL_ROUNDING
from sdbench.tables import Column, share

Row = dict[str, Any]

BEHAVIOUR = (
    Column("arm", key=True),
    Column("tokens", figure=True),
    Column("x dense", figure=True),
    Column("loops", figure=True),
    Column("repeated 4-grams", figure=True),
)

NET = (Column("net x", figure=True), Column("s/right", figure=True))
"""What the behaviour comes to at the rates that were timed."""

FIDELITY = (
    Column("arm", key=True),
    Column("prefill", key=True),
    Column("KL", figure=True),
    Column("top-1 agree", figure=True),
    Column("diverged", figure=True),
    Column("at token", figure=True),
    Column("perplexity", figure=True),
    Column("x control", figure=True),
    Column("95% interval", figure=True),
)

HARNESS = (
    Column("task", key=True),
    Column("metric", key=True),
    Column("arm", key=True),
    Column("value", figure=True),
    Column("stderr", figure=True),
    Column("samples", figure=True),
)

EXECUTION = {"passed": "passed", "failed": "failed", "error": "error", "timeout": "timeout", "not run": "not_run"}
"""Columns and outcomes of generated code."""

LAYERS = (
    Column("arm", key=True),
    Column("layers", key=True),
    Column("energy p05", figure=True),
    Column("p50", figure=True),
    Column("p95", figure=True),
    Column("discrepancy", figure=True),
    Column("worst", figure=True),
    Column("error", figure=True),
    Column("worst", figure=True),
)


def behaviour_table(arms: Sequence[Row], timed: bool = True) -> Table | None:
    """How replies behave, with scores and outcomes of generated code where there are any; None for a run without pruned replies.

    Args:
        arms: One record an arm.
        timed: Whether the run timed anything.
    """
    arms = [arm for arm in arms if arm.get("loops") is not None]
    if not any(arm["pattern"] for arm in arms):
        return None
    scored, run = (any(arm.get(name) is not None for arm in arms) for name in ("scored", "execution"))
    columns = [*BEHAVIOUR, *(NET if timed else []), *([Column("score", figure=True), Column("scored", figure=True)] if scored else [])]
    columns += [Column(name, figure=True) for name in EXECUTION] if run else []
    cells = [
        [
            arm["arm"],
            f"{arm['reply_tokens']:g}",
            _figure(arm["length_ratio"], ".2f"),
            f"{arm['loops']}/{arm['examples']}",
            "-" if arm["repeated_4grams"] is None else f"{arm['repeated_4grams']:.1%}",
            *((_figure(arm["net_speedup"], ".2f"), _figure(arm["seconds_per_correct"], ".3g")) if timed else ()),
            *((_figure(arm.get("score"), ".2f"), f"{arm.get('scored', 0)}/{arm['examples']}") if scored else ()),
            *(str((arm.get("execution") or {}).get(kind, "-")) for kind in (EXECUTION.values() if run else ())),
        ]
        for arm in arms
    ]
    lines = [
        "tokens: median of a reply; x dense: tokens of all replies over the dense model's; loops: replies that say one n-gram over and over"
    ]
    if timed:
        lines[0] += "; net x: x dense of rates over that of lengths; s/right: decode seconds of all replies at that rate, a right answer"
    costless = [arm["seconds_per_correct_reason"] for arm in arms if timed and arm.get("seconds_per_correct_reason")]
    lines += [f"no s/right: {reason}" for reason in dict.fromkeys(costless)]
    if scored:
        lines.append("score: mean of the judge's, 1 to 10, each the mean over a request's criteria; scored: replies that have one")
    return Table("how replies behave", columns, cells, lines)


def fidelity_table(arms: Sequence[Row]) -> Table | None:
    """Fidelity by arm and prefill; None for a run without."""
    cells = [
        [
            arm["arm"],
            prefill,
            kl_cell(found["kl"]),
            share(found["agreement"]),
            f"{found['diverged']}/{found['questions']}",
            _figure(found["first_divergence"], "g"),
            _figure(found.get("perplexity"), "#.5g"),
            # Rows of earlier runs have a ratio to rounding, too.
            *ratio_cells(found["control_ratio"] if found["kl"] > KL_ROUNDING else None),
        ]
        for arm in arms
        for prefill, found in (arm.get("fidelity") or {}).items()
    ]
    dense = [found["dense_perplexity"] for arm in arms for found in (arm.get("fidelity") or {}).values() if "dense_perplexity" in found]
    lines = [
        "KL: mean KL(dense || pruned) in nats over the positions of the dense model's own replies; at token: median position of the first "
        "other token; x control: KL of the control over that of the arm (above 1 the arm is closer), paired bootstrap over questions"
    ]
    lines += rounded([found["kl"] for arm in arms for found in (arm.get("fidelity") or {}).values()])
    lines += [f"perplexity of those replies; the dense model's own is {dense[0]:#.5g}"] if dense else []
    return Table("fidelity to the dense model's own replies", FIDELITY, cells, lines) if cells else None


def harness_table(arms: Sequence[Row]) -> Table | None:
    """Figures of lm-evaluation-harness, arms below one another; None for a run without."""
    figures = [(found["task"], found["metric"], found["filter"], arm["arm"], found) for arm in arms for found in arm.get("lm_eval") or ()]
    order = list(dict.fromkeys((task, metric, kept) for task, metric, kept, *_ in figures))
    cells = [
        [
            task,
            metric if kept == "none" else f"{metric}, {kept}",
            arm,
            f"{found['value']:.4f}",
            _figure(found["stderr"], ".4f"),
            str(found["samples"] or "-"),
        ]
        for task, metric, kept, arm, found in sorted(figures, key=lambda figure: order.index(figure[:3]))
    ]
    lines = ["all positions, those of the prompt too, on the arm's own weights, without a chat template"]
    return Table("lm-evaluation-harness", HARNESS, cells, lines) if cells else None


def kl_cell(kl: float) -> str:
    """A KL with four decimals, and a small one with three figures: good calibrations differ there."""
    return format(kl, ".4f" if kl >= 1e-3 else "#.3g")


def rounded(kls: Sequence[float]) -> list[str]:
    """A line for a table in which a KL is no more than rounding."""
    why = f"no x control where a KL is not above {KL_ROUNDING:g} nats: so much is the rounding of float32 logits"
    return [why] if any(kl <= KL_ROUNDING for kl in kls) else []


def ratio_cells(ratio: Mapping[str, Any] | None) -> tuple[str, str]:
    """A ratio to the control and its interval, also as rows store what is infinite: null, with a ``..._status`` beside it."""
    if not ratio:
        return "-", "-"
    found = (ratio[key] if ratio[key] is not None else float(ratio[f"{key}_status"]) for key in ("estimate", "low", "high"))
    # Beside rounding, pruning of any kind is thousands of times as far from dense.
    estimate, low, high = (format(value, ".2f" if value < 1000 else ".1e") for value in found)
    return estimate, f"{low} to {high}"


def layer_table(layers: Sequence[Row]) -> Table | None:
    """Medians and worst values over the layers of one kind, which are those of one last name; None for a run without."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in layers:
        groups.setdefault((row["arm"], row["layer"].rpartition(".")[2]), []).append(row)
    cells = []
    for (arm, kind), rows in groups.items():
        spreads = [row["energy_ratio"] for row in rows if row.get("energy_ratio")]
        energies = [_figure(_median([spread[share] for spread in spreads]), ".3g") for share in ("p05", "p50", "p95")]
        losses = [
            _figure(reduce([row[name] for row in rows if row.get(name) is not None]), form)
            for name, form in (("discrepancy", ".3g"), ("reconstruction_error", ".4f"))
            for reduce in (_median, _largest)
        ]
        cells.append([arm, f"{len(rows)} {kind}", *energies, *losses])
    lines = (
        "on the judged questions, medians over layers: energy: a decode step's energy in an input column over a prompt position's, across "
        "columns; discrepancy: of the calibration Hessian from the decode one along its top directions (0: none); error: relative error "
        "of the pruned layer's outputs in decode steps",
    )
    return Table("what calibration misses, and what pruning costs", LAYERS, cells, lines) if cells else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _largest(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
