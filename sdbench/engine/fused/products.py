"""The linears of a fused step: several of one input as one product, written as partial sums that the next kernel adds."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sdbench.engine.fused.plan import Linear, Unfusable
from sdbench.engine.packed_linear import PackedLinear
from sdbench.kernels import registry, tuned
from sdbench.kernels.checked import trouble
from sdbench.kernels.launching import capability, sm_count, uses_kernels
from sdbench.kernels.quantized.weights import quantize
from sdbench.kernels.registry import Config, Problem, Variant
from sdbench.kernels.spmm import searched_tokens
from sdbench.packing import joined, stack_rows

Sums = dict[tuple[int, int], Tensor]
"""float32 ``[splits, batch, out]`` by splits and out: few enough to stay in the cache, where one a product would be written to memory."""

Run = Callable[[Tensor], object]


class Product:
    """sums = W x, split over K where the kernel splits it.

    A kernel is first compared with the float64 product of this weight, NaN in its sums and fresh x, twice: no rate of a wrong one can be
    measured. Where a tuned config is wrong, that is a warning and the default takes its place.

    Args:
        linears: Linears of one input, whose rows follow one another.
        sums: Buffers by their shape ``(splits, out)``, which products that run one after the other share; a missing one is added.
        int8: Round a dense weight to 8 bits.
        batch: Sequences that are multiplied at once.

    Attributes:
        sums: float32 ``[splits, batch, out]``, the result of the last call.
        packed: Whether the weight is a packed one.
        nbytes: Bytes that a call reads of the weight.
        variant: Name of the kernel variant that multiplies.
        calls: Calls so far, those that a graph replays too.

    Raises:
        Unfusable: Some of the linears are packed and others are not, or in different ways; no kernel takes them; or one is wrong.
    """

    def __init__(self, linears: Sequence[Linear], sums: Sums, int8: bool = False, batch: int = 1):
        packed = [linear.packed for linear in linears if isinstance(linear, PackedLinear)]
        if packed and len(packed) < len(linears):
            raise Unfusable("no fused step: some of the linears of one input are pruned and others are not")
        self.packed = bool(packed)
        self.calls = 0
        weight: Any
        if packed:
            if len({weight.pattern for weight in packed}) > 1:
                raise Unfusable("no fused step: linears of one input have different patterns")
            weight = stack_rows(packed)
        else:
            weight = _one_matrix([linear for linear in linears if isinstance(linear, nn.Linear)])
            if int8:
                weight = quantize(weight, "int8")
        self.weight = weight
        self.nbytes = int(weight.nbytes)
        self._device, dtype = _parameters(linears[0]).device, _parameters(linears[0]).dtype
        out, pattern = sum(int(linear.out_features) for linear in linears), packed[0].pattern if packed else None
        facts = sm_count(self._device), capability(self._device), batch
        self._problem = Problem(out, linears[0].in_features, dtype, pattern, *facts)
        if uses_kernels(self._device):
            variant = tuned.fastest(self._candidates(int8), _searched(self._problem), self._device)
            self.variant = variant.name
            self._run = self._right(variant, sums)
        else:
            self.variant = "reference"
            self.sums = self._shared(sums, 1)
            self._run = self._reference()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies ``[batch, in]``, in the dtype that :func:`input_dtype` says; returns ``sums``."""
        self._run(x)
        self.calls += 1
        return self.sums

    def _candidates(self, int8: bool) -> list[Variant]:
        problem, several = self._problem, self._problem.tokens > 1
        if several and (int8 or problem.dtype == torch.float16):
            what = "int8 weights" if int8 else "float16, which has no room for sums before a norm's scaling"
            raise Unfusable(f"no fused step for several prompts at once with {what}")
        if not self.packed:
            names = [("dense", "linear"), ("dense", "gemm")] if several else [("quantized", "int8") if int8 else ("dense", "gemv")]
            return [variant for variant in (registry.find(*name) for name in names) if variant.serves(problem.tokens)]
        alternatives: Sequence[Sequence[tuple[str, str]]] = (
            ((("spmm", "tile"),), (("spmm", "expand"),))
            if several
            else ((("spmv_partial", "lane_row_nibble"), ("spmv_partial", "lane_row")), (("spmv", "portable"),))
        )
        for found in alternatives:
            taking = [variant for variant in (registry.find(*name) for name in found) if variant.constraint(problem) is None]
            if taking:
                return taking
        raise Unfusable(f"no fused step: no kernel takes pattern {problem.pattern} in {problem.dtype}")

    def _right(self, variant: Variant, sums: Sums) -> Run:
        problem = self._problem
        config, source = tuned.lookup(variant, _searched(problem), self._device)
        what = f"{variant.kernel} variant {variant.name}, {problem.out_features}x{problem.in_features}"
        run, found = self._tried(variant, config, sums)
        if found and source != "default":
            message = f"{what}: the {source} config {dict(config)} {found}; the default is used. 'sdbench tune' finds a right one"
            warnings.warn(message, stacklevel=2)
            run, found = self._tried(variant, variant.default(problem), sums)
        if found:
            raise Unfusable(f"no fused step: {what} {found}; run 'sdbench kernels'")
        return run

    def _tried(self, variant: Variant, config: Config, sums: Sums) -> tuple[Run, str | None]:
        """The launch of a config, and what is wrong with it."""
        problem = self._problem
        # All kernels of a step take part in dependent launch.
        if "pdl" in config and problem.tokens == 1:
            config = {**config, "pdl": config["pdl"] or problem.dependent_launch}
        self.sums = self._shared(sums, config.get("splits", 1) if variant.kernel == "spmv_partial" else 1)
        run = self._launch(variant, config, self.sums)
        # What torch multiplies is as near as its own dtype.
        rounded = input_dtype(problem.dtype) if variant.name in ("linear", "expand") else torch.float32

        def product(x: Tensor) -> Tensor:
            self.sums.fill_(torch.nan)
            run(x)
            return self.sums.sum(0).to(rounded)

        shape = problem.tokens, problem.in_features
        return run, trouble(product, self.weight, shape, input_dtype(problem.dtype), self._device, times=2)

    def _launch(self, variant: Variant, config: Config, sums: Tensor) -> Run:
        weight = self.weight
        if self._problem.tokens == 1:
            y = sums[:, 0] if variant.kernel == "spmv_partial" else sums[0, 0]
            return lambda x: variant.launch(weight, x[0], y, config)
        if variant.name == "linear" and self._device.type == "cuda":
            # The same product with its sums left as they are.
            return lambda x: torch.mm(x, weight.T, out_dtype=torch.float32, out=sums[0])

        def run(x: Tensor) -> None:
            found = variant.launch(weight, x, sums[0], config)
            if found.data_ptr() != sums.data_ptr():
                sums[0].copy_(found)

        return run

    def _reference(self) -> Run:
        if not self.packed:
            matrix = self.weight if isinstance(self.weight, Tensor) else self.weight.dequantize()
            return lambda x: torch.mm(x.float(), matrix.float().T, out=self.sums[0])
        return self._launch(registry.find("spmv" if self._problem.tokens == 1 else "spmm", "reference"), {}, self.sums)

    def _shared(self, sums: Sums, splits: int) -> Tensor:
        out = self._problem.out_features
        if (splits, out) not in sums:
            sums[splits, out] = torch.empty(splits, self._problem.tokens, out, device=self._device)
        return sums[splits, out]


def _searched(problem: Problem) -> Problem:
    """The problem that configs of this one were searched for."""
    return replace(problem, tokens=searched_tokens(problem.tokens) or problem.tokens)


def input_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a product's x, by the weights': as the kernels were tuned for; fp16 has no room for a vector before its scaling."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def _one_matrix(linears: Sequence[nn.Linear]) -> Tensor:
    """The rows of all linears in one matrix ``[out, in]``, which the linears then share: nothing is kept twice."""
    with torch.no_grad():
        return joined([linear.weight for linear in linears], 0).detach()


def _parameters(linear: Linear) -> Tensor:
    return linear.packed.values if isinstance(linear, PackedLinear) else linear.weight
