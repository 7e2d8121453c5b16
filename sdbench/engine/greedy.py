"""The greedy decode loop: prefill once, then one forward a token, over a live transformers model.

``generate`` is not used: it samples when the checkpoint says so, runs a last forward whose logits nobody reads, and hides the border
between prefill and decode, which is where both the calibration rows and the clock have to be cut.
"""

import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sdbench.engine.phase import phase
from sdbench.errors import SdbenchError, UsageError
from sdbench.words import counted

FILLER = 0
"""Id fed in padding and in finished rows: masked or dropped, so any valid id does."""


@dataclass(frozen=True)
class Reply:
    """What the model answered to one prompt.

    Args:
        ids: New token ids; an EOS that ended the reply is the last of them, nothing follows it.
        eos: The reply ended with an EOS id (False when EOS was ignored).
        truncated: The reply was cut at ``max_new_tokens`` without an EOS (False when EOS was ignored: the length was asked for).
        decode_steps: Decode forwards that belong to this reply: ``len(ids) - 1``, the first token comes from the prefill.
        prefill_seconds: Time of the batch's prefill, with the choice of the first token.
        decode_seconds: Time of all the batch's decode steps.
    """

    ids: tuple[int, ...]
    eos: bool
    truncated: bool
    decode_steps: int
    prefill_seconds: float
    decode_seconds: float


@torch.no_grad()
def greedy(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    ignore_eos: bool = False,
    on_token: Callable[[int], None] | None = None,
    forward: "EagerForward | None" = None,
    choose: Callable[[Tensor, int], Tensor] | None = None,
) -> list[Reply]:
    """Decodes by argmax of the raw logits; the checkpoint's sampling settings, penalties and minimum lengths don't apply.

    Every forward runs inside a phase: the prefill with the prompts' own positions as rows, each decode step with the unfinished replies.
    Prompts of different lengths are padded on the left. With ``ignore_eos`` nothing is read back from the device before the last token
    (but transformers itself looks at the mask of a padded batch).

    Args:
        model: A transformers causal language model in eval mode.
        prompts: Token ids, one sequence a prompt, none empty.
        max_new_tokens: Longest reply, at least 1.
        eos_ids: Ids that end a reply.
        ignore_eos: Give exactly ``max_new_tokens`` tokens, whatever they are.
        on_token: Called after each step with the number of tokens that the unfinished replies hold.
        forward: What runs the model; None for a plain eager forward with a cache that grows.
        choose: ``(logits [batch, vocab], step from 0) -> ids [batch]`` in place of argmax: calibration replies may be sampled.

    Returns:
        One reply a prompt, in order.

    Raises:
        UsageError: ``max_new_tokens`` below 1, or more positions than the model has.
        SdbenchError: No prompt, an empty prompt, or NaN or Inf among the logits of a counted token.
    """
    forward = forward or EagerForward(model)
    forward.reset()
    check_request(prompts, max_new_tokens, forward.max_positions)
    device = model.device
    batch, width = len(prompts), max(map(len, prompts))
    input_ids = torch.tensor([[FILLER] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=device)
    # Without padding there is no mask: transformers reads a mask back from the device in every forward.
    padded = any(len(p) < width for p in prompts)
    full_mask = torch.cat([mask, mask.new_ones(batch, max_new_tokens)], dim=1).long() if padded else None
    positions = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)
    eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)
    active = torch.ones(batch, dtype=torch.bool, device=device)
    new_ids = torch.zeros(batch, max_new_tokens, dtype=torch.long, device=device)
    # A sum is NaN or infinite as soon as one logit is: one small kernel a step, read once at the end.
    logit_sums = torch.zeros(batch, max_new_tokens, dtype=torch.float32, device=device)

    start = clock(device)
    step = 0
    with phase("prefill", rows=mask):
        logits = forward(input_ids, positions, full_mask)
    while True:
        token = logits.argmax(dim=-1) if choose is None else choose(logits, step)
        new_ids[:, step] = token
        logit_sums[:, step] = logits.sum(dim=-1, dtype=torch.float32)
        step += 1
        if step == 1:
            decode_start = clock(device)
        if on_token is not None:
            on_token(step)
        if step == max_new_tokens:
            break
        if not ignore_eos:
            active = active & ~torch.isin(token, eos)
            if not active.any():
                break
        positions = positions[:, -1:] + 1
        with phase("decode", rows=active[:, None]):
            logits = forward(torch.where(active, token, FILLER)[:, None], positions, full_mask)
    end = clock(device)

    stops = frozenset() if ignore_eos else frozenset(eos_ids)
    rows = [_up_to_eos(row[:step], stops) for row in new_ids.tolist()]
    for index, (row, sums) in enumerate(zip(rows, logit_sums.isfinite().tolist(), strict=True)):
        if not all(sums[: len(row)]):
            raise broken_logits(sums.index(False) + 1, index)
    return [
        Reply(
            ids=tuple(row),
            eos=row[-1] in stops,
            truncated=not ignore_eos and row[-1] not in stops,
            decode_steps=len(row) - 1,
            prefill_seconds=decode_start - start,
            decode_seconds=end - decode_start,
        )
        for row in rows
    ]


def cache_keyword(model: Any) -> str:
    """Name under which the model's forward takes the KV cache; transformers 5.24 renamed ``past_key_values`` to ``cache``.

    Raises:
        SdbenchError: The forward takes neither.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise SdbenchError(
        f"{type(model).__name__} takes no KV cache (neither 'cache' nor 'past_key_values'): not a decoder that sdbench can run"
    )


def greedy_eos_ids(model: Any, tokenizer: Any = None) -> frozenset[int]:
    """Every id that ends a reply: those of the generation config, else of the config, else of the tokenizer.

    Raises:
        SdbenchError: None of the three names one.
    """
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None and ids != []:
            return frozenset([ids] if isinstance(ids, int) else ids)
    raise SdbenchError("no EOS id in the generation config, the model config or the tokenizer: set eos_token_id in one")


class EagerForward:
    """One forward with the KV cache carried along; :meth:`reset` starts a new batch.

    Args:
        model: A transformers causal language model in eval mode.

    Attributes:
        fixed: Keyword arguments of every forward.
        max_positions: Longest prompt and reply together; None where there is no limit.
    """

    def __init__(self, model: Any):
        self.model = model
        self.fixed: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self.fixed["logits_to_keep"] = 1
        self.max_positions = position_limit(model)

    def reset(self) -> None:
        """Starts with an empty cache."""
        self.fixed[cache_keyword(self.model)] = DynamicCache(config=self.model.config)
        self.seen = 0

    def __call__(self, input_ids: Tensor, positions: Tensor, full_mask: Tensor | None) -> Tensor:
        """The last position's logits ``[batch, vocab]``.

        Args:
            input_ids: ``[batch, positions]``.
            positions: Their position ids, same shape.
            full_mask: ``[batch, >= positions so far]``, 0 where there is padding; None without padding.
        """
        self.seen += input_ids.shape[1]
        mask = None if full_mask is None else full_mask[:, : self.seen]
        return self.model(input_ids=input_ids, position_ids=positions, attention_mask=mask, **self.fixed).logits[:, -1]


def broken_logits(token: int, prompt: int) -> SdbenchError:
    """The error of logits that are not finite, at the ``token``-th new token (from 1)."""
    return SdbenchError(
        f"NaN or Inf in the logits of new token {token} of prompt {prompt}: the weights or the number type (try --dtype fp32) are broken"
    )


def position_limit(model: Any) -> int | None:
    """Positions that a transformers model was made for; None where its config names none."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def check_request(prompts: Sequence[Sequence[int]], max_new_tokens: int, limit: int | None) -> None:
    """Refuses what no loop can decode.

    Raises:
        UsageError: ``max_new_tokens`` below 1, or more positions than ``limit``.
        SdbenchError: No prompt, or an empty one.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}: a reply needs at least 1 token")
    if not prompts:
        raise SdbenchError("no prompt to decode")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise SdbenchError(f"prompt {index} is empty: there is nothing to prefill")
    longest = max(map(len, prompts))
    if limit is not None and longest + max_new_tokens > limit:
        raise UsageError(
            f"a prompt of {counted(longest, 'token')} and {max_new_tokens} new ones exceed the {limit} positions "
            "that there are (max_position_embeddings, or the cache); ask for fewer tokens or shorten the prompt"
        )


def _up_to_eos(ids: list[int], stops: frozenset[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in stops:
            return ids[: index + 1]
    return ids


def clock(device: torch.device) -> float:
    """Host seconds, once the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
