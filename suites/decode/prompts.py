"""The prompt on dense and on pruned weights, in turn.

A prompt is hundreds of launches, and a host that others keep busy makes one arm wait that is measured minutes after the other. Here both
run within the same fraction of a second, again and again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sdbench.engine.decoders import named
from sdbench.engine.packed_linear import PackedLinear, in_place
from sdbench.engine.paths import EAGER
from sdbench.errors import one_line
from sdbench.timing import summarise

Row = dict[str, Any]


def in_turn(
    model: Any, packed: Mapping[str, PackedLinear], linears: Mapping[str, nn.Linear], prompts: Sequence[Sequence[int]], pairs: int
) -> Iterator[Row]:
    """Prompt by prompt, seconds to the first token on the weights as they were and on the packed ones, by transformers' own forward.

    Args:
        model: With its packed linears in place.
        packed: Those modules by name.
        linears: What was there before, by the same names; their weights come to the GPU, and stay where there is room for all.
        prompts: Token ids.
        pairs: Times that both are measured, one right after the other; which comes first changes each time.

    Yields:
        ``dense_seconds`` and ``pruned_seconds``, and ``ratio``, the first over the second of each pair: p20, p50 and p80; None with an
        ``outcome`` and a ``reason`` where the GPU has no room for both.
    """
    lacking = _bring(linears, packed) if prompts else None
    for prompt in prompts:
        seconds, reason = [], lacking
        try:
            seconds = [] if reason else _pairs(model, packed, linears, prompt, pairs)
        except torch.OutOfMemoryError as error:
            reason = one_line(error, 200)
        figures = {
            "dense_seconds": [dense for dense, _ in seconds],
            "pruned_seconds": [pruned for _, pruned in seconds],
            "ratio": [dense / pruned for dense, pruned in seconds],
        }
        row = {"context": len(prompt), "outcome": "out_of_resources" if reason else "correct", "reason": reason, "pairs": pairs}
        yield row | {name: found.as_dict() if (found := summarise(each)) else None for name, each in figures.items()}


def _pairs(
    model: Any, packed: Mapping[str, PackedLinear], linears: Mapping[str, nn.Linear], prompt: Sequence[int], pairs: int
) -> list[tuple[float, float]]:
    ways = {"dense": (linears, named(EAGER, model, {}, len(prompt) + 1)), "pruned": ({}, named(EAGER, model, packed, len(prompt) + 1))}
    found = []
    # The first pair is a warm-up.
    for number in range(pairs + 1):
        seconds = {}
        for name in sorted(ways, reverse=number % 2 == 1):
            modules, decoder = ways[name]
            with in_place(model, modules):
                seconds[name] = decoder.reply(prompt, max_new_tokens=1, eos_ids=(), ignore_eos=True).prefill_seconds
        found.append((seconds["dense"], seconds["pruned"]))
    return found[1:]


def _bring(linears: Mapping[str, nn.Linear], packed: Mapping[str, PackedLinear]) -> str | None:
    """Brings weights of the linears to where the packed ones are, or says why there is no room, and leaves them where they are.

    They stay: that is where the end of the packed linears wants them, and copying them again takes half a minute on a large model.
    """
    homes = {name: linear.weight.data for name, linear in linears.items()}
    try:
        for name, linear in linears.items():
            linear.weight.data = linear.weight.data.to(packed[name].packed.device)
    except torch.OutOfMemoryError as error:
        for name, linear in linears.items():
            linear.weight.data = homes[name]
        return one_line(error, 200)
    return None
