"""Writing a pruned checkpoint: into a folder beside the output that takes its name at the end, so that nothing half-written looks whole."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from sdbench.checkpoint_files import INDEX, PROVENANCE_FILE, WEIGHTS
from sdbench.checkpoints.layout import GUARD, Format, layer_tensors, quantization_config, stored_shapes
from sdbench.checkpoints.provenance import Origin, Provenance, file_sha256, make_provenance, tensor_sha256
from sdbench.errors import SdbenchError, UsageError
from sdbench.packing import StoredWeight
from sdbench.pattern import Pattern
from sdbench.results import strict_json, write_atomic
from sdbench.streaming import unique_state

SHARD_BYTES = 2_000_000_000
"""Largest weight file by default: as much, and once more while it is saved, is in main memory."""
SLACK_BYTES = 64 << 20
"""Room for the tokenizer and the JSON files."""


def checkpoint_bytes(model: nn.Module, layers: Mapping[str, nn.Linear], pattern: Pattern, kind: Format) -> int:
    """Bytes that the checkpoint's tensors will take on disk.

    Args:
        model: The dense model.
        layers: Its linears that are pruned, by name.
        pattern: N:M.
        kind: Packed or dense.
    """
    total = sum(tensor.nbytes for tensor in unique_state(model).values())
    if kind == "packed":
        total += sum(packed_bytes(linear, pattern) - linear.weight.nbytes for linear in layers.values())
    return total


def packed_bytes(linear: nn.Linear, pattern: Pattern) -> int:
    """Bytes of a linear's weight in storage form."""
    shapes = stored_shapes(linear.out_features, linear.in_features, pattern)
    (rows, kept), (_, mask) = shapes["compressed"], shapes["bitmask"]
    return rows * (kept * linear.weight.element_size() + mask)


def require_free(output: Path) -> None:
    """Refuses an output that is there already.

    Raises:
        UsageError: Something has this name.
    """
    if output.exists() or output.is_symlink():
        raise UsageError(f"{output} is there already; choose another --output, or remove it")


def require_disk(wanted: Mapping[Path, int]) -> None:
    """Refuses to begin what a disk has no room for.

    Args:
        wanted: What will be written -> bytes, without slack; what lies on one disk, as the nearest existing folders say, is added up.

    Raises:
        SdbenchError: Not enough room.
    """
    disks: dict[int, tuple[Path, Path, int]] = {}
    for path, nbytes in wanted.items():
        there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
        first, _, before = disks.get(there.stat().st_dev, (path, there, SLACK_BYTES))
        disks[there.stat().st_dev] = first, there, before + nbytes
    for path, there, nbytes in disks.values():
        free = shutil.disk_usage(there).free
        if free < nbytes:
            raise SdbenchError(
                f"not enough disk for {path}: {_gigabytes(nbytes)} GB are needed and {_gigabytes(free)} GB are free; "
                "make room or choose another place"
            )


def write_checkpoint(
    output: Path,
    model: Any,
    tokenizer: Any,
    origin: Origin,
    load: Callable[[str], StoredWeight],
    kind: Format = "packed",
    shard_bytes: int = SHARD_BYTES,
    on_tensor: Callable[[], None] = lambda: None,
    read: Callable[[str], Tensor] | None = None,
) -> Provenance:
    """Writes a checkpoint folder.

    Args:
        output: The folder, not there yet.
        model: The dense transformers model, for everything that is not pruned.
        tokenizer: Its tokenizer, or None.
        origin: Where the pruned weights come from; its ``layers`` says which linears are pruned.
        load: Gives the pruned weight of a layer by its name; each is asked for once and not kept.
        kind: ``"packed"``, or ``"dense"`` for an ordinary checkpoint with zeros that any stack reads.
        shard_bytes: Largest weight file; a larger tensor has one of its own.
        on_tensor: Called after each parameter or layer, for progress.
        read: Gives a tensor that is not pruned by its name; None for what stands in the model.

    Returns:
        What ``sdbench.json`` holds.

    Raises:
        UsageError: The output is there already.
        SdbenchError: Not enough room, or the folder cannot be written.
    """
    require_free(output)
    pattern = Pattern.parse(origin.pattern)
    state = unique_state(model)
    given = read or state.__getitem__
    clear_draft(output)
    require_disk({output: checkpoint_bytes(model, {name: model.get_submodule(name) for name in origin.layers}, pattern, kind)})

    def entries() -> Iterator[dict[str, Tensor]]:
        for name in state:
            layer = name.removesuffix(f".{GUARD}")
            yield layer_tensors(layer, load(layer), kind) if layer in origin.layers else {name: given(name).cpu().contiguous()}
            on_tensor()

    with draft_of(output) as draft:
        hashes, weights = _write_shards(draft, entries(), shard_bytes)
        config = model.config.to_dict()
        config.pop("quantization_config", None)
        # What from_config leaves out: the class, which serving stacks go by, and the number type.
        config |= {"architectures": [type(model).__name__], "dtype": origin.source.dtype}
        if kind == "packed":
            config["quantization_config"] = quantization_config(pattern, list(origin.layers))
        write_atomic(draft / "config.json", strict_json(config, indent=2) + "\n")
        if model.generation_config is not None:
            model.generation_config.to_json_file(draft / "generation_config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        names = [path.relative_to(draft).as_posix() for path in sorted(draft.rglob("*")) if path.is_file()]
        files = {name: weights.get(name) or file_sha256(draft / name) for name in names}
        provenance = make_provenance(origin, kind, hashes, files)
        write_atomic(draft / PROVENANCE_FILE, strict_json(provenance, indent=2) + "\n")
    return provenance


def clear_draft(output: Path) -> Path:
    """Removes what a killed run left of an output, which takes room; returns where its draft is written."""
    draft = output.with_name(f".{output.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    return draft


@contextmanager
def draft_of(output: Path) -> Iterator[Path]:
    """A fresh folder beside the output, which takes its name when the block ends without an error, and else goes away.

    Raises:
        SdbenchError: It cannot be written.
    """
    draft = clear_draft(output)
    try:
        draft.mkdir(parents=True)
        yield draft
        _sync(draft)
        draft.rename(output)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SdbenchError(f"cannot write {output}: {reason}; nothing was left there") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_shards(folder: Path, entries: Iterator[dict[str, Tensor]], limit: int) -> tuple[dict[str, str], dict[str, str]]:
    """Writes one weight file after the other, holding no more than one in memory; returns each tensor's and each file's SHA-256."""
    hashes: dict[str, str] = {}
    shards: list[list[str]] = []
    digests: list[str] = []
    pending: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        nonlocal pending
        shards.append(list(pending))
        save_file(pending, _part(folder, len(shards)), metadata={"format": "pt"})
        # safetensors makes it private, unlike every other file here.
        _part(folder, len(shards)).chmod(0o644)
        # Here and not at the end, where no step of progress is left for it.
        digests.append(file_sha256(_part(folder, len(shards))))
        pending = {}

    for entry in entries:
        size = sum(tensor.nbytes for tensor in entry.values())
        if pending and sum(tensor.nbytes for tensor in pending.values()) + size > limit:
            flush()
        pending |= entry
        hashes |= {name: tensor_sha256(tensor) for name, tensor in entry.items()}
        total += size
    flush()
    if len(shards) == 1:
        _part(folder, 1).rename(folder / WEIGHTS)
        return hashes, {WEIGHTS: digests[0]}
    weight_map: dict[str, str] = {}
    files: dict[str, str] = {}
    for number, (names, digest) in enumerate(zip(shards, digests, strict=True), start=1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _part(folder, number).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
        files[final] = digest
    write_atomic(folder / INDEX, strict_json({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    return hashes, files


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.safetensors"


def _sync(folder: Path) -> None:
    """Waits until the files are on disk, so that the new name can't survive a crash without them."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f}"
