"""Ways to decode a live model, fastest first, behind one small interface."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from triton.errors import TritonError

from sdbench.engine.fused import FusedDecoder
from sdbench.engine.graph import CompiledForward, GraphForward
from sdbench.engine.greedy import EagerForward, Reply, greedy
from sdbench.engine.packed_linear import PackedLinear
from sdbench.engine.paths import COMPILED, EAGER, FUSED, FUSED_GRAPH, FUSED_INT8, GRAPH
from sdbench.errors import SdbenchError, one_line


class Decoder(Protocol):
    """Greedy replies to one prompt, or to as many at once as the decoder was made for.

    Attributes:
        pruned_products: Pruned products that a decode step makes, each of which counts a call.
        variants: Names of the SpMV variants that they run, sorted.
    """

    pruned_products: int
    variants: list[str]

    @property
    def calls(self) -> int:
        """Rows of decode steps that came through each pruned product so far; one product may be for several linears."""

    def reply(self, prompt: Sequence[int], *, max_new_tokens: int, eos_ids: Collection[int], ignore_eos: bool = False) -> Reply:
        """See :func:`sdbench.engine.greedy.greedy`."""

    def replies(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, eos_ids: Collection[int], ignore_eos: bool = False
    ) -> list[Reply]:
        """The same for several prompts at once."""


class TransformersDecoder:
    """The model's own forward, driven by :func:`sdbench.engine.greedy.greedy`.

    Args:
        model: A transformers causal language model in eval mode.
        packed: Its packed linears by name; empty for a dense model.
        forward: What runs a step.
    """

    def __init__(self, model: Any, packed: Mapping[str, PackedLinear], forward: EagerForward):
        self._model, self._packed, self._forward = model, packed, forward
        self.pruned_products = len(packed)
        self.variants = sorted({module.variant for module in packed.values()})

    @property
    def calls(self) -> int:
        """Rows of decode steps that came through the forward of each packed linear so far, in whatever launches they were multiplied."""
        return sum(module.calls for module in self._packed.values())

    def reply(self, prompt: Sequence[int], *, max_new_tokens: int, eos_ids: Collection[int], ignore_eos: bool = False) -> Reply:
        """One reply."""
        (reply,) = self.replies([prompt], max_new_tokens=max_new_tokens, eos_ids=eos_ids, ignore_eos=ignore_eos)
        return reply

    def replies(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, eos_ids: Collection[int], ignore_eos: bool = False
    ) -> list[Reply]:
        """Replies to as many prompts at once as ``forward`` was made for."""
        return greedy(self._model, prompts, max_new_tokens=max_new_tokens, eos_ids=eos_ids, ignore_eos=ignore_eos, forward=self._forward)


def fastest(model: Any, packed: Mapping[str, PackedLinear], max_positions: int) -> tuple[Decoder, str, str | None]:
    """The fastest way for a model as it is now, its name, and why not a faster one.

    Args:
        model: A transformers causal language model in eval mode.
        packed: Its packed linears by name; empty for a dense model.
        max_positions: Longest prompt and reply together.
    """
    on_gpu = model.device.type == "cuda"
    try:
        return FusedDecoder(model, max_positions), FUSED_GRAPH if on_gpu else FUSED, None
    except (SdbenchError, TritonError, torch.OutOfMemoryError) as error:
        reason = one_line(error)
    if on_gpu:
        try:
            return named(GRAPH, model, packed, max_positions), GRAPH, reason
        except (SdbenchError, TritonError, torch.OutOfMemoryError) as error:
            reason = f"{reason}; {one_line(error)}"
    return named(EAGER, model, packed, max_positions), EAGER, reason


def named(path: str, model: Any, packed: Mapping[str, PackedLinear], max_positions: int, batch: int = 1) -> Decoder:
    """One way by its name.

    Args:
        path: Its name.
        model: A transformers causal language model in eval mode.
        packed: Its packed linears by name; empty for a dense model.
        max_positions: Longest prompt and reply together.
        batch: Prompts at once.

    Raises:
        SdbenchError: The model cannot be run so.
    """
    if path in (FUSED, FUSED_GRAPH):
        return FusedDecoder(model, max_positions, batch=batch, capture=path == FUSED_GRAPH)
    if path == FUSED_INT8:
        return FusedDecoder(model, max_positions, batch=batch, int8=True)
    forwards = {COMPILED: CompiledForward, GRAPH: GraphForward}
    if path in forwards:
        return TransformersDecoder(model, packed, forwards[path](model, max_positions, batch=batch))
    if path == EAGER:
        return TransformersDecoder(model, packed, EagerForward(model))
    raise SdbenchError(f"no way to decode is called {path!r}")
