"""The model's own replies to calibration prompts, many at once, at the speed of the engine."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from sdbench.calibrate.sampling import Sampler
from sdbench.engine.decoders import EAGER, GRAPH, Decoder, fastest
from sdbench.engine.graph import GraphForward
from sdbench.engine.greedy import Reply, greedy, position_limit
from sdbench.errors import SdbenchError


class Replier:
    """Decodes calibration replies: on a GPU a batch at a time by a CUDA graph over a static cache, or one by one by the fused step.

    Args:
        model: A transformers causal language model in eval mode; it must stay as it is.
        batch: Prompts at once.
        max_positions: Longest prompt and reply together.
        sampled: Replies will be sampled, which the fused step cannot do.

    Attributes:
        path: How it decodes, by the names of `sdbench.engine.decoders`.
        reason: Why not faster; None where it is the fastest way.
    """

    def __init__(self, model: Any, batch: int, max_positions: int, *, sampled: bool):
        self._model, self._batch = model, batch
        self._forward: GraphForward | None = None
        self._decoder: Decoder | None = None
        self.path: str = EAGER
        self.reason: str | None = None
        if model.device.type != "cuda":
            return
        positions = min(max_positions, position_limit(model) or max_positions)
        if batch == 1 and not sampled:
            self._decoder, self.path, self.reason = fastest(model, {}, positions)
            return
        try:
            self._forward, self.path = GraphForward(model, positions, batch=batch), GRAPH
        except (SdbenchError, torch.OutOfMemoryError) as error:
            self.reason = " ".join(str(error).split())[:300]

    def replies(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_ids: Collection[int],
        ignore_eos: bool = False,
        sampler: Sampler | None = None,
    ) -> list[Reply]:
        """One reply a prompt.

        Args:
            prompts: Token ids, no more prompts than ``batch``.
            max_new_tokens: Longest reply.
            eos_ids: Ids that end a reply.
            ignore_eos: Give exactly ``max_new_tokens`` tokens.
            sampler: Draws the tokens; None for the likeliest.

        Raises:
            UsageError: More positions than the model has.
            SdbenchError: NaN or Inf among the logits.
        """
        if self._decoder is not None:
            return [self._decoder.reply(p, max_new_tokens=max_new_tokens, eos_ids=eos_ids, ignore_eos=ignore_eos) for p in prompts]
        places = list(range(len(prompts)))
        if self._forward is not None:
            # The graph's batch has one size: the last prompt fills it up.
            places += [places[-1]] * (self._batch - len(places))
        found = greedy(
            self._model,
            [prompts[place] for place in places],
            max_new_tokens=max_new_tokens,
            eos_ids=eos_ids,
            ignore_eos=ignore_eos,
            forward=self._forward,
            choose=sampler and replace(sampler, uniforms=sampler.uniforms[places]),
        )
        return found[: len(prompts)]
