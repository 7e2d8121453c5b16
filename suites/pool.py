"""Several draws of one comparison as one table, from the fidelity rows of ``e2e`` runs that differ in their seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdbench.errors import ExitCode, SdbenchError, UsageError
from sdbench.suites.e2e.arms import CONTROL, INT8
from sdbench.suites.e2e.tables import ratio_cells
from sdbench.suites.runs import Report, SavedRun
from sdbench.suites.statistics import mean_over_positions, ratio_of_means
from sdbench.tables import Column, share

SCHEMA = "sdbench.pool/1"
Row = dict[str, Any]

MAY_DIFFER = frozenset({"seed", "pattern", "method", "calib"})
"""Arguments of ``e2e`` in which pooled runs may differ: the draw, and what makes a line of the table."""

COLUMNS = (
    Column("pattern", key=True),
    Column("method", key=True),
    Column("prefill", key=True),
    Column("arm", key=True),
    Column("draws", figure=True),
    Column("questions", figure=True),
    Column("KL", figure=True),
    Column("draws from-to", figure=True),
    Column("top-1", figure=True),
    Column("x control", figure=True),
    Column("95%", figure=True),
)


@dataclass(frozen=True)
class _Draw:
    """Fidelity rows of one run: ``rows[prefill, arm][question]``."""

    seed: int
    rows: Mapping[tuple[str, str], Mapping[str, Row]]


def pool(runs: Sequence[SavedRun]) -> list[Row]:
    """One row a pattern, method, prefill and arm, over all draws of it.

    KL is the mean over all positions of all draws. The ratio to the control is over the questions and draws that both have; its interval
    resamples questions, each with all of its draws: the draws of one question are no independent evidence.

    Args:
        runs: Complete run directories of ``sdbench e2e`` with fidelity, one a draw.

    Raises:
        UsageError: They are no such runs, differ in more than ``MAY_DIFFER``, or hold one draw twice.
        SdbenchError: A run is not complete (exit code 1), or has no fidelity (5).
    """
    _require_alike(runs)
    groups: dict[tuple[str, str], list[_Draw]] = {}
    for run in runs:
        groups.setdefault((str(run.record.arguments["pattern"]), str(run.record.arguments["method"])), []).append(_draw(run))
    found = []
    for (pattern, method), draws in groups.items():
        for prefill, arm in dict.fromkeys(key for draw in draws for key in draw.rows):
            # Nothing of it is pruned, whatever the runs prune beside it.
            how = {"pattern": None, "method": None} if arm == INT8 else {"pattern": pattern, "method": method}
            found.append(how | _pooled(draws, prefill, arm))
    return found


def report(rows: Sequence[Row], runs: Sequence[SavedRun]) -> Report:
    """What ``sdbench pool`` shows."""
    model = str(runs[0].record.arguments["model"])
    cells = [
        [
            row["pattern"] or "-",
            row["method"] or "-",
            row["prefill"],
            row["arm"],
            str(len(row["seeds"])),
            str(row["questions"]),
            f"{row['kl']:.4f}",
            f"{min(row['kl_of_draws']):.4f}-{max(row['kl_of_draws']):.4f}",
            share(row["agreement"]),
            *ratio_cells(row["control_ratio"]),
        ]
        for row in rows
    ]
    lines = [
        "KL: mean KL(dense || pruned) in nats over all positions of the dense model's own replies, all draws together; from-to: of single "
        f"draws; x control: KL of {CONTROL} over that of the arm (above 1 the arm is closer), paired bootstrap over questions, each with "
        "all of its draws"
    ]
    document = {"schema": SCHEMA, "model": model, "runs": [str(run.path) for run in runs], "rows": list(rows)}
    return Report(f"{model}: fidelity over {len(runs)} runs", COLUMNS, cells, lines, document, rows)


def _require_alike(runs: Sequence[SavedRun]) -> None:
    seen: dict[tuple[str, str, str], SavedRun] = {}
    for run in runs:
        arguments = run.record.arguments
        if run.record.command != "e2e":
            raise UsageError(f"{run.path} is a run of 'sdbench {run.record.command}'; draws of 'sdbench e2e --fidelity-only' are pooled")
        if run.record.outcome != "complete":
            raise SdbenchError(f"{run.path} is not a complete run ({run.record.outcome}); finish it with its own command and --output")
        first = runs[0].record.arguments
        for name in sorted((first.keys() | arguments.keys()) - MAY_DIFFER):
            if first.get(name) != arguments.get(name):
                raise UsageError(
                    f"{run.path} has --{name.replace('_', '-')} {arguments.get(name)} and {runs[0].path} {first.get(name)}: "
                    f"pooled runs may differ in {', '.join(sorted(MAY_DIFFER))} alone"
                )
        key = str(arguments["pattern"]), str(arguments["method"]), str(arguments["seed"])
        if key in seen:
            raise UsageError(f"{run.path} and {seen[key].path} are one draw: {key[0]}, {key[1]}, seed {key[2]}; give each once")
        seen[key] = run


def _draw(run: SavedRun) -> _Draw:
    rows: dict[tuple[str, str], dict[str, Row]] = {}
    for row in run.latest("fidelity", "arm", "prefill", "example"):
        rows.setdefault((row["prefill"], row["arm"]), {})[str(row["example"])] = row
    if not rows:
        raise SdbenchError(f"{run.path} has no fidelity rows; run it with --fidelity or --fidelity-only", ExitCode.NOTHING_SELECTED)
    return _Draw(int(run.record.arguments["seed"]), rows)


def _pooled(draws: Sequence[_Draw], prefill: str, arm: str) -> Row:
    having = [draw for draw in draws if (prefill, arm) in draw.rows]
    each = [list(draw.rows[prefill, arm].values()) for draw in having]
    every = [row for rows in each for row in rows]
    return {
        "prefill": prefill,
        "arm": arm,
        "seeds": [draw.seed for draw in having],
        "questions": len({row["example"] for row in every}),
        "positions": sum(row["positions"] for row in every),
        "kl": mean_over_positions(every, "kl"),
        "kl_of_draws": [mean_over_positions(rows, "kl") for rows in each],
        "agreement": mean_over_positions(every, "agreement"),
        "control_ratio": None if arm == CONTROL else _ratio(having, prefill, arm),
    }


def _ratio(draws: Sequence[_Draw], prefill: str, arm: str) -> dict[str, float] | None:
    above: dict[str, float] = {}
    below: dict[str, float] = {}
    for draw in draws:
        control, pruned = draw.rows.get((prefill, CONTROL), {}), draw.rows[prefill, arm]
        for question in control.keys() & pruned.keys():
            # Each question weighs by its positions, which are the same in both arms.
            above[question] = above.get(question, 0.0) + control[question]["kl"] * control[question]["positions"]
            below[question] = below.get(question, 0.0) + pruned[question]["kl"] * pruned[question]["positions"]
    questions = sorted(above)
    found = ratio_of_means([above[one] for one in questions], [below[one] for one in questions])
    return found.as_dict() if found else None
