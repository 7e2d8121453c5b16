"""Times the ways to decode a model, dense and pruned, at each context length; quality plays no part, so weights are pruned by magnitude."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from sdbench.calibrate.magnitude import keep_mask
from sdbench.calibrate.select import select_linears
from sdbench.devices import devices_of
from sdbench.engine.decoders import Decoder, named
from sdbench.engine.fused import FusedDecoder
from sdbench.engine.greedy import Reply, clock, position_limit
from sdbench.engine.packed_linear import PackedLinear, packed_linears, require_right
from sdbench.engine.paths import EAGER, FUSED, FUSED_GRAPH, loop_of
from sdbench.engine.resident import weights_memory
from sdbench.errors import CheckFailed, SdbenchError, UsageError, one_line
from sdbench.kernels.read import read_bandwidth
from sdbench.memory import peak_memory, resident_bytes, storage_bytes
from sdbench.models import LoadedModel, load_model
from sdbench.packing import PackedWeight, pack
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.decode.batches import batch_of
from sdbench.suites.decode.options import DENSE, INT8, DecodeOptions
from sdbench.suites.decode.profile import profile
from sdbench.suites.decode.prompts import in_turn
from sdbench.suites.decode.ways import Way, measured_for, next_for, ways_of
from sdbench.suites.e2e.ceiling import step_bytes
from sdbench.suites.e2e.failures import FAILURES, failure_of
from sdbench.suites.memory import beside_dense
from sdbench.suites.metrics import decode_rate
from sdbench.suites.runs import measured, require_same_gpu
from sdbench.timing import summarise
from sdbench.words import counted

Row = dict[str, Any]
T = TypeVar("T")
_PROBE_BYTES = 1 << 30
_NO_ROOM = "can't allocate memory"
"""What torch says of a CPU; of a GPU it has an error of its own."""
_FIGURES = (
    *("decode_rate", "ms_per_token", "ttft_ms", "start_seconds", "step_bytes", "gbps", "ceiling", "of_ceiling"),
    *("kernels", "capture", "memory", "profile", "products", "reason"),
)


def run(options: DecodeOptions, directory: RunDirectory | None, progress: Progress) -> list[Row]:
    """Times every way; those that a resumed run directory holds are kept.

    Args:
        options: What to time.
        directory: Where rows go as they finish; None to keep them in memory alone.
        progress: Where to report.

    Returns:
        A row a way and context, with ``speedup`` over the fastest way to decode the dense weights at that context.

    Raises:
        SdbenchError: The directory holds rows of another GPU.
    """
    if directory and options.device.type == "cuda":
        require_same_gpu(directory)
    kept_rows = directory.rows if directory else []
    done = {Way.of(row): row for row in kept_rows if row["record"] in ("decode", "batch")}
    prompts = {(row["arm"], row["context"]): row for row in kept_rows if row["record"] == "prompt"}
    ways = ways_of(options)
    loaded: LoadedModel | None = None
    kept = sum(next_for(way, done, options) is None for way in ways)
    if kept:
        progress.note(f"{kept} of {counted(len(ways), 'row')} kept from an earlier attempt; choose another --output to measure them again")
    if options.device.type != "cuda":
        progress.note("no GPU: int8 weights, CUDA graphs and torch.compile are left out")

    def keep(way: Way, row: Row) -> None:
        if directory:
            directory.add_row({"record": "decode" if way.batch == 1 else "batch", **row})
        done[way] = row

    with progress.task("decode", len(ways)) as task:
        for arm in dict.fromkeys(way.arm for way in ways):
            ours = [way for way in ways if way.arm == arm]
            missing = [way for way in ours if next_for(way, done, options)]
            task.advance(len(ours) - len(missing))
            pruned = arm not in (DENSE, INT8) and 1 in options.batches
            contexts = [context for context in options.contexts if pruned and (arm, context) not in prompts]
            if not missing and not contexts:
                continue
            if loaded is None:
                loaded = load_model(options.spec, options.device, options.dtype, progress.note, options.device_map)
                _require_positions(options, loaded)
            linears: dict[str, nn.Linear] = select_linears(loaded.model, options.targets, options.ignore)
            with ExitStack() as stack:
                try:
                    packed = stack.enter_context(_pruned(arm, loaded, linears))
                except FAILURES as error:
                    for way in missing:
                        keep(way, _blank(way, loaded, options) | failure_of(error))
                        task.advance()
                    continue
                for way in missing:
                    while tried := next_for(way, done, options):
                        keep(tried, _measure(tried, loaded, packed, options))
                    task.advance()
                # Last, since the dense weights come to the GPU for it, which the last way's cache leaves, and stay there.
                gc.collect()
                asked = [_prompts(loaded, options, context, 1)[0] for context in contexts]
                for found in in_turn(loaded.model, packed, linears, asked, options.repeats):
                    row = {"arm": arm, **found}
                    if directory:
                        directory.add_row({"record": "prompt", **row})
                    prompts[arm, row["context"]] = row
    shown = dict.fromkeys(tried for way in ways for tried in measured_for(way, done, options))
    return judge(with_prompts([measured(done[tried]) for tried in shown], prompts.values()))


def with_prompts(rows: list[Row], prompts: Iterable[Row]) -> list[Row]:
    """Rows with what was measured of their arm's prompts in turn with the dense ones, as ``prompt``; None where nothing was."""
    found = {(prompt["arm"], prompt["context"]): measured(prompt) for prompt in prompts}
    return [row | {"prompt": found.get((row["arm"], row["context"])) if batch_of(row) == 1 else None} for row in rows]


def judge(rows: list[Row]) -> list[Row]:
    """Adds each row's speed-up over the fastest bf16 (or unrounded) dense way at its context and batch; None without one.

    None also where dense weights were not decoded by the row's own loop: the ratio would be one of loops. Adds its memory over that of the
    first dense way too.
    """
    dense_memory = next((row["memory"] for row in rows if row["arm"] == DENSE and row.get("memory")), None)
    for row in rows:
        if row.get("memory"):
            row["memory"] = beside_dense(row["memory"], dense_memory)
        dense = {
            other["path"]: other["decode_rate"]["p50"]
            for other in rows
            if other["arm"] == DENSE and (other["context"], batch_of(other)) == (row["context"], batch_of(row)) and other["decode_rate"]
        }
        alike = loop_of(row["path"]) in dense and row["decode_rate"]
        row["speedup"] = row["decode_rate"]["p50"] / max(dense.values()) if alike else None
    return rows


def require_some(rows: Sequence[Row]) -> None:
    """Fails a run, once its rows are out, that could measure no way to decode.

    Raises:
        SdbenchError: No row has a rate; the first reason.
    """
    if all(row["decode_rate"] is None for row in rows):
        raise SdbenchError(f"no way to decode could be measured; {rows[0]['path']}: {rows[0]['reason'] or rows[0]['outcome']}")


def _require_positions(options: DecodeOptions, loaded: LoadedModel) -> None:
    """Refuses a context that the model has no positions for, before any other is measured."""
    limit = position_limit(loaded.model)
    name = "tokens" if options.tokens >= options.warmup_tokens else "warmup-tokens"
    for context in options.contexts:
        if limit is not None and context + options.longest > limit:
            raise UsageError(f"--context {context} and --{name} {options.longest} exceed the {limit} positions of the model; ask for fewer")


@contextmanager
def _pruned(arm: str, loaded: LoadedModel, linears: Mapping[str, nn.Linear]) -> Iterator[Mapping[str, PackedLinear]]:
    if arm in (DENSE, INT8):
        yield {}
        return
    pattern = Pattern.parse(arm)
    weights: dict[str, PackedWeight] = {}
    for name, linear in linears.items():
        weights[name] = pack(linear.weight.detach(), keep_mask(linear.weight, pattern, layer=name), pattern, name)
    with packed_linears(loaded.model, weights, "pruned") as modules:
        yield modules


def _blank(way: Way, loaded: LoadedModel, options: DecodeOptions) -> Row:
    """A way's row without figures."""
    row: Row = {"arm": way.arm, "path": way.path, "context": way.context, "tokens": options.tokens, "outcome": "correct"}
    row |= {"batch": way.batch} if way.batch > 1 else {}
    return row | {"devices": len(devices_of(loaded.model))} | dict.fromkeys(_FIGURES)


def _measure(way: Way, loaded: LoadedModel, packed: Mapping[str, PackedLinear], options: DecodeOptions) -> Row:
    row = _blank(way, loaded, options)
    device, devices = options.device, devices_of(loaded.model)
    length, prompts = way.context + options.longest, _prompts(loaded, options, way.context, way.batch)
    # What torch.compile made for an earlier way is in reference cycles.
    gc.collect()
    try:
        # A fused step checks its own products.
        for name, module in packed.items() if way.batch > 1 and way.path not in (FUSED, FUSED_GRAPH) else ():
            require_right(module, options.dtype, name, (way.batch,))
        before = resident_bytes(*devices)
        begun = clock(device)
        decoder = named(way.path, loaded.model, packed, length, way.batch)
        _reply(decoder, prompts, 1)
        started = clock(device) - begun
        with peak_memory(*devices) as peak:
            replies = _replies(decoder, prompts, way, options)
    except FAILURES as error:
        return row | failure_of(error)
    except RuntimeError as error:
        if _NO_ROOM not in str(error):
            raise
        return row | {"outcome": "out_of_resources", "reason": one_line(error, 200)}
    except (UsageError, CheckFailed):
        raise
    except SdbenchError as error:
        return row | {"outcome": "constraint", "reason": str(error)}
    rates = summarise([rate for rate, _ in replies])
    nbytes = _step_bytes(decoder, loaded, packed, way.batch * (way.context + options.tokens // 2))
    bandwidth = _where_there_is_room(lambda: read_bandwidth(min(nbytes, _PROBE_BYTES), device)) if device.type == "cuda" else None
    ceiling = way.batch * bandwidth / nbytes if bandwidth else None
    row |= {
        "decode_rate": rates.as_dict() if rates else None,
        "ms_per_token": 1e3 * way.batch / rates.p50 if rates else None,
        "ttft_ms": 1e3 * sorted(seconds for _, seconds in replies)[len(replies) // 2],
        "start_seconds": started,
        "step_bytes": nbytes,
        "gbps": nbytes * rates.p50 / way.batch / 1e9 if rates else None,
        "ceiling": ceiling,
        "of_ceiling": rates.p50 / ceiling if rates and ceiling else None,
        "memory": _memory(loaded, packed, decoder, max(0, resident_bytes(*devices) - before)) | {"peak": peak.bytes},
    }
    if isinstance(decoder, FusedDecoder):
        step, captured = decoder.step, decoder.captured
        row["kernels"] = step.kernels if device.type == "cuda" else None
        row["capture"] = {"seconds": captured.seconds, "bytes": captured.nbytes} if captured else None
        if options.profiled:
            row["profile"] = _where_there_is_room(lambda: profile(lambda: decoder.decode_steps(8), 8))
        row["products"] = sorted({product.variant for product in step.products()}) if device.type == "cuda" else None
    return row


def _where_there_is_room(look: Callable[[], T]) -> T | None:
    """What a look beside the rates finds; None where there is no memory for it, since the rates are there already."""
    try:
        return look()
    except FAILURES:
        return None


def _prompts(loaded: LoadedModel, options: DecodeOptions, context: int, batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(options.seed)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    prompts: list[list[int]] = torch.randint(0, vocabulary, (batch, context), generator=generator).tolist()
    return prompts


def _memory(loaded: LoadedModel, packed: Mapping[str, PackedLinear], decoder: Decoder, grown: int) -> Row:
    """Bytes by what they hold, as :func:`weights_memory` has them, and what the decoder needs besides.

    ``decoder`` is what was added by making it and running it; ``workspace`` what of that is neither weights nor ``cache``.
    """
    memory = weights_memory(loaded, packed, decoder)
    added = memory["packed"] - storage_bytes(tensor for module in packed.values() for tensor in module.packed.tensors)
    workspace = max(0, grown - added - (memory["cache"] or 0))
    return memory | {"decoder": grown, "workspace": workspace, "resident": resident_bytes(*devices_of(loaded.model))}


def _reply(decoder: Decoder, prompts: Sequence[Sequence[int]], tokens: int) -> Reply:
    """Exactly so many tokens for each prompt; the first one's reply, whose times are those of all."""
    return decoder.replies(prompts, max_new_tokens=tokens, eos_ids=(), ignore_eos=True)[0]


def _replies(decoder: Decoder, prompts: Sequence[Sequence[int]], way: Way, options: DecodeOptions) -> list[tuple[float, float]]:
    """Decode rate, of all prompts together, and prefill seconds of each repeat."""
    # An eager cache grows, so that each length is a shape of its own: all of them are warmed up.
    warmup = options.tokens if way.path == EAGER else options.warmup_tokens
    if warmup:
        _reply(decoder, prompts, warmup)
    found = []
    for _ in range(options.repeats):
        reply = _reply(decoder, prompts, options.tokens)
        found.append((way.batch * (decode_rate(len(reply.ids), reply.decode_seconds) or 0.0), reply.prefill_seconds))
    return found


def _step_bytes(decoder: Decoder, loaded: LoadedModel, packed: Mapping[str, PackedLinear], context: int) -> int:
    """Bytes that a step reads: products of the fused step as they are, else the model's weights; lm_head and the cache."""
    nbytes = step_bytes(loaded.model, packed, context)
    if isinstance(decoder, FusedDecoder) and not packed:
        linears = select_linears(loaded.model, (), ())
        nbytes += sum(product.nbytes for product in decoder.step.products()) - sum(linear.weight.nbytes for linear in linears.values())
    return nbytes
