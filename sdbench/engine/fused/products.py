"""The linears of a fused step: several of one input as one product, written as partial sums that the next kernel adds."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sdbench.engine.fused.plan import Linear, Unfusable
from sdbench.engine.packed_linear import PackedLinear
from sdbench.kernels import registry, tuned
from sdbench.kernels.launching import capability, sm_count, uses_kernels
from sdbench.kernels.quantized.weights import quantize
from sdbench.kernels.registry import Problem, Variant
from sdbench.packing import joined, stack_rows

Sums = dict[tuple[int, int], Tensor]
"""float32 ``[splits, out]`` by that shape: few enough to stay in the cache, where one a product would be written out to memory."""

Rounding = Literal["int8"]
"""How a step's dense weights are rounded: of the 8-bit kernels the one that is measured in a step."""


class Product:
    """sums = W x, split over K where the kernel splits it.

    Args:
        linears: Linears of one input, whose rows follow one another.
        sums: Buffers by their shape ``(splits, out)``, which products that run one after the other share; a missing one is added.
        quantized: ``"int8"`` to round a dense weight to 8 bits; None to leave it.

    Attributes:
        sums: float32 ``[splits, out]``, the result of the last call.
        packed: Whether the weight is a packed one.
        nbytes: Bytes that a call reads of the weight.
        variant: Name of the kernel variant that multiplies.
        calls: Calls so far, those that a graph replays too.

    Raises:
        Unfusable: Some of the linears are packed and others are not, or in different ways.
    """

    def __init__(self, linears: Sequence[Linear], sums: Sums, quantized: Rounding | None = None):
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
            config = dict(tuned.lookup(variant, problem, device)[0] if device.type == "cuda" else variant.default(problem))
            if "pdl" in config:
                # All kernels of a step take part in dependent launch.
                config["pdl"] = config["pdl"] or problem.dependent_launch
            splits = config.get("splits", 1) if variant.kernel == "spmv_partial" else 1
            self.variant = variant.name
            self.sums = _shared(sums, splits, out, device)
            y = self.sums if variant.kernel == "spmv_partial" else self.sums[0]
            self._run: Callable[[Tensor], object] = lambda x: variant.launch(weight, x, y, config)
        else:
            self.variant = "reference"
            self.sums = _shared(sums, 1, out, device)
            self._run = self._reference(problem)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies ``[in]``, any float dtype; returns ``sums``."""
        self._run(x)
        self.calls += 1
        return self.sums

    def _candidates(self, problem: Problem, quantized: Rounding | None) -> list[Variant]:
        if not self.packed:
            return [registry.find("quantized", quantized) if quantized else registry.find("dense", "gemv")]
        for names in ((("spmv_partial", "lane_row_nibble"), ("spmv_partial", "lane_row")), (("spmv", "portable"),)):
            taking = [variant for variant in (registry.find(*name) for name in names) if variant.constraint(problem) is None]
            if taking:
                return taking
        raise Unfusable(f"no fused step: no kernel takes pattern {problem.pattern} in {problem.dtype}")

    def _reference(self, problem: Problem) -> Callable[[Tensor], object]:
        if self.packed:
            reference = registry.find("spmv", "reference")
            return lambda x: reference.launch(self.weight, x, self.sums[0], {})
        matrix = self.weight if isinstance(self.weight, Tensor) else self.weight.dequantize()
        return lambda x: torch.mv(matrix.float(), x.float(), out=self.sums[0])


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
