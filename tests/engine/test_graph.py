"""The static-cache step that becomes a CUDA graph: its ids are those of the eager loop, and prompts share it without stale state."""

import pytest
import torch
import torch._dynamo.utils
from transformers import PreTrainedModel
from triton.runtime.errors import PTXASError

from sdbench.calibrate.magnitude import keep_mask
from sdbench.engine import decoders
from sdbench.engine.graph import CompiledForward, GraphForward
from sdbench.engine.greedy import greedy
from sdbench.engine.packed_linear import packed_linears
from sdbench.errors import SdbenchError, UsageError
from sdbench.packing import pack
from sdbench.pattern import Pattern

PROMPTS = [[5, 9, 11, 40, 7], [8], [5, 9, 11, 40, 7]]


def replies(model: PreTrainedModel, forward: GraphForward | None) -> list[tuple[int, ...]]:
    return [greedy(model, [prompt], max_new_tokens=12, eos_ids=(), forward=forward)[0].ids for prompt in PROMPTS]


def test_prompts_of_different_lengths_share_one_step(tiny_qwen3: PreTrainedModel) -> None:
    """CASES 17: prompts A, B, A; the third reply is the first, and each is the eager one."""
    got = replies(tiny_qwen3, GraphForward(tiny_qwen3, 32, capture=False))
    assert got == replies(tiny_qwen3, None)
    assert got[0] == got[2]


def test_a_context_that_does_not_fit_is_refused(tiny_qwen3: PreTrainedModel) -> None:
    forward = GraphForward(tiny_qwen3, 16, capture=False)
    with pytest.raises(UsageError, match="5 tokens and 12 new ones exceed the 16 positions"):
        greedy(tiny_qwen3, [PROMPTS[0]], max_new_tokens=12, eos_ids=(), forward=forward)


def test_a_step_that_no_graph_can_hold_is_refused(tiny_qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: GraphForward) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(GraphForward, "_capture", fails)
    for forward in (GraphForward, CompiledForward):
        with pytest.raises(SdbenchError, match="no CUDA graph for Qwen3ForCausalLM: operation not permitted"):
            forward(tiny_qwen3, 16)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory.\nTried"), PTXASError("no"), SdbenchError("no graph")], ids=repr
)
def test_eager_is_left_where_neither_a_fused_step_nor_a_graph_can_be_had(
    error: Exception, tiny_qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(type(tiny_qwen3), "device", property(lambda self: torch.device("cuda")))
    for name in ("FusedDecoder", "GraphForward"):
        monkeypatch.setattr(decoders, name, fails)
    _, path, reason = decoders.fastest(tiny_qwen3, {}, 16)
    told = " ".join(str(error).split())
    assert (path, reason) == (decoders.EAGER, f"{told}; {told}")


def test_the_compiled_step_is_one_graph_for_all_positions(tiny_qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 17 for torch.compile: nothing breaks the graph, and no length, reply or reset compiles it again."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert replies(tiny_qwen3, CompiledForward(tiny_qwen3, 32, capture=False)) == replies(tiny_qwen3, None)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.gpu
def test_captured_dense_and_packed(tiny_qwen3: PreTrainedModel, tiny_llama: PreTrainedModel) -> None:
    """CASES 17 on a graph; rows through packed linears are counted at each replay."""
    pattern = Pattern(2, 4)
    for model in (tiny_qwen3.cuda(), tiny_llama.cuda()):
        assert replies(model, GraphForward(model, 32)) == replies(model, None)
        linears = {name: module for name, module in model.named_modules() if name.endswith("_proj")}
        weights = {name: pack(linear.weight.detach(), keep_mask(linear.weight, pattern), pattern) for name, linear in linears.items()}
        with packed_linears(model, weights, "pruned") as modules:
            eager = replies(model, None)
            counted = sum(module.calls for module in modules.values())
            forward = GraphForward(model, 32)
            before = sum(module.calls for module in modules.values())
            assert replies(model, forward) == eager
            assert sum(module.calls for module in modules.values()) - before == counted == len(modules) * 11 * len(PROMPTS)
        torch.cuda.synchronize()
