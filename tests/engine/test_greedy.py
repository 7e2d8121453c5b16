from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from sdbench.engine.greedy import cache_keyword, greedy, greedy_eos_ids
from sdbench.engine.phase import current_phase
from sdbench.errors import SdbenchError, UsageError

PROMPT = [5, 17, 90, 33, 8, 64, 101]


class Scripted:
    """A stand-in for a model: call n answers with the n-th id of each row's script, and notes what it was called with."""

    def __init__(self, *scripts: list[int], vocab: int = 64, positions: int = 1024):
        self.scripts, self.vocab, self.device = scripts, vocab, torch.device("cpu")
        self.config = LlamaConfig(num_hidden_layers=1, max_position_embeddings=positions)
        self.calls: list[SimpleNamespace] = []

    def forward(self, input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep):
        return self(input_ids=input_ids)

    def __call__(self, *, input_ids, **others):
        step = len(self.calls)
        now = current_phase()
        self.calls.append(SimpleNamespace(name=now.name, rows=now.rows.tolist(), input_ids=input_ids.tolist(), **others))
        logits = torch.zeros(len(self.scripts), 1, self.vocab)
        for row, script in enumerate(self.scripts):
            logits[row, 0, script[min(step, len(script) - 1)]] = 1.0
        return SimpleNamespace(logits=logits)


def decode_rows(model, prompts, **options) -> list[int]:
    """Rows that counted in each decode forward, as a hook on a Linear sees them."""
    counts = []

    def hook(module, args, output):
        now = current_phase()
        assert now is not None and now.rows.shape == args[0].shape[:2]
        if now.name == "decode":
            counts.append(int(now.rows.sum()))

    handle = model.model.layers[1].mlp.down_proj.register_forward_hook(hook)
    try:
        greedy(model, prompts, **options)
    finally:
        handle.remove()
    return counts


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_llama"])
def test_same_ids_as_generate(name, request):
    model = request.getfixturevalue(name)
    ids = torch.tensor([PROMPT])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, eos_token_id=None, pad_token_id=0
    )
    [reply] = greedy(model, [PROMPT], max_new_tokens=16, eos_ids={2, 3}, ignore_eos=True)
    assert list(reply.ids) == expected[0, len(PROMPT) :].tolist()
    assert len(set(reply.ids)) > 4  # a model stuck on one token would prove nothing


def test_case_1_sampling_settings_of_the_checkpoint_do_not_apply(tiny_qwen3):
    plain = greedy(tiny_qwen3, [PROMPT], max_new_tokens=8, eos_ids=())
    tiny_qwen3.generation_config.update(do_sample=True, temperature=0.6, top_k=20, repetition_penalty=1.5, min_new_tokens=8)
    for seed in range(6):
        torch.manual_seed(seed)
        assert greedy(tiny_qwen3, [PROMPT], max_new_tokens=8, eos_ids=())[0].ids == plain[0].ids


def test_case_2_every_eos_id_stops_an_answer_run_and_none_a_rate_run():
    script = [26194, 13, 151643, 33975, 7]
    eos_ids = {151645, 151643}
    [answer] = greedy(Scripted(script, vocab=151936), [[1, 2]], max_new_tokens=5, eos_ids=eos_ids)
    assert (answer.ids, answer.eos, answer.truncated, answer.decode_steps) == ((26194, 13, 151643), True, False, 2)
    [rate] = greedy(Scripted(script, vocab=151936), [[1, 2]], max_new_tokens=5, eos_ids=eos_ids, ignore_eos=True)
    assert (rate.ids, rate.eos, rate.truncated, rate.decode_steps) == (tuple(script), False, False, 4)
    [without] = greedy(Scripted(script, vocab=151936), [[1, 2]], max_new_tokens=5, eos_ids=())
    assert without.ids == rate.ids


def test_case_3_eos_is_counted_and_nothing_after_it():
    [reply] = greedy(Scripted([10, 1, 5, 3, 2, 2]), [[1]], max_new_tokens=6, eos_ids={2})
    assert reply.ids == (10, 1, 5, 3, 2)
    model = Scripted([7] * 38 + [2] + [9] * 473)
    [early] = greedy(model, [[1]], max_new_tokens=512, eos_ids={2})
    assert (len(early.ids), early.decode_steps, len(model.calls)) == (39, 38, 39)


def test_case_4_reply_of_one_token_makes_no_decode_step():
    for model in (Scripted([2]), Scripted([9])):
        [reply] = greedy(model, [[1, 4]], max_new_tokens=1, eos_ids={2})
        assert (len(reply.ids), reply.decode_steps) == (1, 0)
        assert [call.name for call in model.calls] == ["prefill"]
    assert (reply.eos, reply.truncated) == (False, True)
    [stopped] = greedy(Scripted([2, 9, 9]), [[1, 4]], max_new_tokens=3, eos_ids={2})
    assert (stopped.ids, stopped.eos, stopped.truncated) == ((2,), True, False)


def test_eos_as_the_last_allowed_token_is_not_a_truncation():
    [reply] = greedy(Scripted([9, 2]), [[1]], max_new_tokens=2, eos_ids={2})
    assert (reply.ids, reply.eos, reply.truncated) == ((9, 2), True, False)


def test_case_14_decode_rows_of_two_prompts(tiny_qwen3):
    prompts = [PROMPT[:5], [*PROMPT, 11, 12]]
    assert decode_rows(tiny_qwen3, prompts, max_new_tokens=4, eos_ids=()) == [2, 2, 2]
    one_by_one = [decode_rows(tiny_qwen3, [prompt], max_new_tokens=4, eos_ids=()) for prompt in prompts]
    assert one_by_one == [[1, 1, 1], [1, 1, 1]]


def test_case_14_one_token_prompt_is_prefill(tiny_llama):
    assert decode_rows(tiny_llama, [[5]], max_new_tokens=4, eos_ids=()) == [1, 1, 1]


def test_case_14_a_finished_row_counts_no_more_and_padding_never_does():
    model = Scripted([9, 2, 9, 9], [9, 9, 9, 2])
    short, long = greedy(model, [[5], [6, 7, 8]], max_new_tokens=10, eos_ids={2})
    assert (short.ids, short.decode_steps, short.eos) == ((9, 2), 1, True)
    assert (long.ids, long.decode_steps, long.eos) == ((9, 9, 9, 2), 3, True)
    assert [call.name for call in model.calls] == ["prefill", "decode", "decode", "decode"]
    assert model.calls[0].rows == [[False, False, True], [True, True, True]]
    assert [call.rows for call in model.calls[1:]] == [[[True], [True]], [[False], [True]], [[False], [True]]]
    assert [call.input_ids for call in model.calls[1:]] == [[[9], [9]], [[0], [9]], [[0], [9]]]
    assert model.calls[0].position_ids.tolist() == [[0, 0, 0], [0, 1, 2]]
    assert model.calls[1].position_ids.tolist() == [[1], [3]]
    assert model.calls[1].attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_llama"])
def test_batch_equals_single(name, request):
    model = request.getfixturevalue(name)
    prompts = [PROMPT, PROMPT[:1], PROMPT[2:5]]
    batch = greedy(model, prompts, max_new_tokens=24, eos_ids=range(8))
    single = [greedy(model, [p], max_new_tokens=24, eos_ids=range(8))[0] for p in prompts]
    assert [r.ids for r in batch] == [r.ids for r in single]
    assert len({len(r.ids) for r in batch}) > 1  # they end at different steps


def test_rate_run_reads_nothing_back_before_its_last_token(tiny_qwen3):
    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    with Reads() as rate:
        greedy(tiny_qwen3, [PROMPT], max_new_tokens=8, eos_ids={2}, ignore_eos=True)
    with Reads() as answer:
        greedy(tiny_qwen3, [PROMPT], max_new_tokens=8, eos_ids=())
    assert (rate.count, answer.count) == (0, 7)


def test_on_token_counts_the_steps():
    seen: list[int] = []
    greedy(Scripted([9, 9, 2, 9]), [[1]], max_new_tokens=9, eos_ids={2}, on_token=seen.append)
    assert seen == [1, 2, 3]


def test_times_are_kept_apart(monkeypatch):
    ticks = iter([10.0, 11.0, 15.0])
    monkeypatch.setattr("sdbench.engine.greedy.time.perf_counter", lambda: next(ticks))
    [reply] = greedy(Scripted([9]), [[1]], max_new_tokens=100, eos_ids=())
    assert (reply.prefill_seconds, reply.decode_seconds, reply.decode_steps) == (1.0, 4.0, 99)


def test_cache_keyword_of_both_transformers_generations(tiny_llama):
    class Renamed(torch.nn.Module):
        """Takes the cache under the other generation's name."""

        def __init__(self, inner, other):
            super().__init__()
            self.inner, self.config, self.device, self.own = inner, inner.config, inner.device, cache_keyword(inner)
            if other == "cache":
                self.forward = self.with_cache
            else:
                self.forward = self.with_past

        def with_cache(self, input_ids, attention_mask, position_ids, cache, use_cache):
            return self.inner(input_ids, attention_mask, position_ids, use_cache=use_cache, **{self.own: cache})

        def with_past(self, input_ids, attention_mask, position_ids, past_key_values, use_cache):
            return self.inner(input_ids, attention_mask, position_ids, use_cache=use_cache, **{self.own: past_key_values})

    expected = greedy(tiny_llama, [PROMPT], max_new_tokens=6, eos_ids=())[0].ids
    for name in ("cache", "past_key_values"):
        wrapped = Renamed(tiny_llama, name)
        assert cache_keyword(wrapped) == name
        assert greedy(wrapped, [PROMPT], max_new_tokens=6, eos_ids=())[0].ids == expected


def test_a_model_without_a_cache_is_refused():
    class Encoder:
        def forward(self, input_ids):
            return input_ids

    with pytest.raises(SdbenchError, match="Encoder takes no KV cache"):
        cache_keyword(Encoder())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_name_the_step(bad):
    class Broken(Scripted):
        def __call__(self, **inputs):
            output = super().__call__(**inputs)
            if len(self.calls) == 3:
                output.logits[1, 0, 5] = bad
            return output

    for ignore_eos in (False, True):
        with pytest.raises(SdbenchError, match="NaN or Inf in the logits of new token 3 of prompt 1"):
            greedy(Broken([9], [9]), [[1], [1]], max_new_tokens=6, eos_ids=(), ignore_eos=ignore_eos)
    # The same forward after the reply's end is nobody's token.
    assert len(greedy(Broken([9] * 6, [9, 2]), [[1], [1]], max_new_tokens=6, eos_ids={2})[1].ids) == 2


def test_bad_requests_are_refused():
    model = Scripted([9], positions=16)
    with pytest.raises(SdbenchError, match="prompt 1 is empty"):
        greedy(model, [[1], []], max_new_tokens=4, eos_ids=())
    with pytest.raises(SdbenchError, match="no prompt"):
        greedy(model, [], max_new_tokens=4, eos_ids=())
    with pytest.raises(UsageError, match="max_new_tokens is 0"):
        greedy(model, [[1]], max_new_tokens=0, eos_ids=())
    with pytest.raises(UsageError, match="10 tokens and 7 new ones exceed the 16 positions"):
        greedy(model, [[1] * 10], max_new_tokens=7, eos_ids=())
    assert len(greedy(model, [[1] * 10], max_new_tokens=6, eos_ids=())[0].ids) == 6


def test_eos_ids_come_from_the_generation_config_then_the_config_then_the_tokenizer(tiny_qwen3):
    tokenizer = SimpleNamespace(eos_token_id=9)
    tiny_qwen3.generation_config.eos_token_id = [2, 3]
    assert greedy_eos_ids(tiny_qwen3, tokenizer) == {2, 3}
    tiny_qwen3.generation_config.eos_token_id = None
    tiny_qwen3.config.eos_token_id = 7
    assert greedy_eos_ids(tiny_qwen3, tokenizer) == {7}
    tiny_qwen3.config.eos_token_id = None
    assert greedy_eos_ids(tiny_qwen3, tokenizer) == {9}
    with pytest.raises(SdbenchError, match="no EOS id"):
        greedy_eos_ids(tiny_qwen3)
