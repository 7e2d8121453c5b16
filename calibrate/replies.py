"""The model's own replies to calibration prompts, many at once, at the speed of the engine."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sdbench.calibrate.sampling import Sampler
from sdbench.engine.decoders import Decoder, fastest
from sdbench.engine.fused.decoder import CLOSE
from sdbench.engine.graph import GraphForward
from sdbench.engine.greedy import Reply, greedy, position_limit
from sdbench.engine.paths import EAGER, GRAPH
from sdbench.engine.phase import phase
from sdbench.errors import SdbenchError, one_line
from sdbench.timing import relative_error, within

STEPS = 3
"""Tokens of the check before the first batch: one from the prompt, two from decode steps."""


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
            forward = GraphForward(model, positions, batch=batch)
            require_eager_logits(model, forward, batch)
            self._forward, self.path = forward, GRAPH
        except (SdbenchError, torch.OutOfMemoryError) as error:
            self.reason = one_line(error)

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


def require_eager_logits(model: Any, forward: GraphForward, batch: int) -> None:
    """Checks two decode steps over prompts of several lengths against the model's own forward over each text alone.

    Args:
        model: A transformers causal language model in eval mode.
        forward: What will decode.
        batch: Its prompts at once.

    Raises:
        SdbenchError: The logits differ by more than rounding: padding reaches them, say.
    """
    device, width = model.device, max(1, min(8, (forward.max_positions or 8) - STEPS))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.get_input_embeddings().num_embeddings, (batch, width + STEPS), generator=generator)
    prompts = [row[number % width : width].tolist() for number, row in enumerate(ids)]
    given = ids[:, width:].to(device)
    seen: list[Tensor] = []

    def choose(logits: Tensor, step: int) -> Tensor:
        seen.append(logits.clone())
        return given[:, step]

    greedy(model, prompts, max_new_tokens=STEPS, eos_ids=(), ignore_eos=True, forward=forward, choose=choose)
    # The shortest prompt has the most padding, the first has none.
    for number in {0, min(batch, width) - 1}:
        text = torch.tensor([prompts[number]], device=device)
        with torch.no_grad(), phase("prefill"):
            whole = model(input_ids=torch.cat([text, given[number : number + 1, :-1]], dim=1), use_cache=False).logits[0, -1]
        error = relative_error(seen[-1][number], whole.double())
        if not within(error, CLOSE[whole.dtype]):
            raise SdbenchError(
                f"batched decode steps over a static cache give other logits than the model's own forward (relative error {error:.1e})"
            )
