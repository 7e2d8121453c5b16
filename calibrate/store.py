"""Sums of inputs on disk: several processes calibrate on a share of the examples each, and one adds up what they wrote.

A shard is a folder with ``statistics.json``, written last, and a file for each sum; layers that are fed the same tensor share one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdbench.calibrate.collect import InputSums, StatisticsKind
from sdbench.checkpoints.provenance import Example, Source, file_sha256
from sdbench.errors import CheckFailed, SdbenchError, UsageError
from sdbench.results import strict_json, write_atomic

SCHEMA: Literal["sdbench.statistics/1"] = "sdbench.statistics/1"
RECORD = "statistics.json"


class StoredSums(BaseModel):
    """One layer's rows, their weight, and the file that holds its sum."""

    model_config = ConfigDict(extra="forbid")

    rows: int
    weight: float
    file: str


class ShardRecord(BaseModel):
    """The contents of ``statistics.json``: what was summed, over which examples (by number and id), and the files' SHA-256."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal["sdbench.statistics/1"] = Field(default=SCHEMA, alias="schema")
    shard: int
    shards: int
    kind: StatisticsKind
    source: Source
    arguments: dict[str, Any]
    numbers: list[int]
    examples: list[Example]
    report: dict[str, Any]
    layers: dict[str, StoredSums]
    files: dict[str, str]
    seconds: dict[str, float]
    speed: dict[str, Any]
    peak_bytes: int | None


@dataclass(frozen=True)
class StoredShard:
    """A shard's folder and its record."""

    folder: Path
    record: ShardRecord


def write_sums(folder: Path, turns: Iterable[dict[str, InputSums]]) -> tuple[dict[str, StoredSums], dict[str, str]]:
    """Writes sums as they come, and lets go of each.

    Args:
        folder: Where to; it is there already.
        turns: Sums of all layers, some at a time.

    Returns:
        What a record holds as ``layers`` and ``files``.

    Raises:
        SdbenchError: The disk is full, say.
    """
    layers: dict[str, StoredSums] = {}
    files: dict[str, str] = {}
    for sums in turns:
        names: dict[int, str] = {}
        for layer, found in sums.items():
            if id(found.total) not in names:
                name = names[id(found.total)] = f"sums-{len(files):05d}.safetensors"
                try:
                    save_file({"total": found.total.cpu()}, folder / name)
                    (folder / name).chmod(0o644)
                except OSError as error:
                    raise SdbenchError(f"cannot write {folder / name}: {error.strerror}") from error
                files[name] = file_sha256(folder / name)
            layers[layer] = StoredSums(rows=found.rows, weight=found.weight, file=names[id(found.total)])
        sums.clear()
    return layers, files


def write_record(folder: Path, record: ShardRecord) -> None:
    """Writes ``statistics.json``, which makes the folder a shard."""
    write_atomic(folder / RECORD, strict_json(record, indent=2) + "\n")


def read_shards(folder: Path) -> list[StoredShard]:
    """The shards in a folder's folders, by number: all of them, each once, of one model, command and set of examples.

    Raises:
        UsageError: The folder holds none.
        CheckFailed: A shard is missing, doubled, damaged, or disagrees with the first.
    """
    found = [StoredShard(path.parent, _read(path)) for path in sorted(folder.glob(f"*/{RECORD}"))] if folder.is_dir() else []
    if not found:
        raise UsageError(f"{folder} holds no shard (a folder with {RECORD}); make them with --shard I/N --statistics {folder}")
    first = found[0]
    by_number: dict[int, StoredShard] = {}
    for shard in found:
        for what, value, other in _identity(first.record, shard.record):
            if value != other:
                values = f"{strict_json(value)} there, {strict_json(other)} here"
                raise CheckFailed(
                    f"{first.folder} and {shard.folder} differ in {what} ({_short(values)}); collect them by the same command"
                )
        twin = by_number.setdefault(shard.record.shard, shard)
        if twin is not shard:
            raise CheckFailed(f"{twin.folder} and {shard.folder} both are shard {shard.record.shard}; remove one of them")
    count = first.record.shards
    if missing := sorted(set(range(1, count + 1)) - set(by_number)):
        raise CheckFailed(f"{folder}: shard {missing[0]}/{count} is missing; collect it with --shard {missing[0]}/{count}")
    return [by_number[number] for number in sorted(by_number)]


def merged(shards: Sequence[StoredShard], names: Iterable[str], device: torch.device) -> Iterator[dict[str, InputSums]]:
    """The shards' sums added up in float32, those of layers with a common sum at a time; rows and weights add up exactly.

    Args:
        shards: From `read_shards`.
        names: Layers that are wanted.
        device: Where to add.

    Raises:
        CheckFailed: The shards hold no sums of a layer, or a file was changed.
    """
    together: dict[str, list[str]] = {}
    for name in names:
        if name not in shards[0].record.layers:
            raise CheckFailed(
                f"layer {name}: the shards in {shards[0].folder.parent} hold no statistics of it; collect with the same targets"
            )
        together.setdefault(shards[0].record.layers[name].file, []).append(name)
    for file, sharing in together.items():
        total = _load(shards[0], file, device)
        for shard in shards[1:]:
            total += _load(shard, file, device)
        stored = [shard.record.layers[sharing[0]] for shard in shards]
        rows, weight = sum(layer.rows for layer in stored), sum(layer.weight for layer in stored)
        sums = {name: InputSums(name, rows, weight, total) for name in sharing}
        del total
        yield sums


def merge_reports(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The shards' reports as one process would have given it, where that can be said: counts added up, extremes of all."""
    first = reports[0]
    replies = [report["replies"] for report in reports if report["replies"]]
    differences = [report["replay_difference"] for report in reports if report["replay_difference"] is not None]
    sources: dict[str, dict[str, Any]] = {}
    for report in reports:
        for source, counts in report["sources"].items():
            sources[source] = _added(sources.get(source, {}), counts)
    return {
        **first,
        "replies": {
            "count": sum(reply["count"] for reply in replies),
            "tokens": sum(reply["tokens"] for reply in replies),
            "shortest": min(reply["shortest"] for reply in replies),
            "longest": max(reply["longest"] for reply in replies),
        }
        if replies
        else None,
        "replay_difference": max(differences, default=None),
        "sources": sources,
    }


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Counts, and counts by name within them, added up."""
    names = dict.fromkeys((*one, *other))
    nested = {name: isinstance(other.get(name, one.get(name)), Mapping) for name in names}
    return {
        name: _added(one.get(name, {}), other.get(name, {})) if nested[name] else one.get(name, 0) + other.get(name, 0) for name in names
    }


def _identity(one: ShardRecord, other: ShardRecord) -> Iterator[tuple[str, Any, Any]]:
    """What shards of one calibration have in common: name, and the value of each."""
    yield "the number of shards", one.shards, other.shards
    yield "the model", one.source.sha256, other.source.sha256
    yield "the kind of statistics", one.kind, other.kind
    for name in dict.fromkeys((*one.arguments, *other.arguments)):
        if name != "shard":
            yield name.replace("_", "-"), one.arguments.get(name), other.arguments.get(name)
    files, others = ({layer: sums.file for layer, sums in record.layers.items()} for record in (one, other))
    yield "the layers", files, others


def _load(shard: StoredShard, file: str, device: torch.device) -> Tensor:
    path = shard.folder / file
    if not path.is_file() or file_sha256(path) != shard.record.files.get(file):
        raise CheckFailed(f"{path} is missing or was changed after it was written: another SHA-256 than {RECORD} lists; collect it again")
    return load_file(path, device=str(device))["total"]


def _read(path: Path) -> ShardRecord:
    try:
        return ShardRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "the file"
        raise CheckFailed(f"{path} is no {SCHEMA} record ({where}: {problem['msg']}); collect it again") from error


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
