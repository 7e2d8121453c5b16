"""The end-to-end results as a table and its notes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sdbench.engine.paths import EAGER, GRAPH, MERGED, loop_of
from sdbench.errors import SdbenchError
from sdbench.results import with_status
from sdbench.suites.e2e.arms import INT8, is_timed
from sdbench.suites.e2e.tables import behaviour_table, fidelity_table, harness_table, layer_table
from sdbench.suites.memory import memory_table
from sdbench.suites.runs import Report, Row, SavedRun, last_of, measured
from sdbench.tables import Column, spread
from sdbench.words import counted, median_of

SCHEMA = "sdbench.e2e/1"

ONLY_FIDELITY, NO_RATES = "not measured: --fidelity-only", "not measured: --rate-repeats 0"
"""Why a figure is missing where pruned arms are judged by fidelity alone, or by their answers alone; told once, under the table."""
NOT_ASKED = (ONLY_FIDELITY, NO_RATES)

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

TIMED = ("tok/s", "x dense", "ceiling tok/s", "peak GB")
"""Columns of the rate runs; a run without them leaves them out."""


def of_run(run: SavedRun) -> Report:
    """The report of a run directory of ``sdbench e2e``; arms that have answers and no rate yet stand under the table."""
    arms = run.latest("arm", "arm")
    calibration = [measured(row) for row in run.latest("calibration")]
    model = run.latest("model")
    made = report(
        run.record.arguments,
        run.now("environment"),
        [measured(arm) for arm in arms],
        calibration[0] if calibration else {},
        str(run.path),
        model[0]["reason"] if model else None,
        [measured(row) for row in run.latest("layer", "arm", "layer")],
    )
    lines = list(made.lines)
    attempts = {arm["arm"]: arm.get("attempt") for arm in arms}
    if len(set(attempts.values())) > 1:
        told = ", ".join(f"{name} in attempt {attempt}" for name, attempt in attempts.items())
        lines.append(f"arms were measured in different attempts, and a speed-up is over the dense arm of its own: {told}")
    answers = [sample["arm"] for sample in last_of(run.samples, "arm", "example")]
    lines += [
        f"{name}: {counted(answers.count(name), 'answer')}, not judged yet" for name in dict.fromkeys(answers) if name not in attempts
    ]
    return replace(made, lines=lines)


def report(
    arguments: Mapping[str, Any],
    environment: Mapping[str, Any],
    arms: Sequence[Row],
    calibration: Mapping[str, Any],
    run_dir: str,
    model_reason: str | None,
    layers: Sequence[Row] = (),
) -> Report:
    """What ``sdbench e2e`` shows.

    Args:
        arguments: The run's, as ``run.json`` has them.
        environment: The machine.
        arms: One record an arm, dense first.
        calibration: How the statistics came about.
        run_dir: The run directory.
        model_reason: Why it is this model; None where a run directory of an older version does not say.
        layers: Rows of ``--diagnose``.
    """
    document = {
        "schema": SCHEMA,
        "model": arguments["model"],
        "model_reason": model_reason,
        "environment": environment,
        "run_dir": run_dir,
        "options": arguments,
        "calibration": with_status(calibration),
        "arms": [with_status(arm) for arm in arms],
        "layers": [with_status(layer) for layer in layers],
    }
    lines = notes(arguments, arms, calibration) if arms else []
    title = f"{arguments['model']}: dense against pruned, batch 1"
    memory = memory_table(COLUMNS[:1], [([arm["arm"]], arm.get("memory")) for arm in arms])
    timed = is_timed(arguments.get("fidelity"), arguments.get("rate_repeats"))
    behaviour = behaviour_table(arms, timed)
    more = [table for table in (memory, behaviour, fidelity_table(arms), harness_table(arms), layer_table(layers)) if table]
    shown = [number for number, column in enumerate(COLUMNS) if timed or column.name not in TIMED]
    cells = [[row[number] for number in shown] for row in table_rows(arms)]
    return Report(title, [COLUMNS[number] for number in shown], cells, lines, document, arms, more=more)


def table_rows(arms: Sequence[Row]) -> list[list[str]]:
    """Formatted cells, a row an arm."""
    return [_cells(arm) for arm in arms]


def notes(arguments: Mapping[str, Any], arms: Sequence[Row], calibration: Mapping[str, Any]) -> list[str]:
    """Lines under the table: what was run, and why a figure is missing."""
    lines = [f"pattern {arguments['pattern']} ({arguments['method']}), prefill on {arguments['prefill']} weights"]
    if arguments.get("task"):
        lines[0] += f"; task {arguments['task']}, version {arguments['task_version']}"
    if arguments.get("profile"):
        other = f", with another {', '.join(arguments['profile_changed'])}" if arguments["profile_changed"] else ""
        lines.append(f"profile {arguments['profile']}{other}")
    if arguments.get("sequential") and calibration.get("sources") != {}:
        lines.append("each block calibrated on the pruned blocks before it")
    answered = f"match, EOS and cut off (at {counted(arguments['max_tokens'], 'token')}) from answer runs"
    if arguments.get("fidelity") == "only":
        lines.append("pruned arms are judged by fidelity alone (--fidelity-only): no answers of theirs, and nothing was timed")
    elif not arguments["rate_repeats"]:
        lines.append(f"{answered}; nothing was timed (--rate-repeats 0)")
    else:
        lines.append(
            f"{answered}; tok/s at exactly {arguments['equal_tokens']} tokens on every arm, {median_of(arguments['rate_repeats'])}; x "
            "dense is the speed-up over the fastest dense baseline"
        )
    if any(arm["arm"] == INT8 for arm in arms):
        lines.append("int8: nothing pruned; every linear but the output embedding rounded to 8 bits, one scale an output channel")
    if arguments.get("compare_model"):
        lines.append(f"{arguments['compare_model']}: another dense model, on the same questions with its own tokenizer")
    spreads = [(arm["arm"], spread(arm["decode_rate_spread"], to=" to ")) for arm in arms]
    if several := [f"{name} {shown}" for name, shown in spreads if shown != "-"]:
        lines.append(f"tok/s, p20 to p80: {', '.join(several)}")
    sources = calibration.get("sources") or {}
    if sources:
        rows = ", ".join(f"{name} {entry['rows']} of {entry['rows_available']}" for name, entry in sources.items())
        lines.append(f"calibration rows a layer, equal on every arm: {rows}")
    tests = [f"{arm['arm']} {arm['answer_match_p']:.2g}" for arm in arms if arm.get("answer_match_p") is not None]
    if tests:
        lines.append(f"answer match against the control's, exact McNemar p: {', '.join(tests)}")
    difference = calibration.get("replay_difference")
    if difference is not None:
        lines.append(f"decode statistics are replayed; on the first example live decode steps differ by {difference:.1e}")
    lines += _damping(arms)
    path, path_reason = arms[0]["path"], arms[0]["path_reason"]
    if path:
        alike = all(loop_of(arm["path"]) == path for arm in arms if arm["path"])
        lines.append(
            f"decode loop{', the same on every arm' if alike else ' of dense'}: {path}" + (f" ({path_reason})" if path_reason else "")
        )
    for arm in arms[1:]:
        if arm["path"] and arm["path"] != path:
            why = f" ({arm['path_reason']})" if arm["path_reason"] else ""
            lines.append(f"another decode loop on {arm['arm']}: {arm['path']}{why}")
    if arguments.get("device") == "cuda" and any(arm["pattern"] and arm["path"] in (GRAPH, EAGER) for arm in arms):
        lines.append(f"decoded by transformers' own forward: {MERGED}")
    others = [f"{name} {rate:.1f} tok/s" for name, rate in arms[0]["baselines"].items() if rate]
    if len(others) > 1:
        lines.append(f"dense baselines of this run, speed-ups are over the fastest: {', '.join(others)}")
    for name, reason in (arms[0].get("baselines_reason") or {}).items():
        lines.append(f"not timed: {name} ({reason})")
    failed = [arm for arm in arms if arm.get("outcome")]
    told = {*NOT_ASKED, *(not_measured(arm["reason"]) for arm in failed)}
    lines += [f"{arm['arm']}: not {'timed' if arm['examples'] else 'measured'}, {arm['outcome']} ({arm['reason']})" for arm in failed]
    variants = sorted({arm["variant"] for arm in arms if arm["variant"]})
    if variants:
        lines.append(f"decode steps of pruned linears ran the {', '.join(variants)} SpMV")
    # Rows without an account of it are of earlier runs, which kept them everywhere.
    held = [arm for arm in arms if arm["peak_bytes"] and (arm.get("memory") or {}).get("originals", "kept") in ("kept", "in use")]
    kinds = {"int8" if arm["arm"] == INT8 else "pruned": 0 for arm in held if arm["pattern"] or arm["arm"] == INT8}
    if kinds:
        lines.append(f"peak GB of {' and '.join(kinds)} arms holds the original weights too")
    for key, label in (
        ("quality_reason", "no quality"),
        ("answer_match_reason", "no match"),
        ("score_reason", "no score"),
        ("decode_rate_note", "tok/s"),
        ("ceiling_reason", "no ceiling"),
        ("peak_bytes_reason", "no peak"),
        ("memory_reason", "no memory"),
        ("fidelity_reason", "no fidelity"),
    ):
        for reason in dict.fromkeys(arm[key] for arm in arms if arm.get(key) and arm[key] not in told):
            lines.append(f"{label}: {reason}")
    for arm in arms[1:]:
        if arm["speedup_reason"] and arm["speedup_reason"] not in told:
            lines.append(f"no speed-up for {arm['arm']}: {arm['speedup_reason']}")
    return lines


def _damping(arms: Sequence[Row]) -> list[str]:
    """What SparseGPT's factorisations took, arms of the same damping in one line: raised damping is never silent."""
    told: dict[str, list[str]] = {}
    for arm in arms:
        layers = [layer for layer in (arm.get("layers") or {}).values() if "damp_used" in layer]
        if layers:
            raised = [layer["damp_used"] for layer in layers if layer["damp_used"] > layer["damp"]]
            text = f"{layers[0]['damp']:g} of the {layers[0]['damp_by']} diagonal"
            text += f", raised in {len(raised)} of {len(layers)} layers, to {max(raised):g} at most" if raised else ""
            told.setdefault(text, []).append(arm["arm"])
    return [f"damping of {', '.join(names)}: {text}" for text, names in told.items()]


def not_measured(reason: str) -> str:
    """Why an arm that failed has no figure; its row has the bare reason too, beside its outcome."""
    return f"not measured: {reason}"


def require_some(arms: Sequence[Row]) -> None:
    """Fails a run, once its rows are out, of which no arm could be measured.

    Raises:
        SdbenchError: All of them failed; the first reason.
    """
    if all(arm.get("outcome") for arm in arms):
        raise SdbenchError(f"no arm could be measured; {arms[0]['arm']}: {arms[0]['reason']}")


def wrong_calls(arms: Sequence[Row]) -> list[str]:
    """Arms of which a decode step went round a packed weight (calls are not pruned products x decode steps), one line each."""
    return [
        f"{arm['arm']}: {arm['kernel_calls']} kernel calls, {arm['expected_kernel_calls']} expected"
        for arm in arms
        if arm["kernel_calls"] != arm["expected_kernel_calls"]
    ]


def _cells(arm: Row) -> list[str]:
    def of(key: str) -> str:
        count = arm.get("graded", arm["examples"]) if key == "answer_match" else arm["examples"]
        return "-" if arm[key] is None else f"{arm[key]}/{count}"

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
