"""Calibration replies by a static cache: a batch at a time, they are those of the eager loop."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from sdbench.calibrate import replies
from sdbench.calibrate.choices import CalibrationChoices
from sdbench.calibrate.replies import Replier, require_eager_logits
from sdbench.calibrate.sampling import Sampler
from sdbench.engine.graph import GraphForward
from sdbench.engine.greedy import greedy
from sdbench.engine.paths import EAGER, FUSED_GRAPH, GRAPH
from sdbench.engine.phase import phase
from sdbench.errors import SdbenchError

PROMPTS = [[5, 9, 11, 40, 7], [8], [5, 9, 11, 40, 7, 7, 7], [12, 13, 14], [90, 91]]
CPU = torch.device("cpu")


def eager(model: PreTrainedModel, eos_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [greedy(model, [prompt], max_new_tokens=9, eos_ids=eos_ids, ignore_eos=not eos_ids)[0].ids for prompt in PROMPTS]


def static(model: PreTrainedModel, batch: int, max_positions: int = 20) -> Replier:
    """What a GPU would run, without the graph."""
    replier = Replier(model, batch, max_positions, sampled=False)
    replier._forward = GraphForward(model, max_positions, capture=False, batch=batch)
    return replier


def by_batches(replier: Replier, batch: int, eos_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    found = []
    for start in range(0, len(PROMPTS), batch):
        some = replier.replies(PROMPTS[start : start + batch], max_new_tokens=9, eos_ids=eos_ids, ignore_eos=not eos_ids)
        found += [reply.ids for reply in some]
    return found


@pytest.mark.parametrize("fixture", ["tiny_qwen3", "tiny_llama"])
@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_batches_over_a_static_cache_are_the_eager_replies(fixture: str, batch: int, request: pytest.FixtureRequest) -> None:
    """CASES 14 and 17: prompts of several lengths, a last batch that is not full, and no state left from the batch before."""
    model = request.getfixturevalue(fixture)
    expected = eager(model, ())
    assert by_batches(static(model, batch), batch, ()) == expected
    stop = expected[0][3]
    assert by_batches(static(model, batch), batch, (stop,)) == eager(model, (stop,))


class Reads(TorchDispatchMode):
    """Counts what a CUDA graph may not hold: values read back by the host."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return function(*arguments, **(keywords or {}))


def test_a_step_with_padding_reads_nothing_back(tiny_qwen3: PreTrainedModel) -> None:
    forward = GraphForward(tiny_qwen3, 20, capture=False, batch=2)
    greedy(tiny_qwen3, PROMPTS[:2], max_new_tokens=2, eos_ids=(), forward=forward)
    with torch.no_grad(), Reads() as seen, phase("decode"):
        forward(torch.tensor([[5], [6]]), torch.tensor([[6], [2]]), None)
    assert seen.count == 0


def test_prompts_of_one_length_after_padded_ones(tiny_qwen3: PreTrainedModel) -> None:
    """The mask of the batch before must not stay."""
    forward = GraphForward(tiny_qwen3, 20, capture=False, batch=2)
    alike = [[5, 6, 7], [8, 9, 10]]
    for prompts in (PROMPTS[:2], alike, PROMPTS[:2]):
        got = greedy(tiny_qwen3, prompts, max_new_tokens=6, eos_ids=(), forward=forward)
        assert [reply.ids for reply in got] == [greedy(tiny_qwen3, [prompt], max_new_tokens=6, eos_ids=())[0].ids for prompt in prompts]


def test_a_sampled_reply_does_not_depend_on_its_batch(tiny_qwen3: PreTrainedModel) -> None:
    choices = CalibrationChoices(temperature=1.5)

    def sampled(replier: Replier, numbers: list[int]) -> list[tuple[int, ...]]:
        sampler = Sampler.draw(3, numbers, 9, choices, CPU)
        found = replier.replies([PROMPTS[n] for n in numbers], max_new_tokens=9, eos_ids=(), ignore_eos=True, sampler=sampler)
        return [reply.ids for reply in found]

    one_by_one = [sampled(Replier(tiny_qwen3, 1, 20, sampled=True), [number])[0] for number in range(3)]
    assert sampled(static(tiny_qwen3, 2), [0, 1]) + sampled(static(tiny_qwen3, 2), [2]) == one_by_one
    assert one_by_one != [
        reply.ids for reply in Replier(tiny_qwen3, 3, 20, sampled=False).replies(PROMPTS[:3], max_new_tokens=9, eos_ids=())
    ]


class OnGpu:
    """A model as far as the choice of a way goes."""

    def __init__(self, model: PreTrainedModel):
        self.device, self.config = torch.device("cuda"), model.config


def test_the_way_is_chosen_and_said(tiny_qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Replier(tiny_qwen3, 4, 20, sampled=False).path, Replier(tiny_qwen3, 4, 20, sampled=False).reason) == (EAGER, None)
    monkeypatch.setattr(replies, "GraphForward", lambda model, positions, batch: (positions, batch))
    monkeypatch.setattr(replies, "require_eager_logits", lambda model, forward, batch: None)
    monkeypatch.setattr(replies, "fastest", lambda model, packed, positions: ("decoder", FUSED_GRAPH, None))
    many = Replier(OnGpu(tiny_qwen3), 4, 1000, sampled=False)
    # The model has 256 positions.
    assert (many.path, many.reason, many._forward) == (GRAPH, None, (256, 4))
    assert Replier(OnGpu(tiny_qwen3), 1, 20, sampled=False).path == FUSED_GRAPH
    assert Replier(OnGpu(tiny_qwen3), 1, 20, sampled=True).path == GRAPH

    def refuse(model: object, positions: int, batch: int) -> None:
        raise SdbenchError("no CUDA graph for it:\nits cache slides")

    monkeypatch.setattr(replies, "GraphForward", refuse)
    refused = Replier(OnGpu(tiny_qwen3), 4, 20, sampled=False)
    assert (refused.path, refused.reason) == (EAGER, "no CUDA graph for it: its cache slides")


@pytest.mark.parametrize("batch", [1, 2, 11])
@pytest.mark.parametrize("positions", [4, 20])
def test_the_check_passes_what_is_right(batch: int, positions: int, tiny_qwen3: PreTrainedModel) -> None:
    require_eager_logits(tiny_qwen3, GraphForward(tiny_qwen3, positions, capture=False, batch=batch), batch)


def test_the_check_finds_padding_that_is_seen(tiny_qwen3: PreTrainedModel) -> None:
    forward = GraphForward(tiny_qwen3, 20, capture=False, batch=2)
    forward._mask = None
    with pytest.raises(SdbenchError, match="give other logits than the model's own forward"):
        require_eager_logits(tiny_qwen3, forward, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_captured_batches_are_the_eager_replies(batch: int, tiny_qwen3: PreTrainedModel) -> None:
    model = tiny_qwen3.cuda()
    replier = Replier(model, batch, 20, sampled=False)
    assert (replier.path, replier.reason) == (FUSED_GRAPH if batch == 1 else GRAPH, None)
    assert by_batches(replier, batch, ()) == eager(model, ())
    assert by_batches(replier, batch, (5,)) == eager(model, (5,))
