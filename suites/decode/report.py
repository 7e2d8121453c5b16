"""The decode suite's tables."""

from collections.abc import Sequence
from typing import Any

from sdbench.engine.paths import MERGED
from sdbench.suites.decode.batches import batch_of, batch_table, way_of
from sdbench.suites.memory import memory_table
from sdbench.suites.runs import Report, SavedRun, Table, measured
from sdbench.tables import Column, spread
from sdbench.words import counted, median_of

SCHEMA = "sdbench.decode/1"
Row = dict[str, Any]

PROFILED = (
    "time from the end of the kernel before to its own, so that kernels that overlap count once; recording makes the step a few percent "
    "longer than the table's; gate is SiLU(gate) * up; dense products are the 8-bit ones in an int8 arm"
)

KEYS = (Column("arm", key=True), Column("way", key=True), Column("context", key=True))

COLUMNS = (
    *KEYS,
    Column("tok/s", figure=True),
    Column("p20-p80", figure=True),
    Column("x dense", figure=True),
    Column("ms a token", figure=True),
    Column("TTFT ms", figure=True),
)

STEP = (
    *KEYS,
    Column("GB a token", figure=True),
    Column("GB/s", figure=True),
    Column("% ceiling", figure=True),
    Column("kernels", figure=True),
    Column("start s", figure=True),
)

PROMPTS = (
    *(Column(name, key=True) for name in ("arm", "context")),
    *(Column(name, figure=True) for name in ("dense ms", "pruned ms", "x dense", "p20-p80")),
)

MEMORY = {"parameters": "model", "packed": "packed", "cache": "cache", "workspace": "other", "resident": "resident", "peak": "peak"}
"""What a row says of memory, and its heading."""


def report(rows: Sequence[Row], arguments: Row, environment: Row) -> Report:
    """The table, its notes, the profiles and the JSON document.

    Args:
        rows: Judged rows of the suite.
        arguments: The run's.
        environment: The machine.
    """
    lines = [
        f"exactly {arguments['tokens']} tokens after the prompt, EOS ignored, {median_of(arguments['repeats'])}; x dense is over the "
        "fastest dense way at that context",
        *_legend(rows),
        "pruned by magnitude: only speed is measured",
    ]
    everything, rows = rows, [row for row in rows if batch_of(row) == 1]
    for row in everything:
        if row["outcome"] != "correct":
            several = f", {batch_of(row)} prompts" if batch_of(row) > 1 else ""
            lines.append(f"{row['arm']}, {row['path']}, {row['context']}{several}: {row['outcome']} ({row['reason']})")
        elif row["speedup"] is None and row["decode_rate"] and any(other["arm"] == "dense" for other in everything):
            several = f", {batch_of(row)} prompts" if batch_of(row) > 1 else ""
            what = f"{row['arm']}, {way_of(row)}, {row['context']}{several}"
            lines.append(f"no x dense for {what}: dense weights have no rate by the same loop")
    lines += [*_graphs(everything), *_dense_products(everything), *_lone_contexts(everything)]
    if "device_map" in arguments:
        count = max(row["devices"] for row in everything)
        lines.append(
            f"--device-map {arguments['device_map']}: the model lies on {counted(count, 'GPU')}, which work one after the other; eager "
            f"forwards are bound by launches, and the ceiling is that of one GPU's bandwidth; {MERGED}"
        )
    if all(row["ceiling"] is None for row in everything):
        lines.append("no GPU: rates say nothing about GPU speed, and there is no ceiling")
    document = {"schema": SCHEMA, "model": arguments["model"], "environment": environment, "rows": list(everything)}
    batches = [batch_table(everything)] if len(everything) > len(rows) else []
    if batches and not rows:
        (table,) = batches
        return Report(f"{arguments['model']}: {table.title}", table.columns, table.cells, [*lines, *table.lines], document, everything)
    profiles = [_profile(row) for row in rows if row["profile"]]
    return Report(
        f"{arguments['model']}: decoding at batch 1",
        COLUMNS,
        [_cells(row) for row in rows],
        lines,
        document,
        everything,
        more=[
            *batches,
            *filter(None, [_prompts(rows)]),
            _step(rows),
            _memory(rows),
            *filter(None, [memory_table(KEYS, [(_keys(row), row["memory"]) for row in rows])]),
            *profiles,
        ],
    )


def of_run(run: SavedRun) -> Report:
    """The report of a run directory."""
    from sdbench.suites.decode.suite import judge, with_prompts

    kinds = {"decode": ("arm", "path", "context"), "batch": ("arm", "path", "context", "batch")}
    rows = [measured(row) for kind, key in kinds.items() for row in run.latest(kind, *key)]
    rows = judge(with_prompts(rows, run.latest("prompt", "arm", "context")))
    return report(rows, run.record.arguments, run.now("environment"))


def _legend(rows: Sequence[Row]) -> list[str]:
    paths: dict[str, dict[str, None]] = {}
    for row in rows:
        paths.setdefault(way_of(row), {})[row["path"]] = None
    told = [f"{way}: {' or '.join(names)}" for way, names in paths.items() if [*names] != [way]]
    return [f"ways: {'; '.join(told)}"] if told else []


def _graphs(rows: Sequence[Row]) -> list[str]:
    """What capturing took, a line an arm."""
    captured = [row for row in rows if row["capture"]]
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in captured):
        of_arm = [row for row in captured if row["arm"] == arm]
        contexts = _range([row["context"] for row in of_arm], 0)
        seconds = _range([row["capture"]["seconds"] for row in of_arm], 1)
        megabytes = _range([row["capture"]["bytes"] / 1e6 for row in of_arm], 0)
        lines.append(f"graph of {arm} at {contexts}: {seconds} s, {megabytes} MB (compilation included)")
    return lines


def _dense_products(rows: Sequence[Row]) -> list[str]:
    """Which kernels the dense weights of a fused step are multiplied by."""
    used: dict[str, list[int]] = {}
    for row in rows:
        if row["arm"] == "dense" and row.get("products"):
            batches = used.setdefault(" and ".join(row["products"]), [])
            batches += [batch_of(row)] if batch_of(row) not in batches else []
    told = [f"{names} at batch {', '.join(map(str, batches))}" for names, batches in used.items()]
    return [f"dense products of the fused step, the faster of two by the clock: {'; '.join(told)}"] if told else []


def _lone_contexts(rows: Sequence[Row]) -> list[str]:
    """Contexts at which the dense weights were decoded in one way alone, where another had more."""
    ways: dict[int, set[str]] = {}
    for row in rows:
        if row["arm"] == "dense" and row["decode_rate"] and batch_of(row) == 1:
            ways.setdefault(row["context"], set()).add(way_of(row))
    lone = [str(context) for context, names in ways.items() if len(names) == 1]
    if not lone or len(lone) == len(ways):
        return []
    return [f"at {', '.join(lone)} of context one dense way was timed, and x dense is over that one: others are timed at the first context"]


def _step(rows: Sequence[Row]) -> Table:
    cells = [
        [
            *_keys(row),
            _figure(row["step_bytes"], 3, 1e-9),
            _figure(row["gbps"], 0),
            _figure(row["of_ceiling"], 0, 100),
            _figure(row["kernels"], 0),
            _figure(row.get("start_seconds"), 1),
        ]
        for row in rows
    ]
    note = (
        "GB a token and ceiling at half of the reply; % ceiling: of the rate at which the read bandwidth measured in this run would read "
        "GB a token; kernels: launches a token; start s: from weights in place to the first token, with compilation where the cache has no "
        "kernel yet, checks and capture"
    )
    return Table("a step, and its start", STEP, cells, [note])


def _prompts(rows: Sequence[Row]) -> Table | None:
    """Those of an arm that were measured in turn with the dense ones; None where none were."""
    prompts = {(row["arm"], row["prompt"]["context"]): row["prompt"] for row in rows if row.get("prompt")}
    if not prompts:
        return None
    cells, lines = [], []
    for (arm, _), prompt in prompts.items():
        ratio = prompt["ratio"]
        if ratio is None:
            lines.append(f"prompt of {arm}, {prompt['context']}: {prompt['outcome']} ({prompt['reason']})")
            continue
        milliseconds = (f"{1e3 * prompt[name]['p50']:.1f}" for name in ("dense_seconds", "pruned_seconds"))
        cells.append([arm, str(prompt["context"]), *milliseconds, f"{ratio['p50']:.2f}", spread(ratio, ".2f")])
    pairs = max(prompt["pairs"] for prompt in prompts.values())
    often = "once" if pairs == 1 else f"{pairs} times"
    note = (
        f"each prompt {often} on dense and on packed weights, one right after the other, by transformers' own forward; x dense: dense over "
        "pruned seconds of a pair, median; packed linears of one input may be one product, dense ones are not. TTFT ms above is what each "
        "arm took by itself, at another time"
    )
    return Table("prompts, dense and pruned in turn", PROMPTS, cells, [note, *lines])


def _memory(rows: Sequence[Row]) -> Table:
    columns = (*KEYS, *(Column(f"{heading} GB", figure=True) for heading in MEMORY.values()))
    cells = [[*_keys(row), *(_figure((row["memory"] or {}).get(name), 2, 1e-9) for name in MEMORY)] for row in rows]
    own, steps_read = "its own parameters", "pruned or 8-bit rows that steps read"
    if not any("weights" in (row["memory"] or {}) for row in rows):
        # Earlier runs had the prompt on dense matrices, and packed rows of one input a second time, in one stack.
        own += ", with the dense matrices of pruned linears, which the prompt runs on"
        steps_read += ", and the modules' own"
    note = f"model: {own}; packed: {steps_read}; cache: keys and values of the fused step; other: what else the decoder needs"
    return Table("memory", columns, cells, [note])


def _profile(row: Row) -> Table:
    columns = (Column("kernels", key=True), Column("us a step", figure=True), Column("launches", figure=True))
    cells = [[kind, f"{entry['us']:.0f}", f"{entry['launches']:.0f}"] for kind, entry in row["profile"].items()]
    return Table(f"a step of {row['arm']} at {row['context']} of context", columns, cells, [PROFILED])


def _cells(row: Row) -> list[str]:
    rate = row["decode_rate"]
    return [
        *_keys(row),
        _figure(rate and rate["p50"], 1),
        spread(rate),
        _figure(row["speedup"], 2),
        _figure(row["ms_per_token"], 3),
        _figure(row["ttft_ms"], 1),
    ]


def _keys(row: Row) -> list[str]:
    return [row["arm"], way_of(row), str(row["context"])]


def _figure(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def _range(values: Sequence[float], digits: int) -> str:
    ends = dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values)))
    return " to ".join(ends)
