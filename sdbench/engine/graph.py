"""One decode step of a live transformers model as one CUDA graph, so that launch overhead weighs on no arm.

The KV cache is static and one graph serves prompts of every length: positions live on the device, and a reset empties the cache in place.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from sdbench.devices import devices_of
from sdbench.engine.greedy import EagerForward, cache_keyword
from sdbench.engine.packed_linear import PackedLinear
from sdbench.engine.phase import current_phase, phase
from sdbench.errors import SdbenchError
from sdbench.timing import capture_stream


class GraphForward(EagerForward):
    """Prefill eagerly, decode by graph replay. Give it to :func:`sdbench.engine.greedy.greedy`, each time with ``batch`` prompts.

    The graph holds the modules that were in the model when it was made: make a new one after swapping linears.

    Args:
        model: A transformers causal language model on a CUDA device, in eval mode.
        max_positions: Prompt and reply together must fit this many positions.
        capture: Capture a graph; False runs the same static-cache step without one (CPU tests of the logic).
        batch: Prompts at once.

    Raises:
        SdbenchError: The model's cache keeps state outside the device (sliding windows), which a graph would freeze, it is spread over
            several devices, or a step of it does what no graph may hold (reads something back, say).
    """

    def __init__(self, model: Any, max_positions: int, capture: bool = True, batch: int = 1):
        super().__init__(model)
        if len(devices_of(model)) > 1:
            raise SdbenchError(f"no CUDA graph for {type(model).__name__}: it is spread over {', '.join(map(str, devices_of(model)))}")
        self.max_positions = max_positions
        self._cache = StaticCache(config=model.config, max_cache_len=max_positions)
        foreign = {type(layer).__name__ for layer in self._cache.layers if type(layer) is not StaticLayer}
        if foreign:
            raise SdbenchError(f"no CUDA graph for {type(model).__name__}: its cache has {', '.join(sorted(foreign))}")
        self.fixed[cache_keyword(model)] = self._cache
        self._packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
        self._ids = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self._positions = torch.ones(batch, 1, dtype=torch.long, device=model.device)
        # Prompts of one length have no padding either, but a graph must serve both.
        self._mask = torch.ones(batch, max_positions, dtype=torch.bool, device=model.device) if batch > 1 else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None
        self._calls: list[int] = []
        if capture:
            try:
                self._capture()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise SdbenchError(f"no CUDA graph for {type(model).__name__}: {' '.join(str(error).split())[:200]}") from error

    def reset(self) -> None:
        """Empties the cache in place; the graph keeps its addresses."""
        self._cache.reset()

    def __call__(self, input_ids: Tensor, positions: Tensor, full_mask: Tensor | None) -> Tensor:
        """The last position's logits ``[batch, vocab]``; after a decode step valid until the next one."""
        running = current_phase()
        if running is None or running.name == "prefill":
            if self._mask is not None:
                self._mask.fill_(True)
                if full_mask is not None:
                    self._mask[:, : full_mask.shape[1]] = full_mask.bool()
            mask = None if full_mask is None else full_mask[:, : input_ids.shape[1]]
            return self.model(input_ids=input_ids, position_ids=positions, attention_mask=mask, **self.fixed).logits[:, -1]
        self._ids.copy_(input_ids)
        self._positions.copy_(positions)
        if self._graph is None:
            return self._step()
        self._graph.replay()
        for module, calls in zip(self._packed, self._calls, strict=True):
            module.calls += calls
        assert self._logits is not None
        return self._logits

    def _step(self) -> Tensor:
        """Logits of one decode step from the static inputs."""
        return self.model(input_ids=self._ids, position_ids=self._positions, attention_mask=self._mask, **self.fixed).logits[:, -1]

    @torch.no_grad()
    def _capture(self) -> None:
        with capture_stream() as stream:
            # Allocates the cache and compiles every kernel: neither may happen while a graph is captured.
            with phase("prefill"):
                self(self._ids, self._positions - 1, None)
            for _ in range(2):
                with phase("decode"):
                    self._step()
        before = [module.calls for module in self._packed]
        graph = torch.cuda.CUDAGraph()
        with phase("decode"), torch.cuda.graph(graph, stream=stream):
            self._logits = self._step()
        self._graph = graph
        self._calls = [module.calls - count for module, count in zip(self._packed, before, strict=True)]
        for module, count in zip(self._packed, before, strict=True):
            module.calls = count


class CompiledForward(GraphForward):
    """The same with the decode step compiled by Inductor: what a user of transformers gets by ``torch.compile`` and a static cache.

    The graph around it is ours, as in :class:`GraphForward`, so that both differ by the compiled kernels alone.

    Raises:
        SdbenchError: As for :class:`GraphForward`, or the model does not compile.
    """

    def __init__(self, model: Any, max_positions: int, capture: bool = True, batch: int = 1):
        self._compiled = torch.compile(model.forward, dynamic=False)
        super().__init__(model, max_positions, capture, batch)

    def _capture(self) -> None:
        try:
            super()._capture()
        except torch._dynamo.exc.TorchDynamoException as error:
            raise SdbenchError(f"torch.compile refuses {type(self.model).__name__}: {' '.join(str(error).split())[:200]}") from error

    def _step(self) -> Tensor:
        return self._compiled(input_ids=self._ids, position_ids=self._positions, attention_mask=self._mask, **self.fixed).logits[:, -1]
