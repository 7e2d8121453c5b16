"""Sampled calibration replies, by hand: four tokens of probability 1/2, 1/4, 1/8 and 1/8."""

import pytest
import torch
from transformers import PreTrainedModel

from sdbench.calibrate.choices import CalibrationChoices
from sdbench.calibrate.sampling import Sampler, probabilities
from sdbench.engine.greedy import greedy

# Token 2 is the likeliest.
LOGITS = torch.tensor([[0.125, 0.25, 0.5, 0.125]]).log()


def left(**choices: float) -> dict[int, float]:
    probability, token = probabilities(LOGITS, CalibrationChoices(**{"temperature": 1.0, **choices}))
    return {int(t): round(float(p), 4) for p, t in zip(probability[0], token[0], strict=True) if p > 0}


def test_filters() -> None:
    assert left() == {2: 0.5, 1: 0.25, 0: 0.125, 3: 0.125}
    assert left(top_k=2) == {2: 0.6667, 1: 0.3333}
    assert left(top_k=9) == left()
    assert left(top_p=0.5) == {2: 0.5}
    assert left(top_p=0.6) == {2: 0.5, 1: 0.25}
    assert left(top_p=1.0) == left()
    # Squared and normalised: 16/22, 4/22, 1/22, 1/22.
    assert left(temperature=0.5) == {2: 0.7273, 1: 0.1818, 0: 0.0455, 3: 0.0455}
    # Top-k goes first: 2/3 of what it leaves reaches 0.6 already.
    assert left(top_k=2, top_p=0.6) == {2: 0.6667}


@pytest.mark.parametrize(("draw", "token"), [(0.0, 2), (0.49, 2), (0.5, 1), (0.74, 1), (0.76, 0), (0.9999999, 3)])
def test_a_draw_falls_into_the_cumulative_probabilities(draw: float, token: int) -> None:
    assert Sampler(torch.tensor([[draw]]), CalibrationChoices(temperature=1.0))(LOGITS, 0).tolist() == [token]


@pytest.mark.parametrize("draw", [0.0, 0.3, 0.99999994])
def test_a_filtered_token_is_never_drawn(draw: float) -> None:
    for choices in ({"top_k": 1}, {"top_p": 0.4}, {"temperature": 1e-6}):
        assert Sampler(torch.tensor([[draw]]), CalibrationChoices(**{"temperature": 1.0, **choices}))(LOGITS, 0).tolist() == [2]


def test_frequencies_are_the_probabilities() -> None:
    sampler = Sampler.draw(3, range(4000), 1, CalibrationChoices(temperature=1.0), torch.device("cpu"))
    counts = sampler(LOGITS.expand(4000, 4), 0).bincount(minlength=4)
    # Four standard deviations of 4000 draws at probability 1/2.
    assert (counts - torch.tensor([500, 1000, 2000, 500])).abs().max() < 4 * (4000 * 0.25) ** 0.5


def test_a_reply_depends_on_its_number_and_seed_alone(tiny_qwen3: PreTrainedModel) -> None:
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13], [5, 6, 7, 8, 9]]
    choices = CalibrationChoices(temperature=1.5)

    def replies(numbers: range, seed: int = 0) -> list[tuple[int, ...]]:
        torch.manual_seed(len(numbers) + seed)  # the global state has no say
        sampler = Sampler.draw(seed, numbers, 8, choices, tiny_qwen3.device)
        batch = [prompts[number] for number in numbers]
        return [reply.ids for reply in greedy(tiny_qwen3, batch, max_new_tokens=8, eos_ids=(), ignore_eos=True, choose=sampler)]

    together = replies(range(3))
    assert [replies(range(number, number + 1))[0] for number in range(3)] == together
    assert together[0] != together[2], "the same prompt twice is two draws"
    assert replies(range(3), seed=1) != together
