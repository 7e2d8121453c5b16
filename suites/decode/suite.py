"""Times the ways to decode a model, dense and pruned, at each context length; quality plays no part, so weights are pruned by magnitude."""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from sdbench.calibrate.magnitude import keep_mask
from sdbench.calibrate.select import select_linears
from sdbench.devices import devices_of
from sdbench.engine.decoders import COMPILED, EAGER, FUSED, FUSED_GRAPH, FUSED_INT8, GRAPH, Decoder, TransformersDecoder, batched, named
from sdbench.engine.fused import FusedDecoder
from sdbench.engine.greedy import Reply, clock, position_limit
from sdbench.engine.packed_linear import PackedLinear, packed_linears, require_right
from sdbench.engine.resident import weights_memory
from sdbench.errors import CheckFailed, SdbenchError, UsageError
from sdbench.kernels.read import read_bandwidth
from sdbench.memory import peak_memory, resident_bytes, storage_bytes
from sdbench.models import LoadedModel, ModelSpec, load_model
from sdbench.packing import PackedWeight, pack
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.decode.batches import batch_of
from sdbench.suites.decode.profile import profile
from sdbench.suites.decode.prompts import in_turn
from sdbench.suites.e2e.ceiling import step_bytes
from sdbench.suites.memory import beside_dense
from sdbench.suites.metrics import decode_rate
from sdbench.suites.runs import measured
from sdbench.timing import summarise

Row = dict[str, Any]
DENSE, INT8 = "dense", "int8"
_PROBE_BYTES = 1 << 30
_FIGURES = (
    *("decode_rate", "ms_per_token", "ttft_ms", "start_seconds", "step_bytes", "gbps", "ceiling", "of_ceiling"),
    *("kernels", "capture", "memory", "profile", "reason"),
)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What to time.

    Attributes:
        spec: The model.
        device: Where it runs.
        dtype: Dtype of its weights.
        patterns: Patterns of the pruned arms.
        contexts: Prompt lengths.
        tokens: Exact length of a timed reply.
        repeats: Timed replies of each way and length; the median counts.
        warmup_tokens: Tokens decoded before, untimed.
        baselines: Also time transformers' own ways at the first context length.
        profiled: Also profile a step of each arm, by kernel; on a GPU.
        targets: Patterns of the linears to prune; none for all.
        ignore: Patterns of the linears to leave dense.
        seed: Seed of the prompts.
        device_map: How the model is spread over the GPUs, one of `sdbench.devices.DEVICE_MAPS`; None for ``device`` alone.
        batches: Prompts at once. One is decoded in every way; several by transformers' step over a static cache, dense and pruned.

    Raises:
        UsageError: A number out of range.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    patterns: tuple[Pattern, ...]
    contexts: tuple[int, ...]
    tokens: int
    repeats: int
    warmup_tokens: int
    baselines: bool
    profiled: bool
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    seed: int
    device_map: str | None = None
    batches: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("context", min(self.contexts), 1),
            ("batch", min(self.batches), 1),
            ("tokens", self.tokens, 2),
            ("repeats", self.repeats, 1),
            ("warmup-tokens", self.warmup_tokens, 0),
        ):
            if value < least:
                raise UsageError(f"--{name} is {value}; it must be at least {least}")

    @property
    def longest(self) -> int:
        """Tokens of the longest reply, warm-up included."""
        return max(self.tokens, self.warmup_tokens)

    def arguments(self) -> dict[str, Any]:
        """Every option that changes a result, for the run directory."""
        return {
            "model": self.spec.name,
            "revision": self.spec.revision,
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "pattern": [str(pattern) for pattern in self.patterns],
            "context": list(self.contexts),
            "tokens": self.tokens,
            "repeats": self.repeats,
            "warmup_tokens": self.warmup_tokens,
            "baselines": self.baselines,
            "profile": self.profiled,
            "targets": list(self.targets),
            "ignore": list(self.ignore),
            "seed": self.seed,
        } | {name: value for name, value in (("device_map", self.device_map), ("batch", list(self.batches))) if value not in (None, [1])}


@dataclass(frozen=True)
class _Way:
    """A way to decode at one context length.

    Attributes:
        arm: ``dense``, ``int8`` or a pattern.
        path: Name of the decoder.
        context: Prompt length.
        batch: Prompts at once.
    """

    arm: str
    path: str
    context: int
    batch: int = 1


def run(options: DecodeOptions, directory: RunDirectory | None, progress: Progress) -> list[Row]:
    """Times every way; those that a resumed run directory holds are kept.

    Args:
        options: What to time.
        directory: Where rows go as they finish; None to keep them in memory alone.
        progress: Where to report.

    Returns:
        A row a way and context, with ``speedup`` over the fastest way to decode the dense weights at that context.
    """
    kept_rows = directory.rows if directory else []
    done = {_key(row): row for row in kept_rows if row["record"] in ("decode", "batch")}
    prompts = {(row["arm"], row["context"]): row for row in kept_rows if row["record"] == "prompt"}
    ways = _ways(options)
    loaded: LoadedModel | None = None
    kept = sum(_way_key(way) in done for way in ways)
    if kept:
        progress.note(f"{kept} of {len(ways)} rows kept from an earlier attempt; choose another --output to measure them again")
    if options.device.type != "cuda":
        progress.note("no GPU: int8 weights, CUDA graphs and torch.compile are left out")
    with progress.task("decode", len(ways)) as task:
        for arm in dict.fromkeys(way.arm for way in ways):
            ours = [way for way in ways if way.arm == arm]
            missing = [way for way in ours if _way_key(way) not in done]
            task.advance(len(ours) - len(missing))
            pruned = arm not in (DENSE, INT8) and 1 in options.batches
            contexts = [context for context in options.contexts if pruned and (arm, context) not in prompts]
            if not missing and not contexts:
                continue
            if loaded is None:
                loaded = load_model(options.spec, options.device, options.dtype, progress.note, options.device_map)
                _require_positions(options, loaded)
            linears: dict[str, nn.Linear] = select_linears(loaded.model, options.targets, options.ignore)
            with _pruned(arm, loaded, linears) as packed:
                for way in missing:
                    row = _measure(way, loaded, packed, options)
                    if directory:
                        directory.add_row({"record": "decode" if way.batch == 1 else "batch", **row})
                    done[_way_key(way)] = row
                    task.advance()
                # Last, since the dense weights come to the GPU for it, which the last way's cache leaves, and stay there.
                gc.collect()
                asked = [_prompts(loaded, options, context, 1)[0] for context in contexts]
                for found in in_turn(loaded.model, packed, linears, asked, options.repeats):
                    row = {"arm": arm, **found}
                    if directory:
                        directory.add_row({"record": "prompt", **row})
                    prompts[arm, row["context"]] = row
    return judge(with_prompts([measured(done[_way_key(way)]) for way in ways], prompts.values()))


def with_prompts(rows: list[Row], prompts: Iterable[Row]) -> list[Row]:
    """Rows with what was measured of their arm's prompts in turn with the dense ones, as ``prompt``; None where nothing was."""
    found = {(prompt["arm"], prompt["context"]): measured(prompt) for prompt in prompts}
    return [row | {"prompt": found.get((row["arm"], row["context"])) if batch_of(row) == 1 else None} for row in rows]


def judge(rows: list[Row]) -> list[Row]:
    """Adds each row's speed-up over the fastest bf16 (or unrounded) dense way at its context and batch; None without one.

    Also its memory over that of the first dense way.
    """
    dense_memory = next((row["memory"] for row in rows if row["arm"] == DENSE and row.get("memory")), None)
    for row in rows:
        if row.get("memory"):
            row["memory"] = beside_dense(row["memory"], dense_memory)
        dense = [
            other["decode_rate"]["p50"]
            for other in rows
            if other["arm"] == DENSE and (other["context"], batch_of(other)) == (row["context"], batch_of(row)) and other["decode_rate"]
        ]
        row["speedup"] = row["decode_rate"]["p50"] / max(dense) if dense and row["decode_rate"] else None
    return rows


def require_some(rows: Sequence[Row]) -> None:
    """Fails a run, once its rows are out, that could measure no way to decode.

    Raises:
        SdbenchError: No row has a rate; the first reason.
    """
    if all(row["decode_rate"] is None for row in rows):
        raise SdbenchError(f"no way to decode could be measured; {rows[0]['path']}: {rows[0]['reason'] or rows[0]['outcome']}")


def _ways(options: DecodeOptions) -> list[_Way]:
    """One prompt at a time by every way, where it is asked for, then several at once."""
    path = GRAPH if options.device.type == "cuda" and not options.device_map else EAGER
    several = [
        _Way(arm, path, context, batch)
        for arm in (DENSE, *map(str, options.patterns))
        for context in options.contexts
        for batch in options.batches
        if batch > 1
    ]
    return [*(_single_ways(options) if 1 in options.batches else []), *several]


def _single_ways(options: DecodeOptions) -> list[_Way]:
    fused = FUSED_GRAPH if options.device.type == "cuda" else FUSED
    if options.device_map:
        # The fused step, first, has a row that says why it cannot run.
        ways = [_Way(DENSE, fused, options.contexts[0])] if options.baselines else []
        return ways + [_Way(arm, EAGER, context) for arm in (DENSE, *map(str, options.patterns)) for context in options.contexts]
    ways = [_Way(DENSE, fused, context) for context in options.contexts]
    if options.baselines:
        others = (COMPILED, GRAPH, EAGER) if options.device.type == "cuda" else (EAGER,)
        ways += [_Way(DENSE, path, options.contexts[0]) for path in others]
    if options.device.type == "cuda":
        ways += [_Way(INT8, FUSED_INT8, context) for context in options.contexts]
    return ways + [_Way(str(pattern), fused, context) for pattern in options.patterns for context in options.contexts]


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


def _measure(way: _Way, loaded: LoadedModel, packed: Mapping[str, PackedLinear], options: DecodeOptions) -> Row:
    row: Row = {"arm": way.arm, "path": way.path, "context": way.context, "tokens": options.tokens, "outcome": "correct"}
    row |= {"batch": way.batch} if way.batch > 1 else {}
    row |= {"devices": len(devices_of(loaded.model))} | dict.fromkeys(_FIGURES)
    device, devices = options.device, devices_of(loaded.model)
    length, prompts = way.context + options.longest, _prompts(loaded, options, way.context, way.batch)
    # What torch.compile made for an earlier way is in reference cycles.
    gc.collect()
    try:
        for name, module in packed.items() if way.batch > 1 else ():
            require_right(module, options.dtype, name, (way.batch,))
        before = resident_bytes(*devices)
        begun = clock(device)
        decoder: Decoder
        if way.batch > 1:
            decoder = batched(way.path, loaded.model, packed, length, way.batch)
        else:
            decoder = named(way.path, loaded.model, packed, length)
        _reply(decoder, prompts, 1)
        started = clock(device) - begun
        with peak_memory(*devices) as peak:
            replies = _replies(decoder, prompts, way, options)
    except (torch.OutOfMemoryError, OutOfResources) as error:
        return row | {"outcome": "out_of_resources", "reason": " ".join(str(error).split())[:200]}
    except TritonError as error:
        return row | {"outcome": "compile_error", "reason": " ".join(str(error).split())[:200]}
    except (UsageError, CheckFailed):
        raise
    except SdbenchError as error:
        return row | {"outcome": "constraint", "reason": str(error)}
    rates = summarise([rate for rate, _ in replies])
    nbytes = _step_bytes(decoder, loaded, packed, way.batch * (way.context + options.tokens // 2))
    ceiling = way.batch * read_bandwidth(min(nbytes, _PROBE_BYTES), device) / nbytes if device.type == "cuda" else None
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
            row["profile"] = profile(lambda: decoder.decode_steps(8), 8)
    return row


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
    if isinstance(decoder, TransformersDecoder):
        return decoder.replies(prompts, max_new_tokens=tokens, eos_ids=(), ignore_eos=True)[0]
    return decoder.reply(prompts[0], max_new_tokens=tokens, eos_ids=(), ignore_eos=True)


def _replies(decoder: Decoder, prompts: Sequence[Sequence[int]], way: _Way, options: DecodeOptions) -> list[tuple[float, float]]:
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


def _key(row: Row) -> tuple[str, str, int, int]:
    return row["arm"], row["path"], row["context"], batch_of(row)


def _way_key(way: _Way) -> tuple[str, str, int, int]:
    return way.arm, way.path, way.context, way.batch
