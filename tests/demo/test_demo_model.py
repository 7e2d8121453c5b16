"""The bundled demo model as users get it, and the script that makes it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from sdbench.demo import MODEL_DIR, TRAINING_LOG, VALIDATION_FILE
from sdbench.demo.stream import build_stream, build_tokenizer, encode
from sdbench.demo.train import evaluate, learning_rate_share, parse_arguments, train
from sdbench.suites.data import normalise_question
from sdbench.suites.tasks.arithmetic.generate import Problem, reserved_questions


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


def validation(count=None):
    return [json.loads(line) for line in VALIDATION_FILE.read_text(encoding="utf-8").splitlines()][:count]


def test_folder_is_at_most_12_megabytes():
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 12_000_000


def test_it_is_a_bf16_qwen3_with_tied_embeddings():
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype="auto")
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    linears = [module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"]
    assert linears and all(linear.in_features % 32 == 0 and linear.out_features % 32 == 0 for linear in linears)


def test_generation_config_samples_and_has_two_eos_ids_as_qwen3(model, tokenizer):
    """CASES 1 and 2 start from such a generation config."""
    config = model.generation_config
    assert config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert config.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 0.6, 20, 0.95)


def test_every_digit_is_a_token(tokenizer):
    assert len(tokenizer) <= 1024
    for token in tokenizer.get_vocab():
        assert not any(character.isdigit() for character in token) or len(token) == 1
    assert tokenizer.tokenize("1907 cups") == ["1", "9", "0", "7", "Ġcups"]


def test_any_text_survives_the_tokenizer(tokenizer):
    text = "Zoë paid 12 €\tfor\n3 ∑"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == text + "<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2


def test_dense_answers_20_unseen_problems(model, tokenizer):
    score = evaluate(model, tokenizer, validation(20))
    assert score.questions == 20
    assert score.match >= 0.95
    assert score.eos == 1.0
    assert score.median_tokens >= 30


@pytest.mark.slow
def test_dense_answers_200_unseen_problems(model, tokenizer):
    """The issue's bar: 95% answer match, 99% EOS, a median reply of 30 tokens."""
    score = evaluate(model, tokenizer, validation())
    assert score.questions == 200
    assert score.match >= 0.95
    assert score.eos >= 0.99
    assert score.median_tokens >= 30


def test_training_log_tells_the_run_and_its_end():
    start, *steps, end = (json.loads(line) for line in TRAINING_LOG.read_text(encoding="utf-8").splitlines())
    assert start["event"] == "start" and {"arguments", "versions", "device", "parameters"} <= start.keys()
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert end["event"] == "end" and end["questions"] == 200
    assert end["match"] >= 0.95 and end["eos"] >= 0.99 and end["median_tokens"] >= 30


def test_encode_puts_the_loss_on_the_reply_and_its_end():
    tokenizer = build_tokenizer(seed=1, sample=50)
    stream = encode(tokenizer, [Problem("How many?", "So 1 + 1 = 2.\n#### 2", "+"), Problem("How many cups are there now?", "#### 30", "")])
    replies = [row[start:stop] for row, start, stop in zip(stream.ids, stream.prompts, stream.lengths, strict=True)]
    assert [tokenizer.decode(reply) for reply in replies] == ["So 1 + 1 = 2.\n#### 2<|im_end|>", "#### 30<|im_end|>"]
    assert tokenizer.decode(stream.ids[0, : stream.prompts[0]]) == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert stream.ids.shape[1] == stream.lengths.max()
    padding = [row[stop:] for row, stop in zip(stream.ids, stream.lengths, strict=True)]
    assert all((rest == tokenizer.convert_tokens_to_ids("<|endoftext|>")).all() for rest in padding)


def test_stream_does_not_depend_on_the_number_of_workers_and_holds_no_bundled_question():
    tokenizer = build_tokenizer(seed=1, sample=200)
    one, two = (build_stream(tokenizer, 5, 5200, workers) for workers in (1, 2))
    assert (one.ids == two.ids).all() and (one.lengths == two.lengths).all() and (one.prompts == two.prompts).all()
    assert one.ids.shape[0] == 5200
    questions = {
        normalise_question(text.split("user\n")[1].split("<|im_end|>")[0])
        for text in tokenizer.batch_decode([row.tolist() for row in one.ids[-500:]])
    }
    assert len(questions) > 450 and not questions & reserved_questions()


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.0), (0.015, 0.5), (0.03, 1.0), (0.515, 0.5), (1.0, 0.0), (1.2, 0.0)])
def test_learning_rate(progress, share):
    assert learning_rate_share(progress) == pytest.approx(share, abs=1e-12)


@pytest.mark.slow
def test_script_trains_at_a_toy_size(tmp_path):
    arguments = (
        "--steps 6 --problems 300 --batch-size 8 --hidden-size 128 --layers 1 --workers 1 --device cpu --log-every 2 --watch-every 99"
    )
    score = train(parse_arguments(["--output", str(tmp_path), *arguments.split()]))
    assert score.questions == 200
    events = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "step", "step", "end"]
    assert events[3]["loss"] < events[1]["loss"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.num_hidden_layers == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
