"""Train the bundled demo model: `python -m sdbench.demo.train --output DIR` writes `DIR/model` and `DIR/training_log.jsonl`."""

import argparse
import json
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sdbench.demo.stream import TEXT_END, TURN_END, build_stream, build_tokenizer
from sdbench.errors import SdbenchError, UsageError
from sdbench.suites.tasks.arithmetic import VALIDATION_FILE

log = logging.getLogger("sdbench.demo")

POSITIONS = 2048
WARMUP = 0.03
"""Share of the training in which the learning rate rises."""
IGNORED = -100


def build_model(tokenizer: Qwen2Tokenizer, hidden_size: int, layers: int) -> Qwen3ForCausalLM:
    """A Qwen3 with fresh weights in fp32: heads of 64, two key-value heads, tied embeddings, an MLP three times as wide as the model.

    Its generation config samples as Qwen3's does and has Qwen3's two EOS tokens.
    """
    padding, turn_end = (tokenizer.get_vocab()[token] for token in (TEXT_END, TURN_END))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=turn_end,
        pad_token_id=padding,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, eos_token_id=[turn_end, padding], pad_token_id=padding
    )
    return model


def learning_rate_share(progress: float) -> float:
    """The share of the peak learning rate: a straight rise over the first `WARMUP` of the training, then a cosine down to 0."""
    if progress < WARMUP:
        return progress / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (min(progress, 1.0) - WARMUP) / (1 - WARMUP)))


@dataclass(frozen=True)
class Score:
    """What greedy replies are worth: shares of the questions, and the median of reply tokens (the EOS token included)."""

    questions: int
    match: float
    eos: float
    median_tokens: float


@torch.no_grad()
def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, records: Sequence[dict[str, str]], max_tokens: int = 160
) -> Score:
    """Answer the questions greedily, in one batch; an answer matches if its last line is the reference's, `#### N`."""
    chats = [[{"role": "user", "content": record["question"]}] for record in records]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, temperature=None, top_k=None, top_p=None)
    stops = set(model.generation_config.eos_token_id)
    matches, ended, lengths = 0, 0, []
    for record, ids in zip(records, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        end = next((index for index, token in enumerate(ids) if token in stops), None)
        ended += end is not None
        lengths.append(len(ids) if end is None else end + 1)
        text = str(tokenizer.decode(ids[:end], skip_special_tokens=True))
        matches += text.rpartition("\n")[2] == record["answer"].rpartition("\n")[2]
    return Score(len(records), matches / len(records), ended / len(records), statistics.median(lengths))


class Log:
    """The training log: one JSON object a line, written as it happens, and told to the console."""

    def __init__(self, path: Path):
        self._path = path
        path.write_text("", encoding="utf-8")

    def write(self, **record: Any) -> None:
        """Append one record."""
        line = json.dumps(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        log.info(line)


def train(args: argparse.Namespace) -> Score:
    """Train, save, load what was saved, and judge that on the validation problems."""
    start = time.monotonic()
    model_dir = args.output / "model"
    model_dir.mkdir(parents=True, exist_ok=True)
    journal = Log(args.output / "training_log.jsonl")
    records = [json.loads(line) for line in VALIDATION_FILE.read_text(encoding="utf-8").splitlines()]
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    # The workers fork, so this comes before anything touches CUDA.
    tokenizer = build_tokenizer(args.seed, min(args.problems, 20_000))
    tokenizer.model_max_length = POSITIONS
    tokenizer.save_pretrained(model_dir)
    stream = build_stream(tokenizer, args.seed, args.problems, args.workers)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    ids = torch.from_numpy(stream.ids).to(device)
    prompts, lengths = torch.from_numpy(stream.prompts).to(device), torch.from_numpy(stream.lengths).to(device)
    columns = torch.arange(ids.shape[1], device=device)

    # Transformers' decorator hides the signature.
    model = build_model(tokenizer, args.hidden_size, args.layers).to(device)  # type: ignore[arg-type]
    forward = torch.compile(model) if args.compile else model
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    kept = [weight for weight in model.parameters() if weight.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.98),
        fused=on_gpu,
    )
    journal.write(
        event="start",
        arguments={name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items() if name != "output"},
        versions={"torch": torch.__version__, "transformers": transformers.__version__, "tokenizers": tokenizers.__version__},
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        parameters=sum(weight.numel() for weight in model.parameters()),
        length=ids.shape[1],
        seconds=round(time.monotonic() - start, 1),
    )

    ready, deadline = time.monotonic(), start + 60 * args.max_minutes
    if ready >= deadline:
        raise UsageError(
            f"--max-minutes {args.max_minutes:g} went into making {args.problems} problems: allow more minutes or fewer problems"
        )
    order = torch.randperm(args.problems, device=device)
    tokens = torch.zeros((), dtype=torch.int64, device=device)
    position, step, progress = 0, 0, 0.0
    while progress < 1.0:
        if position + args.batch_size > args.problems:
            order, position = torch.randperm(args.problems, device=device), 0
        rows = order[position : position + args.batch_size]
        position += args.batch_size
        batch = ids[rows].long()
        in_reply = (columns >= prompts[rows, None]) & (columns < lengths[rows, None])
        labels = batch.masked_fill(~in_reply, IGNORED)[:, 1:]
        tokens += lengths[rows].sum()

        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * learning_rate_share(progress)
        # No mask is needed: attention is causal and the padding comes last.
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            logits = forward(input_ids=batch, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        step += 1
        if step % args.log_every == 0 and on_gpu:
            torch.cuda.synchronize()
        now = time.monotonic()
        progress = max(step / args.steps, (now - ready) / (deadline - ready))
        if step % args.log_every == 0 or progress >= 1.0:
            watched = {}
            if step % args.watch_every == 0 and progress < 1.0:
                with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                    watched = asdict(evaluate(model, tokenizer, records[:64]))
            journal.write(
                event="step",
                step=step,
                seconds=round(now - start, 1),
                tokens=tokens.item(),
                loss=round(loss.item(), 5),
                learning_rate=optimizer.param_groups[0]["lr"],
                **watched,
            )

    model.to(torch.bfloat16).save_pretrained(model_dir)
    score = judge(model_dir, device, records)
    journal.write(event="end", steps=step, seconds=round(time.monotonic() - start, 1), **asdict(score))
    return score


def judge(model_dir: Path, device: torch.device, records: Sequence[dict[str, str]]) -> Score:
    """Load a saved demo model as any user would, in the dtype of its file, and score it."""
    model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype="auto", device_map=device)
    return evaluate(model, AutoTokenizer.from_pretrained(model_dir), records)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The script's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sdbench.demo.train", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--problems", type=int, default=500_000, help="size of the training stream")
    parser.add_argument("--steps", type=int, default=8000, help="most optimizer steps")
    parser.add_argument("--max-minutes", type=float, default=4.0, help="the learning rate reaches 0 by then, data generation included")
    parser.add_argument("--batch-size", type=int, default=512, help="problems a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at its peak")
    parser.add_argument("--hidden-size", type=int, default=256, help="width; a multiple of 128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--workers", type=int, default=min(16, len(os.sched_getaffinity(0))), help="processes that make the stream")
    parser.add_argument("--device", help="cuda or cpu; the first that is there if not given")
    parser.add_argument("--compile", action="store_true", help="run the training step through torch.compile")
    parser.add_argument("--log-every", type=int, default=100, help="steps between log lines")
    parser.add_argument(
        "--watch-every", type=int, default=1000, help="steps between looks at 64 validation problems (nothing is chosen by them)"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Entry point."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse_arguments()
    try:
        score = train(args)
    except SdbenchError as error:
        sys.exit(f"error: {error}")
    log.info(
        "%s: answer match %.1f%%, EOS %.1f%%, median %g tokens",
        args.output / "model",
        100 * score.match,
        100 * score.eos,
        score.median_tokens,
    )


if __name__ == "__main__":
    main()
