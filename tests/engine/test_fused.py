"""The fused step against transformers: greedy ids equal in fp32, bf16 logits as near to fp32 as transformers' own bf16."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config, SmolLM3Config

from sdbench.calibrate.magnitude import keep_mask
from sdbench.engine.fused import FusedDecoder, Unfusable
from sdbench.engine.fused import launches as launches_module
from sdbench.engine.fused import plan as plan_module
from sdbench.engine.fused import products as products_module
from sdbench.engine.greedy import Reply, greedy
from sdbench.engine.packed_linear import packed_linears
from sdbench.errors import SdbenchError, UsageError
from sdbench.kernels import registry
from sdbench.kernels.decode import attention, gate, head, norm
from sdbench.packing import PackedWeight, pack
from sdbench.pattern import Pattern
from sdbench.timing import relative_error
from tests.conftest import TINY, build

PROMPTS = [[5, 9, 11, 40, 7], [8], [5, 9, 11, 40, 7]]
HEADS_OF_32 = {"num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**TINY, head_dim=32, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**TINY | HEADS_OF_32, tie_word_embeddings=False),
    "llama": LlamaConfig(
        **TINY,
        head_dim=32,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral": MistralConfig(**TINY, head_dim=32, sliding_window=None, tie_word_embeddings=False),
}  # fmt: skip


def packed_of(model: PreTrainedModel, ending: str = "_proj") -> dict[str, PackedWeight]:
    """Linears of the decoder layers at 2:4."""
    linears = {name: module for name, module in model.named_modules() if name.endswith(ending)}
    return {name: pack(m.weight.detach(), keep_mask(m.weight, Pattern(2, 4)), Pattern(2, 4)) for name, m in linears.items()}


def reply(decoder: FusedDecoder, prompt: list[int], tokens: int = 12, eos: tuple[int, ...] = (), ignore_eos: bool = False) -> Reply:
    return decoder.reply(prompt, max_new_tokens=tokens, eos_ids=eos, ignore_eos=ignore_eos)


def eager(model: PreTrainedModel, prompt: list[int], tokens: int = 12, eos: tuple[int, ...] = (), ignore_eos: bool = False) -> Reply:
    return greedy(model, [prompt], max_new_tokens=tokens, eos_ids=eos, ignore_eos=ignore_eos)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_ids_are_those_of_transformers(name: str, device: torch.device) -> None:
    """CASES 17: prompts A, B, A of different lengths through one step; no state stays behind."""
    model = build(CONFIGS[name]).to(device)
    if name == "qwen2":
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.data.normal_(generator=torch.Generator().manual_seed(1))
    decoder = FusedDecoder(model, 32)
    replies = [reply(decoder, prompt) for prompt in PROMPTS]
    assert [r.ids for r in replies] == [eager(model, prompt).ids for prompt in PROMPTS]
    assert replies[0].ids == replies[2].ids
    assert [r.decode_steps for r in replies] == [11, 11, 11]


@pytest.mark.parametrize("ignored", [(), ("v_proj", "k_proj", "q_proj")])
def test_pruned_ids_and_calls(ignored: tuple[str, ...], tiny_qwen3: PreTrainedModel, device: torch.device) -> None:
    model, pattern = tiny_qwen3.to(device), Pattern(2, 4)
    linears = {n: m for n, m in model.named_modules() if n.endswith("_proj") and not n.endswith(ignored or ("none",))}
    weights = {name: pack(linear.weight.detach(), keep_mask(linear.weight, pattern), pattern) for name, linear in linears.items()}
    dense = eager(model, PROMPTS[0]).ids
    with packed_linears(model, weights, "pruned"):
        decoder = FusedDecoder(model, 32)
        assert decoder.pruned_products == 2 * (3 if ignored else 4)
        got = reply(decoder, PROMPTS[0])
        assert got.ids == eager(model, PROMPTS[0]).ids
        assert decoder.calls == decoder.pruned_products * got.decode_steps
    assert got.ids != dense
    assert reply(FusedDecoder(model, 32), PROMPTS[0]).ids == dense


def test_eos_and_equal_lengths(tiny_qwen3: PreTrainedModel, device: torch.device) -> None:
    """CASES 2 and 3: an answer stops at any of the EOS ids, which counts; a rate run goes on to exactly N with the same ids."""
    model = tiny_qwen3.to(device)
    decoder = FusedDecoder(model, 64)
    whole = reply(decoder, PROMPTS[0], 40, ignore_eos=True)
    assert len(whole.ids) == 40 and not whole.eos and not whole.truncated
    for stop in (whole.ids[0], whole.ids[9], whole.ids[30]):
        want = eager(model, PROMPTS[0], 40, (stop, 1000))
        got = reply(decoder, PROMPTS[0], 40, (stop, 1000))
        assert (got.ids, got.eos, got.truncated, got.decode_steps) == (want.ids, True, False, want.decode_steps)
    assert reply(decoder, PROMPTS[0], 40, (whole.ids[30],), ignore_eos=True).ids == whole.ids
    cut = reply(decoder, PROMPTS[0], 4, (1000,))
    assert cut.truncated and len(cut.ids) == 4
    single = reply(decoder, PROMPTS[0], 1, (1000,))
    assert (len(single.ids), single.decode_steps, single.decode_seconds) == (1, 0, 0.0)


def test_one_wrong_sequence_of_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A four-hundredth of all logits, half as large again: an error of 0.025 in the whole, and of 0.5 in its own."""
    model = build(CONFIGS["qwen3"])
    decoder = FusedDecoder(model, 16, batch=400)
    run = decoder.step.run

    def wrong(logits: torch.Tensor | None = None) -> None:
        run(logits)
        if logits is not None:
            logits[399] *= 1.5

    monkeypatch.setattr(decoder.step, "run", wrong)
    with pytest.raises(Unfusable, match=r"logits differ from transformers' by 5\.0e-01"):
        decoder._verify(0.1)


def test_refusals(tiny_qwen3: PreTrainedModel) -> None:
    decoder = FusedDecoder(tiny_qwen3, 16)
    with pytest.raises(UsageError, match="5 tokens and 12 new ones exceed the 16 positions"):
        reply(decoder, PROMPTS[0])
    with pytest.raises(SdbenchError, match="prompt 0 is empty"):
        reply(decoder, [])
    tiny_qwen3.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(SdbenchError, match="new token 1"):
        reply(decoder, PROMPTS[0], 4)


def test_a_logit_that_breaks_in_a_step_is_an_error(tiny_llama: PreTrainedModel) -> None:
    model = build(CONFIGS["llama"])
    decoder = FusedDecoder(model, 32)
    # The prompt's own forward reads the embedding of its tokens alone; the first step reads that of token 1's id.
    first = eager(model, PROMPTS[0], 2).ids[0]
    model.model.embed_tokens.weight.data[first] = torch.inf
    with pytest.raises(SdbenchError, match="new token 2"):
        reply(decoder, PROMPTS[0], 4)


def change(config: PretrainedConfig, **values: object) -> Callable[[], PreTrainedModel]:
    return lambda: build(type(config)(**config.to_dict() | values))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (change(CONFIGS["llama"], hidden_act="gelu"), "activation is gelu"),
        (change(CONFIGS["llama"], mlp_bias=True), "outside q, k and v has a bias"),
        (change(CONFIGS["llama"], head_dim=16), "heads have 16 elements"),
        (change(CONFIGS["mistral"], sliding_window=8), "sliding"),
        (lambda: build(SmolLM3Config(**TINY | HEADS_OF_32, no_rope_layers=[1, 0], pad_token_id=0)), "no rotary embedding"),
        (
            change(CONFIGS["qwen3"], layer_types=["full_attention", "sliding_attention"], sliding_window=8, use_sliding_window=True),
            "sliding",
        ),
    ],
)
def test_what_is_built_otherwise_is_refused(make: Callable[[], PreTrainedModel], reason: str) -> None:
    with pytest.raises(Unfusable, match=reason):
        FusedDecoder(make(), 16)


def test_a_step_that_computes_something_else_is_refused(tiny_qwen3: PreTrainedModel) -> None:
    """A model may look as expected and compute otherwise: one step is compared."""
    hook = tiny_qwen3.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(Unfusable, match="logits differ from transformers'"):
        FusedDecoder(tiny_qwen3, 16)
    hook.remove()
    FusedDecoder(tiny_qwen3, 16)


def test_eight_bit_weights_are_compared_too(tiny_qwen3: PreTrainedModel) -> None:
    FusedDecoder(tiny_qwen3, 16, int8=True)
    tiny_qwen3.model.layers[0].register_forward_hook(lambda module, inputs, output: -output)
    with pytest.raises(Unfusable, match="logits differ from transformers'"):
        FusedDecoder(tiny_qwen3, 16, int8=True)


def test_a_rotary_embedding_of_half_a_head_is_refused(tiny_qwen3: PreTrainedModel) -> None:
    """Its table of angles has half of the columns that the kernel reads."""
    rotary = tiny_qwen3.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq[:8]
    with pytest.raises(Unfusable, match="turns 16 of the 32 elements"):
        FusedDecoder(tiny_qwen3, 16)


@pytest.mark.parametrize("pruned", [False, True])
def test_the_kernels_give_the_same_ids(
    tiny_qwen3: PreTrainedModel, pruned: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same by Triton kernels: a few tokens in the interpreter, a graph on a GPU."""
    for module in (attention, gate, head, norm, products_module):
        monkeypatch.setattr(module, "uses_kernels", lambda device: True)
    model = tiny_qwen3.to(device)
    with packed_linears(model, packed_of(model) if pruned else {}, "pruned"):
        want = [eager(model, prompt, 3).ids for prompt in PROMPTS[:2]]
        # A packed weight of float32 takes the interpreter long, one token at a time.
        for batch in (2,) if pruned and device.type == "cpu" else (1, 2):
            decoder = FusedDecoder(model, 32, batch=batch)
            assert (decoder.captured is not None) == (device.type == "cuda")
            replies = decoder.replies(PROMPTS[:batch], max_new_tokens=3, eos_ids=())
            assert [reply.ids for reply in replies] == want[:batch]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pruned", [False, True])
def test_several_prompts_at_once_are_answered_as_each_alone(name: str, pruned: bool, device: torch.device) -> None:
    """CASES 14: of different lengths, ending at different steps; and again with prompts of one length, nothing of the first left."""
    model = build(CONFIGS[name]).to(device)
    weights = packed_of(model) if pruned else {}
    with packed_linears(model, weights, "pruned"):
        decoder = FusedDecoder(model, 32, batch=3)
        assert decoder.step.kernels is None
        prompts = [[5, 9, 11, 40, 7], [8], [4, 60, 21]]
        alone = [eager(model, prompt, 20) for prompt in prompts]
        # The second reply ends with its first token, the others somewhere later.
        stops = (alone[1].ids[0], alone[0].ids[5])
        for some in (prompts, [[5, 9], [8, 8], [100, 3]]):
            for eos in ((), stops):
                got = decoder.replies(some, max_new_tokens=20, eos_ids=eos)
                want = [eager(model, prompt, 20, eos) for prompt in some]
                assert [(r.ids, r.eos, r.truncated, r.decode_steps) for r in got] == [
                    (r.ids, r.eos, r.truncated, r.decode_steps) for r in want
                ]
        assert len({r.decode_seconds for r in got}) == 1 and got[0].decode_seconds > 0
        assert (decoder.calls > 0) == pruned
        with pytest.raises(SdbenchError, match="takes 3 prompts at once, not 1"):
            decoder.reply([5], max_new_tokens=2, eos_ids=())


def test_a_broken_logit_names_its_prompt(device: torch.device) -> None:
    model = build(CONFIGS["llama"]).to(device)
    decoder = FusedDecoder(model, 32, batch=2)
    token = eager(model, [9, 9], 3).ids[1]
    model.model.embed_tokens.weight.data[token, 0] = torch.nan
    with pytest.raises(SdbenchError, match="of new token 3 of prompt 1"):
        decoder.replies([[8, 4], [9, 9]], max_new_tokens=6, eos_ids=())


def test_eight_bit_and_fp16_weights_are_for_one_prompt(tiny_qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_module, "uses_kernels", lambda device: True)
    with pytest.raises(Unfusable, match="several prompts at once with int8 weights"):
        FusedDecoder(tiny_qwen3, 16, batch=2, int8=True)
    with pytest.raises(Unfusable, match="several prompts at once with float16"):
        FusedDecoder(tiny_qwen3.half(), 16, batch=2)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("pruned", [False, True])
def test_a_product_that_is_a_little_wrong_is_not_timed(
    tiny_qwen3: PreTrainedModel, pruned: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row off by a hundredth, which the logits of a step do not show: a tuned config gives way to the default, and that to no step."""
    for module in (attention, gate, head, norm, products_module):
        monkeypatch.setattr(module, "uses_kernels", lambda device: True)
    find, wrong = registry.find, [2]

    def found(kernel: str, name: str) -> registry.Variant:
        variant = find(kernel, name)

        def launch(weight: Any, x: torch.Tensor, y: torch.Tensor, config: registry.Config) -> torch.Tensor:
            y = variant.launch(weight, x, y, config)
            if config["number"] in wrong:
                y[..., 0] *= 1.01
            return y

        return replace(variant, launch=launch, default=lambda problem: {**variant.default(problem), "number": 4})

    monkeypatch.setattr(launches_module, "_QUICKEST", {})
    monkeypatch.setattr(launches_module.registry, "find", found)
    monkeypatch.setattr(
        launches_module.tuned,
        "lookup",
        lambda variant, problem, device: ({**variant.default(problem), "number": 2}, "cache"),
    )
    weights = packed_of(tiny_qwen3, "layers.0.self_attn.o_proj") if pruned else {}
    with packed_linears(tiny_qwen3, weights, "pruned"):
        with pytest.warns(UserWarning, match="the cache config .* gives a wrong product"):
            decoder = FusedDecoder(tiny_qwen3, 8, batch=batch)
        assert any(product.packed for product in decoder.step.products()) == pruned
        wrong.append(4)
        with pytest.warns(UserWarning), pytest.raises(Unfusable, match=r"x\d+ gives a wrong product .*; run 'sdbench kernels'"):
            FusedDecoder(tiny_qwen3, 8, batch=batch)


@torch.no_grad()
def test_eight_bit_weights_decode_near_the_dense_ones(tiny_qwen3: PreTrainedModel, device: torch.device) -> None:
    model = tiny_qwen3.to(device)
    plan, logits = plan_module.plan(model), []
    for int8 in (False, True):
        decoder = FusedDecoder(model, 16, int8=int8, capture=False)
        decoder._prefill(PROMPTS[:1])
        logits.append(torch.zeros(1, plan.head.shape[0], device=device))
        decoder.step.run(logits[-1])
        assert {product.packed for product in decoder.step.products()} == {False}
    assert 0 < relative_error(logits[1], logits[0].double()) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_bf16_is_as_near_to_fp32_as_transformers(name: str, pruned: bool, batch: int) -> None:
    """After a prompt: the fused step's logits differ from fp32 by no more than eager bf16's do (and a little)."""
    exact, rounded = build(CONFIGS[name]).cuda(), build(CONFIGS[name]).cuda().bfloat16()
    pattern = Pattern(2, 4)
    for module_name, linear in rounded.named_modules():
        if module_name.endswith("_proj"):
            keep = keep_mask(linear.weight, pattern) if pruned else torch.ones_like(linear.weight, dtype=torch.bool)
            linear.weight.data.mul_(keep)
            exact.get_submodule(module_name).weight.data.copy_(linear.weight)
    exact.load_state_dict({key: value.float() for key, value in rounded.state_dict().items()})
    linears = {n: m for n, m in rounded.named_modules() if n.endswith("_proj")}
    weights = {n: pack(m.weight.detach(), keep_mask(m.weight, pattern), pattern) for n, m in linears.items()} if pruned else {}
    ids = torch.randint(0, 128, (batch, 6), generator=torch.Generator().manual_seed(batch)).cuda()
    with torch.no_grad():
        want = exact(input_ids=ids).logits[:, -1].double()
        theirs = relative_error(rounded(input_ids=ids).logits[:, -1], want)
        with packed_linears(rounded, weights, "pruned"):
            decoder = FusedDecoder(rounded, 16, batch=batch)
            decoder._prefill(ids[:, :-1].tolist())
            decoder.step.start(ids[:, -1].tolist(), [5] * batch)
            got = torch.zeros(batch, 128, device="cuda")
            decoder.step.run(got)
    ours = relative_error(got, want)
    assert ours <= 1.5 * theirs + 1e-3, (ours, theirs)
