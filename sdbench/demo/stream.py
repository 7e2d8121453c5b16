"""The demo model's tokenizer and its training stream."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray
from transformers import Qwen2Tokenizer

from sdbench.suites.tasks.arithmetic.generate import Problem, problems, reserved_questions

TURN_START, TURN_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
VOCABULARY = 1024
CHUNK = 5_000
"""Problems a worker makes at a time; the stream depends on it, for every chunk has a seed of its own."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer(seed: int, sample: int = 20_000) -> Qwen2Tokenizer:
    """Train a byte-level BPE of Qwen's kind (digits stand alone) on problems of the stream.

    Qwen's own class is the one that `AutoTokenizer` takes for a Qwen3 model, so the split into words is the same however it is loaded.

    Args:
        seed: Of the sample.
        sample: Number of problems to train on.
    """
    special = [TEXT_END, TURN_START, TURN_END]
    blank = Qwen2Tokenizer(vocab={token: index for index, token in enumerate(special)}, merges=[], additional_special_tokens=special[1:])
    chosen = islice(problems(seed, reserved_questions()), sample)
    texts = (text for problem in chosen for text in ("system", "user", "assistant", problem.question, problem.answer))
    tokenizer = blank.train_new_from_iterator(texts, VOCABULARY, show_progress=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.eos_token = TURN_END
    tokenizer.pad_token = TEXT_END
    tokenizer.padding_side = "left"
    return tokenizer


@dataclass(frozen=True)
class Stream:
    """Chats as rows of ids, padded on the right.

    Attributes:
        ids: int16 [problems, length].
        prompts: int16 [problems], tokens of the prompt, on which there is no loss.
        lengths: int16 [problems], tokens in all, the reply's `<|im_end|>` included.
    """

    ids: NDArray[np.int16]
    prompts: NDArray[np.int16]
    lengths: NDArray[np.int16]


def _pad(rows: list[list[int]], padding: int) -> NDArray[np.int16]:
    ids = np.full((len(rows), max(map(len, rows))), padding, dtype=np.int16)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return ids


def encode(tokenizer: Qwen2Tokenizer, chosen: Sequence[Problem]) -> Stream:
    """Problems as chats of one question and its answer.

    Prompt and reply are encoded apart, as they are when the model answers.
    """
    turn = [{"role": "user", "content": "\0"}]
    before, after = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)).split("\0")
    prompts = tokenizer([before + problem.question + after for problem in chosen])["input_ids"]
    replies = tokenizer([problem.answer + TURN_END for problem in chosen])["input_ids"]
    rows = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    padding = tokenizer.get_vocab()[TEXT_END]
    return Stream(_pad(rows, padding), *(np.array([len(row) for row in part], dtype=np.int16) for part in (prompts, rows)))


_tokenizer: Qwen2Tokenizer
_reserved: frozenset[str]


def _start_worker(tokenizer: Qwen2Tokenizer, reserved: frozenset[str]) -> None:
    global _tokenizer, _reserved
    _tokenizer, _reserved = tokenizer, reserved


def _encode_chunk(job: tuple[int, int]) -> Stream:
    seed, count = job
    return encode(_tokenizer, list(islice(problems(seed, _reserved), count)))


def build_stream(tokenizer: Qwen2Tokenizer, seed: int, count: int, workers: int) -> Stream:
    """Generate and encode `count` problems, none of them in the bundled parts.

    Args:
        tokenizer: From `build_tokenizer`.
        seed: The first chunk's; the others follow it.
        count: Number of problems.
        workers: Number of processes; they don't change the result.
    """
    # The processes are the parallelism; and the tokenizer's own thread pool doesn't survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    jobs = [(seed + 1 + start // CHUNK, min(CHUNK, count - start)) for start in range(0, count, CHUNK)]
    with ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (tokenizer, reserved_questions())) as pool:
        chunks = list(pool.map(_encode_chunk, jobs))
    width = max(chunk.ids.shape[1] for chunk in chunks)
    padding = tokenizer.get_vocab()[TEXT_END]
    ids = [np.pad(chunk.ids, ((0, 0), (0, width - chunk.ids.shape[1])), constant_values=padding) for chunk in chunks]
    return Stream(np.concatenate(ids), *(np.concatenate([getattr(c, name) for c in chunks]) for name in ("prompts", "lengths")))
