"""The linears of a fused step: several of one input as one product, written as partial sums that the next kernel adds."""

import warnings
from collections.abc import Callable, Sequence
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
from sdbench.packing import joined, stack_rows

Sums = dict[tuple[int, int], Tensor]
"""float32 ``[splits, out]`` by that shape: few enough to stay in the cache, where one a product would be written out to memory."""


class Product:
    """sums = W x, split over K where the kernel splits it.

    A kernel is first compared with the float64 product of this weight, NaN in its sums and fresh x, twice: no rate of a wrong one can be
    measured. Where a tuned config is wrong, that is a warning and the default takes its place.

    Args:
        linears: Linears of one input, whose rows follow one another.
        sums: Buffers by their shape ``(splits, out)``, which products that run one after the other share; a missing one is added.
        quantized: ``"int8"`` or ``"fp8"`` to round a dense weight to 8 bits; None to leave it.

    Attributes:
        sums: float32 ``[splits, out]``, the result of the last call.
        packed: Whether the weight is a packed one.
        nbytes: Bytes that a call reads of the weight.
        variant: Name of the kernel variant that multiplies.
        calls: Launches so far.

    Raises:
        Unfusable: Some of the linears are packed and others are not, or in different ways; or the product is wrong.
    """

    def __init__(self, linears: Sequence[Linear], sums: Sums, quantized: str | None = None):
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
            if quantized:
                weight = quantize(weight, quantized)
        self.weight = weight
        self.nbytes = int(weight.nbytes)
        out, device = sum(int(linear.out_features) for linear in linears), _parameters(linears[0]).device
        pattern = packed[0].pattern if packed else None
        problem = Problem(out, linears[0].in_features, _parameters(linears[0]).dtype, pattern, sm_count(device), capability(device))
        if uses_kernels(device):
            variant = tuned.fastest(self._candidates(problem, quantized), problem, device)
            self.variant = variant.name
            self._run: Callable[[Tensor], object] = self._right(variant, problem, device, sums)
        else:
            self.variant = "reference"
            self.sums = _shared(sums, 1, out, device)
            self._run = self._reference(problem)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies ``[in]``, any float dtype; returns ``sums``."""
        self._run(x)
        self.calls += 1
        return self.sums

    def _candidates(self, problem: Problem, quantized: str | None) -> list[Variant]:
        if not self.packed:
            return [registry.find("quantized", quantized) if quantized else registry.find("dense", "gemv")]
        for names in ((("spmv_partial", "lane_row_nibble"), ("spmv_partial", "lane_row")), (("spmv", "portable"),)):
            taking = [variant for variant in (registry.find(*name) for name in names) if variant.constraint(problem) is None]
            if taking:
                return taking
        raise Unfusable(f"no fused step: no kernel takes pattern {problem.pattern} in {problem.dtype}")

    def _right(self, variant: Variant, problem: Problem, device: torch.device, sums: Sums) -> Callable[[Tensor], object]:
        config, source = tuned.lookup(variant, problem, device)
        what = f"{variant.kernel} variant {variant.name}, {problem.out_features}x{problem.in_features}"
        run, found = self._tried(variant, config, problem, device, sums)
        if found and source != "default":
            message = f"{what}: the {source} config {dict(config)} {found}; the default is used. 'sdbench tune' finds a right one"
            warnings.warn(message, stacklevel=2)
            run, found = self._tried(variant, variant.default(problem), problem, device, sums)
        if found:
            raise Unfusable(f"no fused step: {what} {found}; run 'sdbench kernels'")
        return run

    def _tried(
        self, variant: Variant, config: Config, problem: Problem, device: torch.device, sums: Sums
    ) -> tuple[Callable[[Tensor], object], str | None]:
        """The launch of a config, and what is wrong with it."""
        # All kernels of a step take part in dependent launch.
        config = {**config, "pdl": config["pdl"] or problem.dependent_launch} if "pdl" in config else config
        partial = variant.kernel == "spmv_partial"
        self.sums = _shared(sums, config.get("splits", 1) if partial else 1, problem.out_features, device)
        weight, y = self.weight, self.sums if partial else self.sums[0]
        generator = torch.Generator(device).manual_seed(0)

        def run(x: Tensor) -> object:
            return variant.launch(weight, x, y, config)

        def product(x: Tensor) -> Tensor:
            self.sums.fill_(torch.nan)
            run(x)
            return self.sums.sum(0)

        inputs = torch.randn(2, problem.in_features, generator=generator, device=device).to(input_dtype(problem.dtype))
        return run, next(filter(None, (trouble(product, weight, x) for x in inputs)), None)

    def _reference(self, problem: Problem) -> Callable[[Tensor], object]:
        if self.packed:
            reference = registry.find("spmv", "reference")
            return lambda x: reference.launch(self.weight, x, self.sums[0], {})
        matrix = self.weight if isinstance(self.weight, Tensor) else self.weight.dequantize()
        return lambda x: torch.mv(matrix.float(), x.float(), out=self.sums[0])


def input_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a product's x, by the weights': as the kernels were tuned for; fp16 has no room for a vector before its scaling."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def _one_matrix(linears: Sequence[nn.Linear]) -> Tensor:
    """The rows of all linears in one matrix ``[out, in]``, which the linears then share: nothing is kept twice."""
    with torch.no_grad():
        return joined([linear.weight for linear in linears], 0).detach()


def _shared(sums: Sums, splits: int, out: int, device: torch.device) -> Tensor:
    if (splits, out) not in sums:
        sums[splits, out] = torch.empty(splits, out, device=device)
    return sums[splits, out]


def _parameters(linear: Linear) -> Tensor:
    return linear.packed.values if isinstance(linear, PackedLinear) else linear.weight
