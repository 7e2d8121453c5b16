"""Block by block, one block's statistics in memory at a time: on what the dense blocks before it give it, or on what the pruned ones do.

The latter as in SparseGPT (arXiv 2301.00774, section 4): the statistics of block b are those of the model whose blocks before b are pruned
already, and all linears of a block are pruned from one pass through the block as it was. The weights of a streamed model
(`sdbench.streaming`) are in memory for the block whose turn it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sdbench.calibrate.choices import Weighting
from sdbench.calibrate.collect import Collector, InputSums, StatisticsKind, statistics_of
from sdbench.calibrate.in_place import weights_in_place
from sdbench.calibrate.methods import METHODS, Pruned, prune_linears
from sdbench.calibrate.registry import lookup
from sdbench.calibrate.replay import Batch, batches, replayed
from sdbench.calibrate.sources import CalibrationText
from sdbench.calibrate.stages import Stages
from sdbench.engine.phase import phase
from sdbench.errors import CheckFailed, SdbenchError
from sdbench.pattern import Pattern
from sdbench.progress import Progress, silent
from sdbench.streaming import resident
from sdbench.timing import relative_error, within

CHAIN_TOLERANCE = 1e-2
"""Largest relative difference between what a block is given by the model and what the block before it gave."""

DEVICE_SHARE = 4
"""Hidden states stay on a GPU where they take less than one part in so many of what is free there; else they rest in main memory."""


@dataclass(frozen=True)
class _Call:
    """How the model called a block for one batch: everything but the hidden states, which change as blocks are pruned."""

    rest: tuple[Any, ...]
    keywords: dict[str, Any]


def prune_sequentially(
    model: Any,
    linears: Mapping[str, nn.Linear],
    texts: Sequence[CalibrationText],
    pattern: Pattern,
    method: str,
    weighting: Weighting = "uniform",
    stages: Stages | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Pruned]]:
    """Prunes the blocks in order, each calibrated on the pruned ones before it; between two steps the model is what it was.

    Peak memory beside the model: one block's statistics and pruned weights, and the hidden states of all texts' positions.

    Args:
        model: A transformers causal language model in eval mode.
        linears: Layers by dotted name, all inside one list of blocks.
        texts: What to calibrate on.
        pattern: N:M.
        method: A name in `METHODS`.
        weighting: Weight of a row within its text.
        stages: Is told how long ``collection`` and ``pruning`` took.
        progress: Where to report forwards.

    Returns:
        An iterator of names and pruned weights in the order of the blocks, as `prune_linears` gives them.

    Raises:
        UsageError: Unknown method, or a width that is not a multiple of M; at once.
        SdbenchError: A linear outside of the blocks, no row, or NaN or Inf.
        CheckFailed: The model changes hidden states between its blocks, so that running them one by one is not the model.
    """
    prune_linears(linears, {}, pattern, method)
    find_blocks(model, linears)
    return _prune_sequentially(model, linears, texts, pattern, method, weighting, stages or Stages(model.device), progress)


def _prune_sequentially(
    model: Any,
    linears: Mapping[str, nn.Linear],
    texts: Sequence[CalibrationText],
    pattern: Pattern,
    method: str,
    weighting: Weighting,
    stages: Stages,
    progress: Progress | None,
) -> Iterator[tuple[str, Pruned]]:
    needs = lookup("method", method, METHODS).needs
    with stages("collection"):
        walk = BlockWalk(model, linears, texts, weighting, progress)
    stages.hidden = walk.hidden
    for inside in walk:
        with stages("collection"):
            statistics = statistics_of(walk.collect(needs, advance=False)) if inside and needs != "none" else {}
        weights = {}
        for name, pruned in stages.timed("pruning", prune_linears(inside, statistics, pattern, method)):
            weights[name] = pruned.weight
            yield name, pruned
        # One block's Hessians at a time.
        statistics.clear()
        with stages("collection"), weights_in_place(inside, weights):
            walk.advance()


def collect_by_block(
    model: Any,
    linears: Mapping[str, nn.Linear],
    texts: Sequence[CalibrationText],
    kind: StatisticsKind,
    weighting: Weighting = "uniform",
    stages: Stages | None = None,
    progress: Progress | None = None,
) -> Iterator[dict[str, InputSums]]:
    """The sums of `sdbench.calibrate.replay.collect_sums`, a block at a time: all of them together may be larger than the model.

    Args:
        model: A transformers causal language model in eval mode.
        linears: Layers by dotted name, all inside one list of blocks.
        texts: What to replay.
        kind: ``"sum_sq"`` or ``"hessian"``.
        weighting: Weight of a row within its text.
        stages: Is told where the hidden states lie.
        progress: Where to report forwards.

    Yields:
        One block's sums by layer; none for a block without layers. Until the next one is asked for, the block's weights are in memory.

    Raises:
        SdbenchError: A linear outside of the blocks, or no row.
        CheckFailed: See `prune_sequentially`; before the first block.
    """
    walk = BlockWalk(model, linears, texts, weighting, progress)
    if stages is not None:
        stages.hidden = walk.hidden
    for inside in walk:
        if inside:
            yield walk.collect(kind, advance=True)
        else:
            walk.advance()


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
        f"layer {outside}: outside of the model's list of blocks, which sequential calibration and --stream walk; leave it out with "
        "--ignore or calibrate in one pass"
    )


class BlockWalk:
    """Runs a model over the texts a block at a time; iterate to go from block to block, and advance once in each.

    Args:
        model: A transformers causal language model in eval mode.
        linears: Layers by dotted name, all inside one list of blocks.
        texts: What to replay.
        weighting: Weight of a row within its text.
        progress: Where to report forwards; None for nowhere.

    Attributes:
        hidden: Bytes of the hidden states of all texts' positions, and where they lie between two blocks.

    Raises:
        SdbenchError: A linear outside of the blocks, or no row.
        CheckFailed: The blocks are no chain.
    """

    def __init__(
        self,
        model: Any,
        linears: Mapping[str, nn.Linear],
        texts: Sequence[CalibrationText],
        weighting: Weighting,
        progress: Progress | None = None,
    ):
        self._model, self._linears, self._progress = model, linears, progress or silent()
        self._blocks = find_blocks(model, linears)
        self._batches = batches(model, texts, weighting)
        config = model.config.get_text_config()
        nbytes = sum(batch.ids.numel() for batch in self._batches) * config.hidden_size * model.dtype.itemsize
        self._rest = _resting_place(model.device, nbytes)
        self.hidden: dict[str, int | str] = {"bytes": nbytes, "device": self._rest.type}
        with self._progress.task("statistics: first forward", len(self._blocks) + len(self._batches) - 1) as task:
            self._hidden, self._calls = _record_calls(model, self._blocks, self._batches, self._rest, task.advance)
        self._prefix = ""

    def __iter__(self) -> Iterator[dict[str, nn.Linear]]:
        for prefix, block in self._blocks.items():
            self._prefix = prefix
            with resident([block]):
                yield self._inside()

    def collect(self, kind: StatisticsKind, *, advance: bool) -> dict[str, InputSums]:
        """Sums of the linears of the block where the walk is, and with ``advance`` the next one's hidden states from the same forwards."""
        collector = Collector(self._model, self._inside(), {"prefill"}, kind)
        with collector:
            self._run("statistics", advance)
        return collector.sums()

    def advance(self) -> None:
        """Runs the block with the weights that are in place."""
        self._run("outputs", advance=True)

    def _inside(self) -> dict[str, nn.Linear]:
        return {name: linear for name, linear in self._linears.items() if name.startswith(f"{self._prefix}.")}

    def _run(self, what: str, advance: bool) -> None:
        block = self._blocks[self._prefix]
        with self._progress.task(f"{what}: {self._prefix}", len(self._batches)) as task:
            for number, (batch, call) in enumerate(zip(self._batches, self._calls[self._prefix], strict=True)):
                with phase("prefill", rows=batch.rows):
                    output = _run(block, self._hidden[number].to(batch.ids.device), call)
                if advance:
                    self._hidden[number] = output.to(self._rest)
                task.advance()


@torch.no_grad()
def _record_calls(
    model: Any, blocks: Mapping[str, nn.Module], replays: Sequence[Batch], rest: torch.device, on_step: Callable[[], None]
) -> tuple[list[Tensor], dict[str, list[_Call]]]:
    """Each batch's hidden states before the first block, and each block's call for each batch.

    The first batch runs through the dense model, and each block must be given what the block before it gave: else something happens in
    between. Of the others only the calls are wanted, so that the blocks hand on what they are given. ``on_step`` is called after each block
    of the first batch and after each other batch.
    """
    hidden: list[Tensor] = []
    calls: dict[str, list[_Call]] = {prefix: [] for prefix in blocks}
    outputs: dict[str, Any] = {}
    running = ExitStack()
    before: tuple[str, Tensor] | None = None

    def enter(prefix: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        states, call = _call(arguments, keywords)
        calls[prefix].append(call)
        if prefix == next(iter(blocks)):
            hidden.append(states.to(rest))
        elif before is not None:
            error = relative_error(before[1], states.double())
            if not within(error, CHAIN_TOLERANCE):
                raise CheckFailed(
                    f"{prefix} gets other hidden states than {before[0]} gives (relative difference {error:.1e}): the model does something "
                    "between its blocks; calibrate in one pass"
                )

    def leave(prefix: str, output: Any) -> None:
        nonlocal before
        before = (prefix, _states(output))
        # Beside the states there may be more, which the model expects again.
        outputs[prefix] = None if isinstance(output, Tensor) else output[1:]
        running.close()
        on_step()

    forward = replayed(model)
    with ExitStack() as hooks, phase("prefill"):
        for prefix, block in blocks.items():
            hook = block.register_forward_pre_hook(
                lambda _, arguments, keywords, prefix=prefix: enter(prefix, arguments, keywords), with_kwargs=True
            )
            hooks.callback(hook.remove)
        with ExitStack() as only_first, running:
            for prefix, block in blocks.items():
                weights = block.register_forward_pre_hook(lambda block, _: running.enter_context(resident([block])) and None)
                only_first.callback(weights.remove)
                after = block.register_forward_hook(lambda _, arguments, output, prefix=prefix: leave(prefix, output))
                only_first.callback(after.remove)
            forward(replays[0].ids)
        before = None
        for prefix, block in blocks.items():
            hooks.enter_context(_handing_on(block, outputs.get(prefix)))
        for batch in replays[1:]:
            forward(batch.ids)
            on_step()
    for prefix, found in calls.items():
        if len(found) != len(replays):
            raise CheckFailed(
                f"{prefix} ran {len(found)} times in {len(replays)} forwards of the model: no chain of blocks; calibrate in one pass"
            )
    return hidden, calls


def _resting_place(device: torch.device, nbytes: int) -> torch.device:
    """Where hidden states of so many bytes lie between two blocks."""
    fits = device.type != "cuda" or nbytes * DEVICE_SHARE < torch.cuda.mem_get_info(device)[0]
    return device if fits else torch.device("cpu")


@contextmanager
def _handing_on(block: nn.Module, rest: tuple[Any, ...] | None) -> Iterator[None]:
    """Inside, the block gives back the hidden states that it is given, with ``rest`` after them unless that is None."""

    def forward(*arguments: Any, **keywords: Any) -> Any:
        states, _ = _call(arguments, keywords)
        return states if rest is None else (states, *rest)

    # A forward of its own has been put there by another library, and goes back.
    own = vars(block).get("forward")
    block.forward = forward
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own


def _call(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Tensor, _Call]:
    """A call's hidden states, and the rest of it."""
    keywords = dict(keywords)
    states, *rest = arguments or (keywords.pop("hidden_states"),)
    return states, _Call(tuple(rest), keywords)


@torch.no_grad()
def _run(block: nn.Module, states: Tensor, call: _Call) -> Tensor:
    """The block's output hidden states."""
    return _states(block(states, *call.rest, **call.keywords))


def _states(output: Any) -> Tensor:
    """The hidden states among what a block gives back."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found
