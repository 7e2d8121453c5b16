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
from sdbench.engine.fused.products import Rounding
from sdbench.engine.fused.step import FusedStep
from sdbench.engine.greedy import Reply, broken_logits, cache_keyword, check_request, clock, position_limit
from sdbench.engine.phase import phase
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
    """Greedy replies at batch 1.

    The weights are those that are in the model when it is made: make a new one after swapping linears. Linears of one input come to share
    one matrix, packed or not, so that a graph captured on the same model before must not be replayed after.

    Args:
        model: A transformers causal language model in eval mode, packed linears in place where it is pruned.
        max_positions: Prompt and reply together must fit this many.
        quantized: ``"int8"`` for weight-only 8-bit linears in decode steps.
        capture: Capture a CUDA graph; False runs the kernels one by one (a CPU, tests).
        verify: Compare one step with transformers' own first.

    Attributes:
        step: The step itself.
        captured: Cost of the graph; None without one.
        calls: Calls of pruned products so far, in steps whose tokens count.
        pruned_products: Pruned products that a decode step makes.
        variants: Names of the SpMV variants that they run, sorted.

    Raises:
        Unfusable: The model is not built as the fused step is, or a step of it gives other logits than transformers.
    """

    def __init__(self, model: Any, max_positions: int, *, quantized: Rounding | None = None, capture: bool = True, verify: bool = True):
        self.model = model
        self.max_positions = min(max_positions, position_limit(model) or max_positions)
        self.step = FusedStep(plan(model), self.max_positions, self.max_positions, quantized=quantized)
        self.captured: Capture | None = None
        self.calls = 0
        self._pruned = [product for product in self.step.products() if product.packed]
        self._replayed: list[int] = []
        self.pruned_products = len(self._pruned)
        self.variants = sorted({product.variant for product in self._pruned})
        self._graph: torch.cuda.CUDAGraph | None = None
        if verify:
            self._verify(CLOSE_QUANTIZED if quantized else CLOSE[self.step.plan.dtype])
        if capture and model.device.type == "cuda":
            self._capture()

    @torch.no_grad()
    def reply(self, prompt: Sequence[int], *, max_new_tokens: int, eos_ids: Collection[int], ignore_eos: bool = False) -> Reply:
        """Decodes by argmax of the raw logits, as :func:`sdbench.engine.greedy.greedy` does.

        An EOS is noticed up to two looks late: what the device did past it is dropped, and the decode time is that up to a look times the
        share of its steps that count.

        Args:
            prompt: Token ids, at least one.
            max_new_tokens: Longest reply, at least 1.
            eos_ids: Ids that end a reply.
            ignore_eos: Give exactly ``max_new_tokens`` tokens.

        Raises:
            UsageError: ``max_new_tokens`` below 1, or more positions than the cache has.
            SdbenchError: An empty prompt, or NaN or Inf among the logits.
        """
        check_request([prompt], max_new_tokens, self.max_positions)
        stops = frozenset() if ignore_eos else frozenset(eos_ids)
        start = clock(self.model.device)
        first = self._prefill(prompt)
        prefill_seconds = clock(self.model.device) - start
        before = sum(product.calls for product in self._pruned)
        rest, steps, seconds = ([], 0, 0.0) if first in stops else self._decode(max_new_tokens - 1, stops)
        for number, token in enumerate(rest):
            if token < 0:
                raise broken_logits(number + 2, 0)
        ids = (first, *rest)
        if steps:
            # Steps past an EOS that was seen late made as many calls each, and do not count.
            self.calls += (sum(product.calls for product in self._pruned) - before) * len(rest) // steps
        return Reply(
            ids=ids,
            eos=ids[-1] in stops,
            truncated=not ignore_eos and ids[-1] not in stops,
            decode_steps=len(rest),
            prefill_seconds=prefill_seconds,
            decode_seconds=seconds,
        )

    def _prefill(self, prompt: Sequence[int]) -> int:
        cache: Any = DynamicCache(config=self.model.config)
        fixed = {cache_keyword(self.model): cache, "use_cache": True, "logits_to_keep": 1}
        with phase("prefill"):
            logits = self.model(input_ids=torch.tensor([list(prompt)], device=self.model.device), **fixed).logits[0, -1]
        if not logits.isfinite().all():
            raise broken_logits(1, 0)
        for number, layer in enumerate(cache.layers):
            self.step.keys[number, :, : len(prompt)] = layer.keys[0]
            self.step.values[number, :, : len(prompt)] = layer.values[0]
        first = int(logits.argmax())
        self.step.start(first, len(prompt))
        return first

    def _decode(self, steps: int, stops: frozenset[int]) -> tuple[list[int], int, float]:
        """Ids after the first, how many steps ran, and the seconds that the ids' steps took."""
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
                ids = look.read()
                end = next((place + 1 for place, token in enumerate(ids) if token in stops), None)
                if end or look.steps == steps:
                    ids = ids[:end]
                    return ids, launched, look.seconds_since(begin) * len(ids) / look.steps
        return [], 0, 0.0

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
            self.step.start(0, 0)
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
        prompt = torch.randint(0, vocabulary, (min(8, self.max_positions - 1),), generator=generator).tolist()
        first = self._prefill(prompt)
        got = torch.zeros(vocabulary, device=self.model.device)
        self.step.run(got)
        cache = DynamicCache(config=self.model.config)
        fixed = {cache_keyword(self.model): cache, "use_cache": True}
        for name, ids in (("prefill", prompt), ("decode", [first])):
            with phase("prefill" if name == "prefill" else "decode"):
                logits = self.model(input_ids=torch.tensor([ids], device=self.model.device), **fixed).logits[0, -1]
        error = relative_error(got, logits.double())
        if not error <= tolerance:
            raise Unfusable(f"no fused step: its logits differ from transformers' by {error:.1e} (relative), more than rounding does")


class _Look:
    """The tokens so far and the time, read once the device is there."""

    def __init__(self, ids: Tensor, steps: int):
        self.steps = steps
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        self._ids = ids[:steps]
        if ids.device.type == "cuda":
            self._ids = torch.empty(steps, dtype=ids.dtype, pin_memory=True).copy_(ids[:steps], non_blocking=True)
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def read(self) -> list[int]:
        """The tokens."""
        if self._event is not None:
            self._event.synchronize()
        return [int(token) for token in self._ids.tolist()]

    def seconds_since(self, earlier: "_Look") -> float:
        """Seconds between two looks, both read or begun."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time
