"""Replies by the fused step: transformers runs the prompt, one CUDA graph a token the rest."""

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sdbench.engine.fused.plan import Unfusable, plan
from sdbench.engine.fused.step import FusedStep
from sdbench.engine.greedy import Reply, broken_logits, cache_keyword, check_request, clock, position_limit
from sdbench.engine.phase import phase
from sdbench.errors import SdbenchError
from sdbench.timing import capture_stream, relative_error

CHECK_EVERY = 8
"""Steps between two looks at the tokens for an EOS; the device goes on meanwhile."""

CLOSE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest relative Frobenius error of a step's logits against transformers' own in the same dtype; a wrong step is off by about 1."""

CLOSE_QUANTIZED = 0.5
"""The same where the step's weights are rounded to 8 bits and those of transformers are not."""


@dataclass(frozen=True)
class Capture:
    """What the graph cost.

    Attributes:
        seconds: Compilation and capture.
        nbytes: Device memory that the capture took, kernels and the driver's part included.
    """

    seconds: float
    nbytes: int


class FusedDecoder:
    """Greedy replies to one prompt, or to as many at once as it was made for.

    The weights are those that are in the model when it is made: make a new one after swapping linears. Linears of one input come to share
    one matrix, packed or not, so that a graph captured on the same model before must not be replayed after.

    Args:
        model: A transformers causal language model in eval mode, packed linears in place where it is pruned.
        max_positions: Prompt and reply together must fit this many.
        int8: Weight-only int8 linears in decode steps, of a dense model.
        batch: Prompts at once.
        capture: Capture a CUDA graph; False runs the kernels one by one (a CPU, tests).
        verify: Compare one step with transformers' own first.

    Attributes:
        step: The step itself.
        captured: Cost of the graph; None without one.
        calls: Launches of pruned products so far.
        pruned_products: Pruned products that a decode step makes.
        variants: Names of the SpMV variants that they run, sorted.

    Raises:
        Unfusable: The model is not built as the fused step is, or a step of it gives other logits than transformers.
    """

    def __init__(self, model: Any, max_positions: int, *, int8: bool = False, batch: int = 1, capture: bool = True, verify: bool = True):
        self.model, self.batch = model, batch
        self.max_positions = min(max_positions, position_limit(model) or max_positions)
        self.step = FusedStep(plan(model), self.max_positions, self.max_positions, int8=int8, batch=batch)
        self.captured: Capture | None = None
        self.calls = 0
        self._pruned = [product for product in self.step.products() if product.packed]
        self._replayed: list[int] = []
        self.pruned_products = len(self._pruned)
        self.variants = sorted({product.variant for product in self._pruned})
        self._graph: torch.cuda.CUDAGraph | None = None
        if verify:
            self._verify(CLOSE_QUANTIZED if int8 else CLOSE[self.step.plan.dtype])
        if capture and model.device.type == "cuda":
            self._capture()

    def reply(self, prompt: Sequence[int], *, max_new_tokens: int, eos_ids: Collection[int], ignore_eos: bool = False) -> Reply:
        """The reply to one prompt; see :meth:`replies`."""
        (reply,) = self.replies([prompt], max_new_tokens=max_new_tokens, eos_ids=eos_ids, ignore_eos=ignore_eos)
        return reply

    @torch.no_grad()
    def replies(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, eos_ids: Collection[int], ignore_eos: bool = False
    ) -> list[Reply]:
        """Decodes by argmax of the raw logits, as :func:`sdbench.engine.greedy.greedy` does.

        An EOS is noticed up to two looks late: what the device did past the last one is dropped, and the decode time is that up to a look
        times the share of its steps that count.

        Args:
            prompts: Token ids, as many prompts as the decoder was made for, at least one id each.
            max_new_tokens: Longest reply, at least 1.
            eos_ids: Ids that end a reply.
            ignore_eos: Give exactly ``max_new_tokens`` tokens.

        Raises:
            UsageError: ``max_new_tokens`` below 1, or more positions than the cache has.
            SdbenchError: An empty prompt, another number of prompts, or NaN or Inf among the logits.
        """
        check_request(prompts, max_new_tokens, self.max_positions)
        if len(prompts) != self.batch:
            raise SdbenchError(f"this decoder takes {self.batch} prompts at once, not {len(prompts)}")
        stops = frozenset() if ignore_eos else frozenset(eos_ids)
        start = clock(self.model.device)
        firsts = self._prefill(prompts)
        prefill_seconds = clock(self.model.device) - start
        before = sum(product.calls for product in self._pruned)
        rest, steps, seconds = self._decode(max_new_tokens - 1, firsts, stops)
        for sequence, ids in enumerate(rest):
            for number, token in enumerate(ids):
                if token < 0:
                    raise broken_logits(number + 2, sequence)
        if steps:
            # Steps past the last EOS that was seen late made as many calls each, and do not count.
            self.calls += (sum(product.calls for product in self._pruned) - before) * max(map(len, rest)) // steps
        replies = [(first, *ids) for first, ids in zip(firsts, rest, strict=True)]
        return [
            Reply(
                ids=ids,
                eos=ids[-1] in stops,
                truncated=not ignore_eos and ids[-1] not in stops,
                decode_steps=len(ids) - 1,
                prefill_seconds=prefill_seconds,
                decode_seconds=seconds,
            )
            for ids in replies
        ]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The first token of each reply; prompts of one length go together, others one by one."""
        alike, firsts = len({len(prompt) for prompt in prompts}) == 1, []
        for some in [slice(0, self.batch)] if alike else [slice(place, place + 1) for place in range(self.batch)]:
            cache: Any = DynamicCache(config=self.model.config)
            fixed = {cache_keyword(self.model): cache, "use_cache": True, "logits_to_keep": 1}
            ids = torch.tensor([list(prompt) for prompt in prompts[some]], device=self.model.device)
            with phase("prefill"):
                logits = self.model(input_ids=ids, **fixed).logits[:, -1]
            for sequence, finite in enumerate(logits.isfinite().all(-1).tolist()):
                if not finite:
                    raise broken_logits(1, some.start + sequence)
            for number, layer in enumerate(cache.layers):
                self.step.keys[number, some, :, : ids.shape[1]] = layer.keys
                self.step.values[number, some, :, : ids.shape[1]] = layer.values
            firsts += logits.argmax(-1).tolist()
        self.step.start(firsts, [len(prompt) for prompt in prompts])
        return firsts

    def _decode(self, steps: int, firsts: Sequence[int], stops: frozenset[int]) -> tuple[list[list[int]], int, float]:
        """Ids of each sequence after the first, how many steps ran, and the seconds that the longest reply's steps took."""
        if all(first in stops for first in firsts):
            return [[] for _ in firsts], 0, 0.0
        begin = _Look(self.step.ids, 0)
        looks: deque[_Look] = deque()
        launched = 0
        while steps:
            now = min(steps, launched + (CHECK_EVERY if stops else steps))
            for _ in range(launched, now):
                self._one()
            if now > launched:
                looks.append(_Look(self.step.ids, now))
            launched = now
            # While steps are left, the look before the newest is read: the device has work meanwhile.
            if launched == steps or len(looks) > 1:
                look = looks.popleft()
                rows = look.read()
                ends = [_end(first, ids, stops) for first, ids in zip(firsts, rows, strict=True)]
                if look.steps == steps or None not in ends:
                    rest = [ids[:end] for ids, end in zip(rows, ends, strict=True)]
                    return rest, launched, look.seconds_since(begin) * max(map(len, rest)) / look.steps
        return [[] for _ in firsts], 0, 0.0

    @torch.no_grad()
    def decode_steps(self, count: int) -> None:
        """Runs some steps over what the cache holds, for a profile; their tokens are dropped."""
        self.step.count.zero_()
        self.step.position.fill_(max(0, self.max_positions - 1 - count))
        for _ in range(count):
            self._one()

    def _one(self) -> None:
        if self._graph is None:
            self.step.run()
        else:
            self._graph.replay()
            for product, calls in zip(self._pruned, self._replayed, strict=True):
                product.calls += calls

    @torch.no_grad()
    def _capture(self) -> None:
        device = self.model.device
        # The capture empties torch's cache, which would count as memory won.
        torch.cuda.empty_cache()
        start, (before, _) = clock(device), torch.cuda.mem_get_info(device)
        with capture_stream() as stream:
            # Compiles every kernel, which may not happen while a graph is captured.
            self.step.start([0] * self.batch, [0] * self.batch)
            self.step.run()
        counts = [product.calls for product in self._pruned]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.step.run()
        self._graph, self._replayed = graph, [product.calls - count for product, count in zip(self._pruned, counts, strict=True)]
        self.captured = Capture(clock(device) - start, max(0, before - torch.cuda.mem_get_info(device)[0]))

    @torch.no_grad()
    def _verify(self, tolerance: float) -> None:
        """One step after a short prompt, by the fused kernels and by transformers.

        Raises:
            Unfusable: Their logits differ by more than rounding.
        """
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.step.plan.head.shape[0]
        length = min(8, self.max_positions - 1)
        prompts = torch.randint(0, vocabulary, (self.batch, length), generator=generator).to(self.model.device)
        firsts = torch.tensor(self._prefill(prompts.tolist()), device=self.model.device)[:, None]
        got = torch.zeros(self.batch, vocabulary, device=self.model.device)
        self.step.run(got)
        cache = DynamicCache(config=self.model.config)
        fixed = {cache_keyword(self.model): cache, "use_cache": True}
        for name, ids in (("prefill", prompts), ("decode", firsts)):
            with phase("prefill" if name == "prefill" else "decode"):
                logits = self.model(input_ids=ids, **fixed).logits[:, -1]
        for error in [relative_error(one, other) for one, other in zip(got, logits.double(), strict=True)]:
            if not error <= tolerance:
                raise Unfusable(f"no fused step: its logits differ from transformers' by {error:.1e} (relative), more than rounding does")


def _end(first: int, ids: Sequence[int], stops: frozenset[int]) -> int | None:
    """How many ids after the first belong to a reply; None where it has not ended."""
    if first in stops:
        return 0
    return next((place + 1 for place, token in enumerate(ids) if token in stops), None)


class _Look:
    """The tokens so far and the time, read once the device is there."""

    def __init__(self, ids: Tensor, steps: int):
        self.steps = steps
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        self._ids = ids[:, :steps]
        if ids.device.type == "cuda":
            self._ids = torch.empty(len(ids), steps, dtype=ids.dtype, pin_memory=True).copy_(self._ids, non_blocking=True)
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def read(self) -> list[list[int]]:
        """The tokens of each sequence."""
        if self._event is not None:
            self._event.synchronize()
        found: list[list[int]] = self._ids.tolist()
        return found

    def seconds_since(self, earlier: "_Look") -> float:
        """Seconds between two looks, both read or begun."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time
