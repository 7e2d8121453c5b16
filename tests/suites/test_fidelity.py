import math

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sdbench.calibrate.methods import prune_linears
from sdbench.calibrate.select import select_linears
from sdbench.engine.greedy import greedy
from sdbench.engine.packed_linear import PrefillWeights, packed_linears
from sdbench.errors import SdbenchError
from sdbench.packing import pack
from sdbench.pattern import Pattern
from sdbench.suites.fidelity import CHUNK, compare, reply_logits

PROMPT = [5, 6, 7, 8, 9]


def logits(*rows: tuple[float, float]) -> Tensor:
    """Logits of two tokens with the given probabilities, shifted, as models' logits are."""
    return torch.tensor(rows).log() + 3.0


def test_by_hand() -> None:
    dense, pruned = logits((0.5, 0.5), (0.75, 0.25)), logits((0.75, 0.25), (0.5, 0.5))
    found = compare(dense, pruned, [0, 1])
    # 0.5 ln(0.5/0.75) + 0.5 ln(0.5/0.25), and 0.75 ln(0.75/0.5) + 0.25 ln(0.25/0.5).
    first = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    second = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert found.kl == pytest.approx((first + second) / 2, abs=1e-6)
    assert found.positions == 2


def test_perplexity_by_hand() -> None:
    """A reply of tokens 0, 1, 0: its probability under a model is the product of theirs, perplexity its inverse's third root."""
    dense, pruned = logits((0.5, 0.5), (0.25, 0.75), (0.8, 0.2)), logits((0.25, 0.75), (0.5, 0.5), (0.1, 0.9))
    found = compare(dense, pruned, [0, 1, 0])
    assert found.dense_nll == pytest.approx(-math.log(0.5 * 0.75 * 0.8) / 3, abs=1e-6)
    assert found.nll == pytest.approx(-math.log(0.25 * 0.5 * 0.1) / 3, abs=1e-6)
    assert math.exp(found.nll) == pytest.approx(80 ** (1 / 3), rel=1e-6)


def test_agreement_and_first_divergence() -> None:
    dense = logits((0.9, 0.1), (0.9, 0.1), (0.1, 0.9), (0.9, 0.1))
    said = [0, 0, 1, 0]
    assert compare(dense, dense, said).first_divergence is None
    found = compare(dense, logits((0.6, 0.4), (0.6, 0.4), (0.6, 0.4), (0.6, 0.4)), said)
    assert (found.agreement, found.first_divergence) == (0.75, 2)
    assert compare(dense, dense, said).kl == 0.0 and compare(dense, dense, said).agreement == 1.0


def test_chunks_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    dense, pruned = torch.randn(2, 2 * CHUNK + 3, 7, generator=generator)
    expected = torch.nn.functional.kl_div(pruned.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="batchmean")
    said = torch.randint(0, 7, (len(dense),), generator=generator)
    found = compare(dense, pruned, said.tolist())
    assert found.kl == pytest.approx(float(expected), rel=1e-5)
    for nll, logits_of in ((found.nll, pruned), (found.dense_nll, dense)):
        assert nll == pytest.approx(float(torch.nn.functional.cross_entropy(logits_of, said)), rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_an_error(bad: float) -> None:
    broken = logits((0.5, 0.5), (0.5, 0.5))
    broken[1, 0] = bad
    with pytest.raises(SdbenchError, match="NaN or Inf"):
        compare(logits((0.5, 0.5), (0.5, 0.5)), broken, [0, 1])


@pytest.mark.parametrize("fixture", ["tiny_qwen3", "tiny_llama"])
def test_the_dense_reply_is_what_its_logits_say(fixture: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(fixture)
    for length in (1, 12):
        (reply,) = greedy(model, [PROMPT], max_new_tokens=length, eos_ids=(), ignore_eos=True)
        found = reply_logits(model, PROMPT, reply.ids)
        assert found.argmax(-1).tolist() == list(reply.ids)
        torch.testing.assert_close(found, model(input_ids=torch.tensor([[*PROMPT, *reply.ids]])).logits[0, len(PROMPT) - 1 : -1])


@pytest.mark.parametrize("prefill", ["pruned", "dense"])
def test_pruned_logits_are_those_of_packed_decode_steps(tiny_qwen3: PreTrainedModel, prefill: PrefillWeights) -> None:
    """Step by step through the packed linears, prompt on either weights, against one forward with swapped weights."""
    (reply,) = greedy(tiny_qwen3, [PROMPT], max_new_tokens=6, eos_ids=(), ignore_eos=True)
    linears = select_linears(tiny_qwen3)
    pattern = Pattern(2, 4)
    packed = {name: pack(pruned.weight, pruned.keep, pattern, name) for name, pruned in prune_linears(linears, {}, pattern, "magnitude")}
    weights = {name: weight.unpack() for name, weight in packed.items()}
    before = {name: linear.weight.clone() for name, linear in linears.items()}
    found = reply_logits(tiny_qwen3, PROMPT, reply.ids, linears, weights if prefill == "pruned" else None, weights)
    assert all(torch.equal(linear.weight, before[name]) for name, linear in linears.items())

    steps: list[Tensor] = []

    def forced(logits: Tensor, step: int) -> Tensor:
        steps.append(logits[0].clone())
        return torch.tensor([reply.ids[step]])

    with packed_linears(tiny_qwen3, packed, prefill, "reference"):
        greedy(tiny_qwen3, [PROMPT], max_new_tokens=6, eos_ids=(), ignore_eos=True, choose=forced)
    torch.testing.assert_close(found, torch.stack(steps), rtol=1e-3, atol=1e-3)
    dense = reply_logits(tiny_qwen3, PROMPT, reply.ids)
    assert compare(dense, found, reply.ids).kl > 0.01
    # The first token comes from the prompt alone.
    assert bool(torch.allclose(found[0], dense[0], atol=1e-3)) == (prefill == "dense")
