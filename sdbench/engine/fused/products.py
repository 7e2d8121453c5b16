"""The linears of a fused step: several of one input as one product, written as partial sums that the next kernel adds."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sdbench.engine.fused.launches import Launch, launch_for
from sdbench.engine.fused.plan import Linear, Unfusable
from sdbench.engine.packed_linear import PackedLinear
from sdbench.kernels import registry
from sdbench.kernels.launching import capability, sm_count, uses_kernels
from sdbench.kernels.quantized.weights import quantize
from sdbench.kernels.registry import Problem
from sdbench.packing import joined, stack_rows

Sums = dict[tuple[int, int], Tensor]
"""float32 ``[splits, batch, out]`` by splits and out: few enough to stay in the cache, where one a product would be written to memory."""


class Product:
    """sums = W x, split over K where the kernel splits it.

    A kernel is first compared with the float64 product of this weight, NaN in its sums and fresh x, twice: no rate of a wrong one can be
    measured. Where a tuned config is wrong, that is a warning and the default takes its place.

    Args:
        linears: Linears of one input, whose rows follow one another.
        sums: Buffers by their shape ``(splits, out)``, which products that run one after the other share; a missing one is added.
        int8: Round a dense weight to 8 bits.
        batch: Sequences that are multiplied at once.
        whole: Add the splits of several sequences' product, for a consumer that does not.

    Attributes:
        sums: float32 ``[splits, batch, out]``, the result of the last call.
        packed: Whether the weight is a packed one.
        nbytes: Bytes that a call reads of the weight.
        variant: Name of the kernel variant that multiplies.
        calls: Calls so far, those that a graph replays too.

    Raises:
        Unfusable: Some of the linears are packed and others are not, or in different ways; no kernel takes them; or one is wrong.
    """

    def __init__(self, linears: Sequence[Linear], sums: Sums, int8: bool = False, batch: int = 1, whole: bool = False):
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
        self._launch: Launch | None = None
        if uses_kernels(self._device):
            buffer = partial(self._shared, sums)
            self._launch = launch_for(weight, self._problem, self._device, int8, (lambda splits: buffer(1)) if whole else buffer)
        elif self.packed:
            reference = registry.find("spmv" if batch == 1 else "spmm", "reference")
            self._launch = Launch(reference, {}, self._shared(sums, 1))
        else:
            self._matrix: Tensor = weight if isinstance(weight, Tensor) else weight.dequantize()
        self.sums = self._launch.sums if self._launch else self._shared(sums, 1)
        self.variant = self._launch.variant.name if self._launch else "reference"

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies ``[batch, in]``, in the dtype that :func:`~sdbench.engine.fused.launches.input_dtype` says; returns ``sums``."""
        if self._launch:
            self._launch(self.weight, x)
        else:
            torch.mm(x.float(), self._matrix.float().T, out=self.sums[0])
        self.calls += 1
        return self.sums

    def _shared(self, sums: Sums, splits: int) -> Tensor:
        out = self._problem.out_features
        if (splits, out) not in sums:
            sums[splits, out] = torch.empty(splits, self._problem.tokens, out, device=self._device)
        return sums[splits, out]


def _one_matrix(linears: Sequence[nn.Linear]) -> Tensor:
    """The rows of all linears in one matrix ``[out, in]``, which the linears then share: nothing is kept twice."""
    with torch.no_grad():
        return joined([linear.weight for linear in linears], 0).detach()


def _parameters(linear: Linear) -> Tensor:
    return linear.packed.values if isinstance(linear, PackedLinear) else linear.weight
