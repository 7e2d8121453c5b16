"""How close a pruned model stays to the dense one, at the positions of the dense model's own replies.

Where a small model answers nothing right, dense or pruned, this is what can still be compared: the distribution over the next token after
each prefix of what the dense model said. Both models read the same tokens, so that one early slip doesn't spoil all later positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from sdbench.calibrate.in_place import weights_in_place
from sdbench.engine.greedy import cache_keyword
from sdbench.errors import SdbenchError

CHUNK = 128
"""Positions compared at a time: several float32 copies of their logits are alive."""


@dataclass(frozen=True)
class Fidelity:
    """One reply under a pruned model.

    Attributes:
        positions: Tokens of the dense reply: each has a distribution that it was chosen from.
        kl: Mean over them of KL(dense || pruned), in nats.
        agreement: Share of them at which both models' likeliest token is the same.
        first_divergence: First position, from 0, at which it isn't: where the pruned model's own greedy reply would leave the dense one's.
            None if there is none.
        nll: Mean over the positions of the pruned model's -ln of the probability of the reply's own token, in nats.
        dense_nll: The same of the dense model.
    """

    positions: int
    kl: float
    agreement: float
    first_divergence: int | None
    nll: float
    dense_nll: float


def compare(dense: Tensor, pruned: Tensor, reply: Sequence[int]) -> Fidelity:
    """Compares two models' logits of the same positions.

    Args:
        dense: [positions, vocab], any float dtype; compared in float32.
        pruned: The same shape.
        reply: The token that stands at each position.

    Raises:
        SdbenchError: NaN or Inf in either.
    """
    total, dense_nll, nll, agree = 0.0, 0.0, 0.0, []
    tokens = torch.tensor(list(reply), device=dense.device)
    for reference, other, said in zip(dense.split(CHUNK), pruned.split(CHUNK), tokens.split(CHUNK), strict=True):
        log_p, log_q = reference.float().log_softmax(dim=-1), other.float().log_softmax(dim=-1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
        dense_nll += float(F.nll_loss(log_p, said, reduction="sum"))
        nll += float(F.nll_loss(log_q, said, reduction="sum"))
        agree.append(reference.argmax(dim=-1) == other.argmax(dim=-1))
    same = torch.cat(agree)
    if not torch.isfinite(torch.tensor(total)):
        raise SdbenchError("NaN or Inf in the logits of a replayed reply: the weights or the number type (try --dtype fp32) are broken")
    differing = (~same).nonzero()
    first = int(differing[0]) if len(differing) else None
    # Rounding of two equal distributions may come out below 0.
    count = len(same)
    return Fidelity(count, max(total, 0.0) / count, float(same.float().mean()), first, nll / count, dense_nll / count)


@torch.no_grad()
def reply_logits(
    model: Any,
    prompt: Sequence[int],
    reply: Sequence[int],
    linears: Mapping[str, nn.Linear] | None = None,
    prefill: Mapping[str, Tensor] | None = None,
    decode: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Logits [tokens of the reply, vocab] that each token of a reply was chosen from, in two forwards: the prompt, and the reply at once.

    Under causal attention the second one gives each position what its decode step would see, up to rounding.

    Args:
        model: A transformers causal language model in eval mode.
        prompt: Token ids of the prompt.
        reply: Token ids of the reply.
        linears: Layers of the model, by name.
        prefill: Weights [out, in] that those layers have while the prompt runs; their own where a name is missing.
        decode: Weights while the reply runs.
    """
    cache = {cache_keyword(model): DynamicCache(config=model.config)}

    def forward(ids: Sequence[int], start: int, weights: Mapping[str, Tensor] | None) -> Tensor:
        positions = torch.arange(start, start + len(ids), device=model.device)[None]
        with weights_in_place(linears or {}, weights or {}):
            output = model(input_ids=torch.tensor([list(ids)], device=model.device), position_ids=positions, use_cache=True, **cache)
        return output.logits[0]

    first = forward(prompt, 0, prefill)[-1:]
    if len(reply) == 1:
        return first
    return torch.cat([first, forward(reply[:-1], len(prompt), decode)])
