"""Several draws of one comparison as one table: fidelity and answers of ``e2e`` runs that differ in their seed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdbench.errors import ExitCode, SdbenchError, UsageError
from sdbench.suites.e2e.arms import CONTROL, DENSE, INT8
from sdbench.suites.e2e.tables import kl_cell, ratio_cells, rounded
from sdbench.suites.e2e.typed import difference
from sdbench.suites.runs import Report, SavedRun, Table
from sdbench.suites.statistics import difference_of_shares, kl_ratio, mean_over_positions
from sdbench.tables import Column, share
from sdbench.words import counted

SCHEMA = "sdbench.pool/1"
Row = dict[str, Any]

UNPRUNED = (DENSE, INT8)

Group = tuple[str, str, tuple[str, ...]]
"""Pattern, method and calibration sources: runs with a control of one kind, since the sources of a run share its number of rows."""

MAY_DIFFER = frozenset({"seed", "pattern", "method", "calib"})
"""Arguments of ``e2e`` in which pooled runs may differ: the draw, and what makes a line of the table."""

TOLD_BY_OTHERS = frozenset({"profile_changed"})
"""Names of options that have another value than the profile's; the options are compared themselves."""

KEYS = tuple(Column(name, key=True) for name in ("pattern", "method", "calib", "prefill", "arm"))

COLUMNS = (
    *KEYS,
    Column("draws", figure=True),
    Column("questions", figure=True),
    Column("KL", figure=True),
    Column("draws from-to", figure=True),
    Column("top-1", figure=True),
    Column("x control", figure=True),
    Column("95%", figure=True),
)

ANSWER_COLUMNS = (
    *KEYS,
    Column("draws", figure=True),
    Column("match", figure=True),
    Column("draws from-to", figure=True),
    Column("EOS", figure=True),
    Column("cut off", figure=True),
    Column("points over control", figure=True),
    Column("95%", figure=True),
)


@dataclass(frozen=True)
class _Draw:
    """Fidelity rows of one run, ``rows[prefill, arm][question]``, and rows of its arms that answered."""

    seed: int
    rows: Mapping[tuple[str, str], Mapping[str, Row]]
    arms: Mapping[str, Row]


@dataclass(frozen=True)
class Pooled:
    """What several draws say together: rows of fidelity and rows of answers, either of which may be none."""

    fidelity: list[Row]
    answers: list[Row]


def pool(runs: Sequence[SavedRun]) -> Pooled:
    """One row a pattern, method, set of calibration sources, prefill and arm, over all draws of it.

    KL is the mean over all positions of all draws. What is compared with the control is over the questions and draws that both have; its
    interval resamples questions, each with all of its draws: the draws of one question are no independent evidence.

    Args:
        runs: Complete run directories of ``sdbench e2e``, one a draw.

    Raises:
        UsageError: They are no such runs, differ in more than ``MAY_DIFFER``, or hold one draw twice.
        SdbenchError: A run is not complete (exit code 1), or has neither fidelity nor answers of pruned arms (5).
    """
    _require_alike(runs)
    groups: dict[Group, list[_Draw]] = {}
    for run in runs:
        groups.setdefault(_group(run), []).append(_draw(run))
    found = Pooled([], [])
    for group, draws in [(None, _one_a_seed(groups.values())), *groups.items()]:
        pattern, method, calib = group or (None, None, None)
        how = {"pattern": pattern, "method": method}
        sources = {"calib": list(calib) if calib else None}
        # Each group has a control of its own.
        compared = bool(pattern) or len(groups) == 1
        for prefill, arm in dict.fromkeys(key for draw in draws for key in draw.rows):
            if (arm not in UNPRUNED) == bool(pattern):
                found.fidelity.append(how | _pooled(draws, prefill, arm, compared and arm != CONTROL) | sources)
        for arm in dict.fromkeys(name for draw in draws for name in draw.arms):
            if (arm not in UNPRUNED) == bool(pattern):
                found.answers.append(how | _answers(draws, arm, compared and arm not in (CONTROL, DENSE)) | sources)
    return found


def report(pooled: Pooled, runs: Sequence[SavedRun]) -> Report:
    """What ``sdbench pool`` shows."""
    model = str(runs[0].record.arguments["model"])
    title = f"{model}: {counted(len(runs), 'run')}{' together' if len(runs) > 1 else ''}"
    document = {
        "schema": SCHEMA,
        "model": model,
        "runs": [str(run.path) for run in runs],
        "rows": list(pooled.fidelity),
        "answers": list(pooled.answers),
    }
    tables = [table for table in (_fidelity_table(pooled.fidelity), _answer_table(pooled.answers)) if table]
    first, more = tables[0], tables[1:]
    return Report(
        f"{title}, {first.title}", first.columns, first.cells, first.lines, document, [*pooled.fidelity, *pooled.answers], more=more
    )


def _fidelity_table(rows: Sequence[Row]) -> Table | None:
    cells = [
        [
            *_keys(row),
            str(len(row["seeds"])),
            str(row["questions"]),
            kl_cell(row["kl"]),
            f"{kl_cell(min(row['kl_of_draws']))}-{kl_cell(max(row['kl_of_draws']))}",
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
    lines += rounded([row["kl"] for row in rows])
    return _table("fidelity", COLUMNS, cells, lines, rows)


def _answer_table(rows: Sequence[Row]) -> Table | None:
    cells = [
        [
            *_keys(row),
            str(len(row["seeds"])),
            f"{row['right']}/{row['examples']}",
            f"{min(row['right_of_draws'])}-{max(row['right_of_draws'])}",
            f"{row['eos']}/{row['examples']}",
            str(row["truncated"]),
            *_points(row["over_control"]),
        ]
        for row in rows
    ]
    lines = [
        "match, EOS and cut off: of all draws together; from-to: right answers of single draws; points over control: how many percentage "
        f"points more of the answers are right than of {CONTROL}'s, paired bootstrap over questions, each with all of its draws (one that "
        "holds 0 shows no difference); where all questions say the same, such as that nothing differs, exact binomial (rule of three)"
    ]
    return _table("answers", ANSWER_COLUMNS, cells, lines, rows)


def _keys(row: Row) -> list[str]:
    return [row["pattern"] or "-", row["method"] or "-", ", ".join(row["calib"] or "-"), row["prefill"] or "-", row["arm"]]


def _table(title: str, columns: Sequence[Column], cells: list[list[str]], lines: Sequence[str], rows: Sequence[Row]) -> Table | None:
    """The table; the sources stand in it where they tell lines apart."""
    if not cells:
        return None
    several = len({tuple(row["calib"]) for row in rows if row["calib"]}) > 1
    shown = [number for number, column in enumerate(columns) if several or column.name != "calib"]
    return Table(title, [columns[number] for number in shown], [[row[number] for number in shown] for row in cells], lines)


def _points(difference: Mapping[str, float] | None) -> tuple[str, str]:
    if difference is None:
        return "-", "-"
    estimate, low, high = (100 * difference[name] for name in ("estimate", "low", "high"))
    return f"{estimate:+.1f}", f"{low:+.1f} to {high:+.1f}"


def _group(run: SavedRun) -> Group:
    arguments = run.record.arguments
    return str(arguments["pattern"]), str(arguments["method"]), tuple(sorted(arguments["calib"]))


def _require_alike(runs: Sequence[SavedRun]) -> None:
    seen: dict[tuple[Group, str], SavedRun] = {}
    for run in runs:
        arguments = run.record.arguments
        if run.record.command != "e2e":
            raise UsageError(f"{run.path} is a run of 'sdbench {run.record.command}'; draws of 'sdbench e2e' are pooled")
        if run.record.outcome != "complete":
            raise SdbenchError(f"{run.path} is not a complete run ({run.record.outcome}); finish it with its own command and --output")
        first = runs[0].record.arguments
        for name in sorted((first.keys() | arguments.keys()) - MAY_DIFFER - TOLD_BY_OTHERS):
            if first.get(name) != arguments.get(name):
                told = difference(name, str(run.path), arguments.get(name), str(runs[0].path), first.get(name))
                raise UsageError(f"{told}: pooled runs may differ in {', '.join(f'--{one}' for one in sorted(MAY_DIFFER))} alone")
        group, seed = key = _group(run), str(arguments["seed"])
        if key in seen:
            told = ", ".join([*group[:2], *group[2], f"seed {seed}"])
            raise UsageError(f"{run.path} and {seen[key].path} are one draw: {told}; give each once")
        seen[key] = run


def _one_a_seed(groups: Iterable[Sequence[_Draw]]) -> list[_Draw]:
    """Draws for the arms without pruned weights, which are the same whatever the runs prune beside them."""
    found: dict[int, _Draw] = {}
    for draws in groups:
        for draw in draws:
            found.setdefault(draw.seed, draw)
    return list(found.values())


def _draw(run: SavedRun) -> _Draw:
    rows: dict[tuple[str, str], dict[str, Row]] = {}
    for row in run.latest("fidelity", "arm", "prefill", "example"):
        rows.setdefault((row["prefill"], row["arm"]), {})[str(row["example"])] = row
    arms = {row["arm"]: row for row in run.latest("arm", "arm") if row.get("matches")}
    # The dense model's replies are what fidelity is measured on, and no answers to compare.
    arms = arms if arms.keys() - {DENSE} else {}
    if not rows and not arms:
        hint = "run it with --fidelity-only, or on questions that are answered"
        raise SdbenchError(f"{run.path} has neither fidelity rows nor answers of pruned arms; {hint}", ExitCode.NOTHING_SELECTED)
    return _Draw(int(run.record.arguments["seed"]), rows, arms)


def _pooled(draws: Sequence[_Draw], prefill: str, arm: str, compared: bool) -> Row:
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
        "control_ratio": _ratio(having, prefill, arm) if compared else None,
    }


def _ratio(draws: Sequence[_Draw], prefill: str, arm: str) -> dict[str, float] | None:
    pairs = []
    for draw in draws:
        control, pruned = draw.rows.get((prefill, CONTROL), {}), draw.rows[prefill, arm]
        pairs += [(question, control[question], pruned[question]) for question in control.keys() & pruned.keys()]
    pairs.sort(key=lambda pair: pair[0])
    found = kl_ratio([control for _, control, _ in pairs], [pruned for _, _, pruned in pairs])
    return found.as_dict() if found else None


def _answers(draws: Sequence[_Draw], arm: str, compared: bool) -> Row:
    having = [draw for draw in draws if arm in draw.arms]
    each = [draw.arms[arm] for draw in having]
    return {
        "prefill": each[0]["prefill"],
        "arm": arm,
        "seeds": [draw.seed for draw in having],
        "examples": sum(row["examples"] for row in each),
        "right": sum(row["answer_match"] or 0 for row in each),
        "right_of_draws": [row["answer_match"] or 0 for row in each],
        "eos": sum(row["eos"] for row in each),
        "truncated": sum(row["truncated"] for row in each),
        "over_control": _over_control(having, arm) if compared else None,
    }


def _over_control(draws: Sequence[_Draw], arm: str) -> dict[str, float] | None:
    counts: dict[str, tuple[int, int, int]] = {}
    for draw in draws:
        control, pruned = draw.arms.get(CONTROL, {}).get("matches") or {}, draw.arms[arm]["matches"]
        for question in control.keys() & pruned.keys():
            right, control_right, asked = counts.get(question, (0, 0, 0))
            counts[question] = right + bool(pruned[question]), control_right + bool(control[question]), asked + 1
    found = difference_of_shares([counts[question] for question in sorted(counts)])
    return found.as_dict() if found else None
