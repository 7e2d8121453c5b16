"""Block by block: each block is calibrated on what the pruned blocks before it give it, one block's statistics in memory at a time.

As in SparseGPT (arXiv 2301.00774, section 4): the statistics of block b are those of the model whose blocks before b are pruned already,
and all linears of a block are pruned from one pass through the block as it was.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sdbench.calibrate.choices import Weighting
from sdbench.calibrate.collect import Collector, LayerStatistics
from sdbench.calibrate.in_place import weights_in_place
from sdbench.calibrate.methods import METHODS, Pruned, prune_linears
from sdbench.calibrate.registry import lookup
from sdbench.calibrate.replay import replayed, require_rows, row_weights
from sdbench.calibrate.sources import CalibrationText
from sdbench.engine.phase import phase
from sdbench.errors import CheckFailed, SdbenchError
from sdbench.pattern import Pattern
from sdbench.timing import relative_error, within

CHAIN_TOLERANCE = 1e-2
"""Largest relative difference between what a block is given by the model and what the block before it gave: bf16 rounds differently."""


@dataclass(frozen=True)
class _Call:
    """How the model called a block for one text: everything but the hidden states, which change as blocks are pruned."""

    rest: tuple[Any, ...]
    keywords: dict[str, Any]


def prune_sequentially(
    model: Any,
    linears: Mapping[str, nn.Linear],
    texts: Sequence[CalibrationText],
    pattern: Pattern,
    method: str,
    weighting: Weighting = "uniform",
) -> Iterator[tuple[str, Pruned]]:
    """Prunes the blocks in order; the model is what it was after each step of the iteration.

    Peak memory beside the model: one block's statistics and pruned weights, and one hidden state ``[positions, hidden]`` a text.

    Args:
        model: A transformers causal language model in eval mode.
        linears: Layers by dotted name, all inside one list of blocks.
        texts: What to calibrate on.
        pattern: N:M.
        method: A name in `METHODS`.
        weighting: Weight of a row within its text.

    Returns:
        An iterator of names and pruned weights in the order of the blocks, as `prune_linears` gives them.

    Raises:
        UsageError: Unknown method, or a width that is not a multiple of M; at once.
        SdbenchError: A linear outside of the blocks, no row, or NaN or Inf.
        CheckFailed: The model changes hidden states between its blocks, so that running them one by one is not the model.
    """
    prune_linears(linears, {}, pattern, method)
    blocks = find_blocks(model, linears)
    return _prune_blocks(model, blocks, dict(linears), texts, pattern, method, weighting)


def find_blocks(model: Any, linears: Mapping[str, nn.Linear]) -> dict[str, nn.Module]:
    """The model's blocks by dotted name: the outermost list of modules that holds every one of the linears.

    Raises:
        SdbenchError: No list does; names a linear that lies outside.
    """
    outside = next(iter(linears), "")
    for prefix, modules in model.named_modules():
        if isinstance(modules, nn.ModuleList):
            missing = [name for name in linears if not name.startswith(f"{prefix}.")]
            if not missing:
                return {f"{prefix}.{index}": block for index, block in enumerate(modules)}
            if len(missing) < len(linears):
                outside = missing[0]
    raise SdbenchError(
        f"layer {outside}: outside of the model's list of blocks, which sequential calibration walks; leave it out with --ignore or "
        "calibrate in one pass"
    )


def _prune_blocks(
    model: Any,
    blocks: Mapping[str, nn.Module],
    linears: dict[str, nn.Linear],
    texts: Sequence[CalibrationText],
    pattern: Pattern,
    method: str,
    weighting: Weighting,
) -> Iterator[tuple[str, Pruned]]:
    needs = lookup("method", method, METHODS).needs
    require_rows(texts)
    texts = [text for text in texts if text.rows]
    hidden, calls = _record_calls(model, blocks, texts)
    for prefix, block in blocks.items():
        inside = {name: linear for name, linear in linears.items() if name.startswith(f"{prefix}.")}
        statistics: dict[str, LayerStatistics] = {}
        if inside and needs != "none":
            collector = Collector(model, inside, {"prefill"}, needs)
            with collector:
                for text, states, call in zip(texts, hidden, calls[prefix], strict=True):
                    with phase("prefill", rows=row_weights(text, weighting).to(states.device)):
                        _run(block, states, call)
            statistics = collector.statistics()
        weights = {}
        for name, pruned in prune_linears(inside, statistics, pattern, method):
            weights[name] = pruned.weight
            yield name, pruned
        with weights_in_place(inside, weights), phase("prefill"):
            for number, call in enumerate(calls[prefix]):
                hidden[number] = _run(block, hidden[number], call)


@torch.no_grad()
def _record_calls(
    model: Any, blocks: Mapping[str, nn.Module], texts: Sequence[CalibrationText]
) -> tuple[list[Tensor], dict[str, list[_Call]]]:
    """Each text's hidden states before the first block, and each block's call for each text, from one pass over the dense model."""
    hidden: list[Tensor] = []
    calls: dict[str, list[_Call]] = {prefix: [] for prefix in blocks}
    given: dict[str, Tensor] = {}
    first = next(iter(blocks))

    def record(prefix: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        keywords = dict(keywords)
        states, *rest = arguments or (keywords.pop("hidden_states"),)
        calls[prefix].append(_Call(tuple(rest), keywords))
        if prefix == first:
            hidden.append(states)
        if len(hidden) == 1:
            given[prefix] = states

    hooks = [
        block.register_forward_pre_hook(lambda _, arguments, keywords, prefix=prefix: record(prefix, arguments, keywords), with_kwargs=True)
        for prefix, block in blocks.items()
    ]
    forward = replayed(model)
    try:
        for text in texts:
            with phase("prefill"):
                forward(text)
    finally:
        for hook in hooks:
            hook.remove()
    _require_chain(blocks, given, calls, len(texts))
    return hidden, calls


def _require_chain(blocks: Mapping[str, nn.Module], given: Mapping[str, Tensor], calls: Mapping[str, list[_Call]], texts: int) -> None:
    """Checks on the first text that each block gets what the block before it gives, and nothing else happens in between."""
    for prefix in blocks:
        if len(calls[prefix]) != texts:
            raise CheckFailed(f"{prefix} ran {len(calls[prefix])} times for {texts} texts: no chain of blocks; calibrate in one pass")
    for (before, block), after in zip(blocks.items(), list(blocks)[1:], strict=False):
        with phase("prefill"):
            output = _run(block, given[before], calls[before][0])
        error = relative_error(output, given[after].double())
        if not within(error, CHAIN_TOLERANCE):
            raise CheckFailed(
                f"{after} gets other hidden states than {before} gives (relative difference {error:.1e}): the model does something "
                "between its blocks; calibrate in one pass"
            )


@torch.no_grad()
def _run(block: nn.Module, states: Tensor, call: _Call) -> Tensor:
    """The block's output hidden states."""
    output = block(states, *call.rest, **call.keywords)
    return output if isinstance(output, Tensor) else output[0]
