"""Sampled replies for calibration: temperature, then top-k, then top-p, then one draw; judged replies are always greedy.

The filters in the order of transformers' ``generate``; nucleus (top-p) sampling after Holtzman et al., ICLR 2020, arXiv 1904.09751.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdbench.calibrate.choices import CalibrationChoices


@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws the next tokens of a batch of replies; give it to `sdbench.engine.greedy.greedy` as ``choose``.

    Args:
        uniforms: [batch, steps] float32 in [0, 1): the draw of each reply's each step, so that a reply depends on neither its batch nor
            the device's random state.
        choices: Temperature above 0, top-k and top-p.
    """

    uniforms: Tensor
    choices: CalibrationChoices

    @classmethod
    def draw(cls, seed: int, replies: Sequence[int], steps: int, choices: CalibrationChoices, device: torch.device) -> "Sampler":
        """The sampler of some replies of a run.

        Args:
            seed: The run's.
            replies: Numbers of the replies in the run, one a row of the batch.
            steps: Longest reply.
            choices: Temperature, top-k and top-p.
            device: Where the logits are.
        """
        # Python's hash of ints is no mix: neighbours would give related generators.
        generators = [torch.Generator().manual_seed(seed * 1_000_003 + reply) for reply in replies]
        return cls(torch.stack([torch.rand(steps, generator=generator) for generator in generators]).to(device), choices)

    def __call__(self, logits: Tensor, step: int) -> Tensor:
        """Token ids [batch] for logits [batch, vocab] of the step, counted from 0."""
        probability, token = probabilities(logits, self.choices)
        # The draw falls on the first token whose cumulative probability exceeds it.
        cumulative = probability.cumsum(dim=-1)
        place = torch.searchsorted(cumulative, self.uniforms[:, step, None] * cumulative[:, -1:], right=True)
        # Rounding may put a draw near 1 on the end of the sum, past the last token that is left.
        place = place.clamp_(max=(probability > 0).sum(dim=-1, keepdim=True) - 1)
        return token.gather(-1, place).squeeze(-1)


def probabilities(logits: Tensor, choices: CalibrationChoices) -> tuple[Tensor, Tensor]:
    """Probabilities after temperature, top-k and top-p, likeliest first, not renormalised after top-p.

    Args:
        logits: [batch, vocab].
        choices: Temperature above 0, top-k and top-p.

    Returns:
        Probabilities [batch, vocab] float32, 0 for tokens that are filtered out, and their token ids.
    """
    ordered, token = (logits.float() / choices.temperature).sort(dim=-1, descending=True, stable=True)
    if choices.top_k is not None:
        ordered[:, choices.top_k :] = -torch.inf
    probability = ordered.softmax(dim=-1)
    if choices.top_p is not None:
        # The token that reaches top_p stays: what counts is the sum before it.
        probability = probability.masked_fill(probability.cumsum(dim=-1) - probability >= choices.top_p, 0.0)
    return probability, token
