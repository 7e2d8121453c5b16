"""What a run of ``sdbench prune`` says of itself: its layers, and what the stages took."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sdbench.suites.runs import Report, SavedRun, measured
from sdbench.tables import Column


def of_run(run: SavedRun) -> Report:
    """The report of a run directory of ``sdbench prune``: what the method reports of its layers, which is nothing for magnitude."""
    layers = [measured(row) for row in run.latest("layer", "layer")]
    results = [measured(row) for row in run.latest("result")]
    names = list(dict.fromkeys(name for row in layers for name in row["report"]))
    columns = [Column("layer", key=True), *(Column(name.replace("_", " "), figure=True) for name in names)]
    cells = _once([[row["layer"], *(_figure(row["report"].get(name)) for name in names)] for row in layers])
    lines = [line for result in results for line in _lines(result)]
    document = {"schema": "sdbench.prune/1", "layers": layers, "result": results[-1] if results else None}
    arguments = run.record.arguments
    title = f"{arguments['model']}: layers pruned to {arguments['pattern']} by {arguments['method']}"
    records = [{"layer": row["layer"], **row["report"]} for row in layers]
    return Report(title, columns, cells, lines, document, records)


def _once(cells: list[list[str]]) -> list[list[str]]:
    """The layers of which most say the same as one line, and the others by name."""
    said = Counter(tuple(figures) for _, *figures in cells)
    for most, count in said.most_common(1):
        if count > 1:
            return [[f"{count} layers", *most], *(row for row in cells if tuple(row[1:]) != most)]
    return cells


def _lines(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{result['output']}: {result['bytes']:,} bytes of weights, {result['bytes'] / result['dense_bytes']:.3f} of the dense model's"
    ]
    peak, reason = result["peak_bytes"], result.get("peak_bytes_reason")
    unknown = f"unknown ({reason})" if reason else "unknown"
    lines.append(f"peak memory: {unknown if peak is None else f'{peak / 1e9:.2f} GB while calibrating and pruning'}")
    return [*lines, *speed_lines(result["calibration"]), seconds_line(result["seconds"])]


def speed_lines(speed: Mapping[str, Any]) -> list[str]:
    """How fast calibration replies were decoded and what collecting added; nothing where no reply was decoded."""
    if not speed["tokens_per_second"]:
        return []
    how, overhead = speed["generation"], speed["collection_overhead"]
    added = f"unknown ({speed['collection_overhead_reason']})" if overhead is None else f"{overhead:.1%} of that time"
    lines = [
        f"calibration replies: {speed['generated_tokens']:,} tokens at {speed['tokens_per_second']:,.0f} tok/s, "
        f"{how['batch']} at once by {how['path']}",
        f"collecting added, the replay check apart: {added}",
    ]
    return lines + ([f"not faster because: {how['reason']}"] if how["reason"] else [])


def seconds_line(seconds: Mapping[str, float]) -> str:
    """Wall time by stage."""
    return "seconds: " + ", ".join(f"{stage} {time:.1f}" for stage, time in seconds.items())


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
