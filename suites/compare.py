"""Two runs of one command, row by row: what is wrong now, what got worse or slower beyond noise, what is in one of them alone.

A time counts as slower when it is longer by more than the threshold *and* the 20th to 80th percentiles of both runs do not touch; any
other difference is called noise, and one beyond the threshold is not judged where either run has one sample alone. Answer match and EOS
completion count as worse when McNemar's exact test over the examples that both runs judged gives p < 0.05, fidelity when the 95% interval
of the ratio of both KLs, a paired bootstrap over those examples, lies below 1; without common examples nothing is concluded.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal, get_args

from sdbench.errors import ExitCode, SdbenchError, UsageError
from sdbench.suites.e2e.arms import is_timed
from sdbench.suites.runs import Row, SavedRun, last_of
from sdbench.suites.saved import KEYS
from sdbench.suites.statistics import KL_ROUNDING, mcnemar, mean_over_positions, ratio_of_means
from sdbench.tables import Column

SCHEMA = "sdbench.compare/1"
ALPHA = 0.05

Verdict = Literal["broken", "worse", "slower", "only in BASE", "no ratio", "not judged", "only in NEW", "better", "faster", "same"]
"""By severity. "broken" was correct before; "worse" and "better" are about answers; "no ratio" and "not judged" have
their reason beside them."""

Figure = Literal["us", "tok/s", "prompt, x dense"]
"""What tells how fast a row is; a prompt by the ratio to a dense one in turn, since times of prompts minutes apart differ by the host."""

FIGURES: dict[Figure, str] = {"us": "us", "tok/s": "decode_rate", "prompt, x dense": "ratio"}
"""Where rows have it."""

REGRESSIONS: tuple[Verdict, ...] = ("broken", "worse", "slower")

QUESTIONS = ("task", "task_version", "split_manifest", "dataset_revision", "data_sha256", "validation_sha256")
"""Arguments that say which examples a name stands for."""

COMMANDS = {"kernels": ("result", "chain"), "tune": ("result",), "e2e": ("arm",), "decode": ("decode", "batch", "prompt")}
"""Command -> the kinds of its rows."""

COLUMNS = (
    Column("verdict", key=True),
    Column("row", key=True),
    Column("figure", key=True),
    Column("BASE", figure=True),
    Column("p20-p80", figure=True),
    Column("NEW", figure=True),
    Column("p20-p80", figure=True),
    Column("x BASE", figure=True),
    Column("why"),
)


@dataclass(frozen=True)
class Finding:
    """One figure of a row in both runs.

    Attributes:
        verdict: What became of it.
        key: The row's key, by field; empty for the run as a whole.
        figure: What is compared: "us", "tok/s", "answer match", "EOS", "KL", "outcome".
        base: In BASE: a median, a count, or an outcome.
        new: In NEW.
        base_spread: 20th and 80th percentile in BASE; None for a single sample.
        new_spread: Those in NEW.
        ratio: Speed of NEW over that of BASE, above 1 for faster; of KL, that of BASE over that of NEW, above 1 for closer to dense.
        reason: Why there is no ratio, or what the verdict rests on.
    """

    verdict: Verdict
    key: Row
    figure: str
    base: float | str | None = None
    new: float | str | None = None
    base_spread: tuple[float, float] | None = None
    new_spread: tuple[float, float] | None = None
    ratio: float | None = None
    reason: str | None = None

    @property
    def lost(self) -> bool:
        """BASE measured it and NEW did not, though both are right: a run that lost its GPU compares nothing, and may not pass."""
        return self.verdict == "no ratio" and self.figure in FIGURES and self.base is not None and self.new is None

    @property
    def label(self) -> str:
        """The key in one text."""
        known = {name: value for name, value in self.key.items() if value is not None}
        if "tokens" in known:
            known["tokens"] = f"{known['tokens']} tokens"
        if "batch" in known:
            known["batch"] = f"{known['batch']} prompts"
        parts = ["x".join(map(str, value)) if isinstance(value, list) else str(value) for value in known.values()]
        return " ".join(parts) or "the whole run"


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found.

    Attributes:
        base: The run that is compared with.
        new: The run in question.
        fail_over: Slow-down, as a fraction of BASE's time, up to which it is noise.
        warnings: What makes the two hard to compare.
        findings: By severity.
    """

    base: SavedRun
    new: SavedRun
    fail_over: float
    warnings: Sequence[str]
    findings: Sequence[Finding]

    @property
    def regressions(self) -> list[Finding]:
        """Findings that fail the comparison: a figure that NEW has lost among them."""
        return [finding for finding in self.findings if finding.verdict in REGRESSIONS or finding.lost]

    def cells(self) -> list[list[str]]:
        """Cells of the table, a row a finding."""
        return [
            [
                found.verdict,
                found.label,
                found.figure,
                _shown(found.base),
                _range(found.base_spread),
                _shown(found.new),
                _range(found.new_spread),
                "-" if found.ratio is None else f"{found.ratio:.3f}",
                found.reason or "",
            ]
            for found in self.findings
        ]

    def lines(self) -> list[str]:
        """What stands under the table."""
        counts = [f"{sum(f.verdict == verdict for f in self.findings)} {verdict}" for verdict in get_args(Verdict)]
        lines = [", ".join(text for text in counts if not text.startswith("0 "))]
        linear = [found.ratio for found in self.findings if found.key.get("variant") == "linear" and found.ratio]
        if linear:
            lines.append(
                f"F.linear, which is not sdbench's, runs at {median(linear):.3f}x its speed in BASE: so much is the machine or torch"
            )
        return lines

    def document(self) -> Row:
        """The comparison as one JSON document."""
        runs = {name: {"path": str(run.path), "outcome": run.record.outcome} for name, run in (("base", self.base), ("new", self.new))}
        return {
            "schema": SCHEMA,
            "command": self.new.record.command,
            **runs,
            "fail_over": self.fail_over,
            "regressions": len(self.regressions),
            "warnings": list(self.warnings),
            "rows": [asdict(found) for found in self.findings],
        }


def _share_no_question(base: SavedRun, new: SavedRun) -> bool:
    """Whether both runs judged questions, none of them the same."""
    judged = [{(str(sample.get("example")), str(sample.get("prompt_hash"))) for sample in run.samples} for run in (base, new)]
    return all(judged) and not set.intersection(*judged)


def _key(row: Row, names: Sequence[str]) -> Row:
    """What a row measured. One token goes without saying: rows of before there were several say nothing of it."""
    return {name: row.get(name) for name in names if name != "tokens" or row.get(name, 1) != 1}


def compare(base: SavedRun, new: SavedRun, fail_over: float) -> Comparison:
    """Compares two runs of one command.

    Args:
        base: The run to compare with.
        new: The run in question.
        fail_over: Slow-down, as a fraction of BASE's time, up to which it is noise.

    Raises:
        UsageError: They are runs of different commands, or of one without comparable rows.
        SdbenchError: They have no row in common (exit code 5).
    """
    command = base.record.command
    if new.record.command != command:
        raise UsageError(
            f"{base.path} is a run of 'sdbench {command}' and {new.path} of 'sdbench {new.record.command}'; compare like with like"
        )
    if command not in COMMANDS:
        raise UsageError(
            f"{base.path} holds a run of 'sdbench {command}', which has no rows to compare; those that do: {', '.join(COMMANDS)}"
        )
    findings: list[Finding] = []
    common = 0
    for kind in COMMANDS[command]:
        names = KEYS[kind]
        before, after = (
            {tuple(map(str, key.values())): (key, row) for row in run.latest(kind, *names) if (key := _key(row, names))}
            for run in (base, new)
        )
        common += len(before.keys() & after.keys())
        figure: Figure = "prompt, x dense" if kind == "prompt" else "tok/s" if "arm" in names else "us"
        shown = figure if _is_timed(base, new) else "outcome"
        for found, (key, _) in (before | after).items():
            if found not in after:
                findings.append(Finding("only in BASE", key, shown, base=_outcome(before[found][1])))
            elif found not in before:
                findings.append(Finding("only in NEW", key, shown, new=_outcome(after[found][1])))
            else:
                findings += _of_row(key, figure, before[found][1], after[found][1], base, new, fail_over)
    if command == "e2e":
        fidelity = list(_fidelity(base, new))
        findings += fidelity
        common += len(fidelity)
    if not common:
        raise SdbenchError(f"{base.path} and {new.path} have no row in common: nothing to compare", ExitCode.NOTHING_SELECTED)
    if all(found.ratio is None for found in findings) and _share_no_question(base, new):
        raise SdbenchError(
            f"{base.path} and {new.path} judged other questions, and no rate of theirs compares: nothing to compare",
            ExitCode.NOTHING_SELECTED,
        )
    if base.record.outcome == "complete" != new.record.outcome:
        findings.append(Finding("broken", {}, "outcome", "complete", new.record.outcome, reason=new.record.outcome_reason))
    severity = {verdict: number for number, verdict in enumerate(get_args(Verdict))}
    findings.sort(key=lambda found: (severity[found.verdict], math.inf if found.ratio is None else found.ratio))
    return Comparison(base, new, fail_over, _warnings(base, new), findings)


def _of_row(key: Row, figure: Figure, before: Row, after: Row, base: SavedRun, new: SavedRun, fail_over: float) -> Iterator[Finding]:
    outcomes = _outcome(before), _outcome(after)
    if outcomes != ("correct", "correct"):
        verdict: Verdict = "broken" if outcomes[0] == "correct" else "better" if outcomes[1] == "correct" else "no ratio"
        told = after.get("message") or after.get("us_reason") or after.get("reason")
        yield Finding("same" if outcomes[0] == outcomes[1] else verdict, key, "outcome", *outcomes, reason=str(told) if told else None)
    elif _is_timed(base, new):
        yield _speed(key, before, after, fail_over, figure)
    if "method" in key:
        for field, count, name in (("match", "answer_match", "answer match"), ("eos", "eos", "EOS")):
            if before.get(count) is not None or after.get(count) is not None:
                yield _quality(key, field, name, count, (before, after), base, new)


def _is_timed(*runs: SavedRun) -> bool:
    """Whether one of them was to time anything: all but runs of ``e2e`` are."""
    arguments = [run.record.arguments for run in runs]
    return any(is_timed(one.get("fidelity"), one.get("rate_repeats", 1)) for one in arguments)


def _outcome(row: Row) -> str:
    if "outcome" not in row:
        return "correct" if row.get("kernel_calls") == row.get("expected_kernel_calls") else "wrong kernel calls"
    return str(row.get("outcome"))


def _speed(key: Row, before: Row, after: Row, fail_over: float, figure: Figure) -> Finding:
    """Compares times, or rates as the times that they stand for."""
    (base, base_spread), (new, new_spread) = _median_and_spread(before, figure), _median_and_spread(after, figure)
    problems = [_problem(base, "BASE"), _problem(new, "NEW")]
    lengths = [row.get("equal_tokens", row.get("tokens")) for row in (before, after)]
    if figure == "tok/s" and lengths[0] != lengths[1]:
        problems.append(f"lengths differ: {lengths[0]} tokens in BASE, {lengths[1]} in NEW")
    reason = next(filter(None, problems), None)
    if base is None or new is None or reason:
        return Finding("no ratio", key, figure, base, new, base_spread, new_spread, reason=reason)
    # As times, where less is better, so that a threshold means the same for both figures.
    times = [(base, *(base_spread or (base, base))), (new, *(new_spread or (new, new)))]
    single = " and ".join(name for name, spread in (("BASE", base_spread), ("NEW", new_spread)) if spread is None)
    if figure != "us":
        times = [(1 / p50, 1 / p80, 1 / p20) for p50, p20, p80 in times]
    (base_time, base_low, base_high), (new_time, new_low, new_high) = times
    verdict: Verdict = "same"
    if new_time != base_time:
        way: Verdict = "slower" if new_time > base_time else "faster"
        apart = new_low > base_high if way == "slower" else base_low > new_high
        beyond = max(base_time, new_time) > min(base_time, new_time) * (1 + fail_over)
        if beyond and single:
            verdict, reason = "not judged", f"{way}, not judged: one sample alone, and so no spread, in {single}"
        elif beyond and apart:
            verdict = way
        else:
            reason = f"{way} within noise: {f'up to {fail_over * 100:g}%' if apart else 'the spreads overlap'}"
    return Finding(verdict, key, figure, base, new, base_spread, new_spread, base_time / new_time, reason)


def _median_and_spread(row: Row, figure: Figure) -> tuple[float | None, tuple[float, float] | None]:
    spread = row.get(FIGURES[figure])
    if figure == "tok/s" and not isinstance(spread, dict):
        # An arm of e2e has its median and its spread apart; the others have both in one.
        apart = row.get("decode_rate_spread")
        spread = (apart if isinstance(apart, dict) else {}) | {"p50": spread}
    spread = spread if isinstance(spread, dict) else {}
    p50 = _number(spread.get("p50"))
    low, high = _number(spread.get("p20")), _number(spread.get("p80"))
    return p50, (low, high) if low and high and 0 < low < high else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _problem(value: float | None, name: str) -> str | None:
    if value is None:
        return f"no figure in {name}"
    return f"{name} has {value:g}" if value <= 0 else None


def _answers(run: SavedRun, arm: str, field: str) -> dict[tuple[str, str], bool]:
    """Whether an arm's reply to an example, by name and prompt, is right or ended."""
    return {
        (str(sample.get("example")), str(sample.get("prompt_hash"))): bool(sample[field])
        for sample in last_of(run.samples, "arm", "example")
        if sample.get("arm") == arm and sample.get(field) is not None
    }


def _quality(key: Row, field: str, figure: str, count: str, rows: tuple[Row, Row], base: SavedRun, new: SavedRun) -> Finding:

    before, after = (_answers(run, key["arm"], field) for run in (base, new))
    # A run's folder may lack the replies themselves; its rows still say which questions were answered right.
    asked = [[run.record.arguments.get(name) for name in QUESTIONS] for run in (base, new)]
    if field == "match" and not (before and after) and asked[0] == asked[1]:
        before, after = ({(name, ""): bool(right) for name, right in (row.get("matches") or {}).items()} for row in rows)
    common = list(before.keys() & after.keys())
    if not common:
        without = " and ".join(label for label, run in (("BASE", base), ("NEW", new)) if not run.samples)
        reason = f"no replies (samples.jsonl) in {without}: not tested" if without else "no example in common: not tested"
        return Finding("no ratio", key, figure, rows[0].get(count), rows[1].get(count), reason=reason)
    first, second = [before[one] for one in common], [after[one] for one in common]
    lost, gained = (sum(pair == way for pair in zip(first, second, strict=True)) for way in ((True, False), (False, True)))
    p = mcnemar(first, second)
    verdict: Verdict = "same" if p >= ALPHA else "worse" if lost > gained else "better"
    reason = f"{lost} lost, {gained} gained, exact McNemar p = {p:.2g}" + (", within noise" if verdict == "same" and lost != gained else "")
    return Finding(verdict, key, figure, f"{sum(first)}/{len(common)}", f"{sum(second)}/{len(common)}", reason=reason)


def _fidelity(base: SavedRun, new: SavedRun) -> Iterator[Finding]:
    """KL to the dense model's replies of each arm and prefill, over the examples that both runs have."""
    before, after = (
        {
            (str(row.get("arm")), str(row.get("prefill")), str(row.get("example"))): {"kl": kl, "positions": positions}
            for row in run.latest("fidelity", *KEYS["fidelity"])
            if (kl := _number(row.get("kl"))) is not None and (positions := _number(row.get("positions")))
        }
        for run in (base, new)
    )
    for arm, prefill in dict.fromkeys(key[:2] for key in before if key in after):
        common = [key for key in before if key[:2] == (arm, prefill) and key in after]
        first, second = [before[key] for key in common], [after[key] for key in common]
        found = ratio_of_means([row["kl"] * row["positions"] for row in first], [row["kl"] * row["positions"] for row in second])
        means = mean_over_positions(first, "kl"), mean_over_positions(second, "kl")
        key: Row = {"arm": arm, "prefill": prefill}
        rounding = max(means) <= KL_ROUNDING
        if found is None or rounding:
            verdict: Verdict = "same" if rounding or means[0] == means[1] else "no ratio"
            reason = "both are rounding of float32 logits" if rounding else "an interval takes two examples, and a KL above 0"
            yield Finding(verdict, key, "KL", *means, reason=reason)
            continue
        verdict = "worse" if found.high < 1 else "better" if found.low > 1 else "same"
        told = f"{len(common)} examples, 95% interval {found.low:.3f} to {found.high:.3f}"
        noise = ", within noise" if verdict == "same" and found.estimate != 1 else ""
        yield Finding(verdict, key, "KL", *means, ratio=found.estimate, reason=told + noise)


def _warnings(base: SavedRun, new: SavedRun) -> list[str]:
    lines = []
    if base.place != new.place:
        lines.append(f"BASE ran on {base.place} and NEW on {new.place}: times say more about these than about the code")
    for name, before, after in (
        ("arguments", base.record.arguments, new.record.arguments),
        ("versions", base.now("versions"), new.now("versions")),
    ):
        differing = [
            f"{field} {before[field]} in BASE, {after[field]} in NEW"
            for field in sorted(before.keys() & after.keys())  # what one of them does not tell may have been the same
            if before[field] != after[field]
        ]
        if differing:
            lines.append(f"{name} differ: {'; '.join(differing)}")
    for label, run in (("BASE", base), ("NEW", new)):
        if run.record.outcome != "complete":
            lines.append(f"{label} is not a complete run: {run.record.outcome} ({run.record.outcome_reason or 'going on, or killed'})")
    return lines


def _shown(value: float | str | None) -> str:
    """Two decimals, and of less than 1 three figures: a KL may be small."""
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def _range(spread: tuple[float, float] | None) -> str:
    return f"{_shown(spread[0])}-{_shown(spread[1])}" if spread else "-"
