"""The end-to-end table and its JSON document."""

from collections.abc import Sequence
from typing import Any

from sdbench.suites.e2e.options import E2EOptions
from sdbench.suites.e2e.suite import Outcome
from sdbench.tables import Column, to_markdown

SCHEMA = "sdbench.e2e/1"

COLUMNS = (
    Column("arm", key=True),
    Column("match", figure=True),
    Column("EOS", figure=True),
    Column("cut off", figure=True),
    Column("tok/s", figure=True),
    Column("x dense", figure=True),
    Column("ceiling tok/s", figure=True),
    Column("kernel calls", figure=True),
    Column("peak GB", figure=True),
)


def table_rows(arms: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Formatted cells, a row an arm."""
    return [_cells(arm) for arm in arms]


def notes(options: E2EOptions, outcome: Outcome) -> list[str]:
    """Lines under the table: what was run, and why a figure is missing."""
    arms = outcome.arms
    lines = [
        f"pattern {options.pattern} ({options.method}), prefill on {options.prefill} weights",
        f"match, EOS and cut off (at {options.max_tokens} tokens) from answer runs; tok/s at exactly {options.equal_tokens} tokens on "
        f"every arm, median of {options.rate_repeats}; x dense is the speed-up over the fastest dense baseline",
    ]
    spreads = [(arm["arm"], arm["decode_rate_spread"]) for arm in arms if arm["decode_rate_spread"]]
    lines.append("tok/s, p20 to p80: " + ", ".join(f"{name} {spread['p20']:.1f} to {spread['p80']:.1f}" for name, spread in spreads))
    sources = outcome.calibration.get("sources") or {}
    if sources:
        rows = ", ".join(f"{name} {entry['rows']} of {entry['rows_available']}" for name, entry in sources.items())
        lines.append(f"calibration rows a layer, equal on every arm: {rows}")
    difference = outcome.calibration.get("replay_difference")
    if difference is not None:
        lines.append(f"decode statistics are replayed; on the first example live decode steps differ by {difference:.1e}")
    path, path_reason = arms[0]["path"], arms[0]["path_reason"]
    lines.append(f"decode loop, the same on every arm: {path}" + (f" ({path_reason})" if path_reason else ""))
    others = [f"{name} {rate:.1f} tok/s" for name, rate in arms[0]["baselines"].items() if rate]
    if len(others) > 1:
        lines.append(f"dense baselines of this run, speed-ups are over the fastest: {', '.join(others)}")
    variants = sorted({arm["variant"] for arm in arms if arm["variant"]})
    if variants:
        lines.append(f"decode steps of pruned linears ran the {', '.join(variants)} SpMV")
    if any(arm["peak_bytes"] for arm in arms[1:]):
        lines.append("peak GB of pruned arms holds the original weights too, and for --prefill pruned a dense copy of the pruned ones")
    for key, label in (
        ("quality_reason", "no quality"),
        ("decode_rate_note", "tok/s"),
        ("ceiling_reason", "no ceiling"),
        ("peak_bytes_reason", "no peak"),
    ):
        for reason in dict.fromkeys(arm[key] for arm in arms if arm[key]):
            lines.append(f"{label}: {reason}")
    for arm in arms[1:]:
        if arm["speedup_reason"]:
            lines.append(f"no speed-up for {arm['arm']}: {arm['speedup_reason']}")
    return lines


def document(options: E2EOptions, outcome: Outcome, environment: dict[str, Any], run_dir: str | None) -> dict[str, Any]:
    """The run as one JSON document."""
    return {
        "schema": SCHEMA,
        "model": options.spec.name,
        "model_reason": options.spec.reason,
        "environment": environment,
        "run_dir": run_dir,
        "options": options.arguments(),
        "calibration": outcome.calibration,
        "arms": outcome.arms,
    }


def markdown(options: E2EOptions, outcome: Outcome) -> str:
    """The table and its notes, for a job summary or a pull request."""
    lines = "".join(f"- {line}\n" for line in notes(options, outcome))
    return f"### {options.spec.name}: dense against pruned, batch 1\n\n{to_markdown(COLUMNS, table_rows(outcome.arms))}\n{lines}"


def wrong_calls(arms: Sequence[dict[str, Any]]) -> list[str]:
    """Arms whose SpMV launches are not pruned linears x decode steps, one line each."""
    return [
        f"{arm['arm']}: {arm['kernel_calls']} kernel calls, {arm['expected_kernel_calls']} expected"
        for arm in arms
        if arm["kernel_calls"] != arm["expected_kernel_calls"]
    ]


def _cells(arm: dict[str, Any]) -> list[str]:
    def of(key: str) -> str:
        return "-" if arm[key] is None else f"{arm[key]}/{arm['examples']}"

    def figure(key: str, form: str, scale: float = 1.0) -> str:
        return "-" if arm[key] is None else format(arm[key] * scale, form)

    return [
        arm["arm"],
        of("answer_match"),
        of("eos"),
        "-" if arm["truncated"] is None else str(arm["truncated"]),
        figure("decode_rate", ".1f"),
        figure("speedup", ".2f"),
        figure("ceiling", ".0f"),
        f"{arm['kernel_calls']}",
        figure("peak_bytes", ".2f", 1e-9),
    ]
