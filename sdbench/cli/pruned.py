"""What ``sdbench prune`` prints."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.suites.pruned import seconds_line, speed_lines
from sdbench.words import counted

if TYPE_CHECKING:
    from sdbench.calibrate.store import StoredShard
    from sdbench.suites.prune import PruneOutcome


def prune_document(output: Path, outcome: "PruneOutcome", shards: "Sequence[StoredShard]") -> dict[str, Any]:
    """The JSON document of a checkpoint that was written."""
    return {
        "schema": "sdbench.prune/1",
        "output": str(output),
        "dense_bytes": outcome.dense_bytes,
        "bytes": outcome.bytes,
        "resumed_layers": outcome.resumed,
        "seconds": outcome.seconds,
        "calibration": outcome.speed,
        "shards": [{name: getattr(shard.record, name) for name in ("shard", "seconds", "speed", "peak_bytes")} for shard in shards],
        "model_bytes": outcome.model_bytes,
        "peak_bytes": outcome.peak.bytes,
        "peak_bytes_reason": outcome.peak.reason,
        "streaming": outcome.streaming,
        "provenance": outcome.provenance,
    }


def prune_lines(output: Path, outcome: "PruneOutcome", shards: "Sequence[StoredShard]") -> list[str]:
    """The same for people."""
    found = outcome.provenance
    lines = [
        f"{output}: {found.source.model} at {found.pattern}, {found.method}, {found.format}",
        f"pruned layers: {len(found.layers)}" + (f", {outcome.resumed} of them by an earlier run" if outcome.resumed else ""),
    ]
    if rows := found.calibration.rows:
        counts = counted(rows.max, "row") if rows.min == rows.max else f"{rows.min} to {rows.max} rows"
        lines.append(f"calibration: {found.calibration.source}, {counted(len(found.calibration.examples), 'example')}, {counts} a layer")
    how, replies = found.calibration.report["generation"], found.calibration.report["replies"]
    if how and how.get("file"):
        read = counted(replies["count"], "reply", "replies")
        lines.append(f"calibration replies: {replies['tokens']:,} tokens of {read} from {how['file']}, replayed")
    lines += speed_lines(outcome.speed)
    for shard in shards:
        record = shard.record
        lines += [f"shard {record.shard}/{record.shards}: {line}" for line in (*speed_lines(record.speed), seconds_line(record.seconds))]
    lines.append(f"bytes of weights: {outcome.bytes:,}, {outcome.bytes / outcome.dense_bytes:.3f} of the dense model's")
    kind = "GPU memory" if found.calibration.arguments["device"] == "cuda" else "memory"
    if outcome.peak.bytes is None:
        lines.append(f"peak {kind}: unknown ({outcome.peak.reason})")
    else:
        alone = "what lies outside of its blocks" if outcome.streaming else "the model"
        before = f"{outcome.model_bytes / 1e9:.2f} GB with {alone} alone"
        lines.append(f"peak {kind}: {outcome.peak.bytes / 1e9:.2f} GB while calibrating and pruning, {before}")
    if streaming := outcome.streaming:
        most, hidden = streaming["peak_weight_bytes"] / 1e9, streaming["hidden_states"]
        line = f"streamed: {counted(streaming['blocks'], 'block')} of up to {streaming['block_bytes'] / 1e9:.2f} GB"
        line += f", {most:.2f} GB of weights at once"
        lines.append(line + (f", {hidden['bytes'] / 1e9:.2f} GB of hidden states on the {hidden['device']}" if hidden else ""))
    return [*lines, seconds_line(outcome.seconds), f"next: sdbench verify {output}"]


def shard_lines(shard: "StoredShard") -> list[str]:
    """A shard for people."""
    record = shard.record
    rows = {sums.rows for sums in record.layers.values()}
    lines = [
        f"{shard.folder}: shard {record.shard}/{record.shards} of {record.source.model}, {record.kind} of "
        f"{counted(len(record.layers), 'layer')}",
        f"calibration: {counted(len(record.examples), 'example')}, {counted(min(rows), 'row')} a layer"
        + (f" to {max(rows)}" if len(rows) > 1 else ""),
        *speed_lines(record.speed),
    ]
    if record.peak_bytes is not None:
        kind = "GPU memory" if record.arguments["device"] == "cuda" else "memory"
        lines.append(f"peak {kind}: {record.peak_bytes / 1e9:.2f} GB")
    return [
        *lines,
        seconds_line(record.seconds),
        f"next, once all {record.shards} are there: the same command with --merge {shard.folder.parent}",
    ]
