"""A linear whose decode steps run through the packed SpMV, and the swap of a live model's linears for such modules."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdbench.engine.phase import current_phase
from sdbench.errors import CheckFailed
from sdbench.kernels.spmm import spmm
from sdbench.kernels.spmv import bind
from sdbench.packing import PackedWeight
from sdbench.timing import TOLERANCE, relative_error, within

PrefillWeights = Literal["pruned", "dense"]
"""Which matrix the prompt runs on: the pruned one, as in a packed checkpoint, or the original."""


class PackedLinear(nn.Module):
    """y = W x + b with W packed N:M; the explicit phase says which way it runs.

    Args:
        packed: W ``[out, in]``, for decode steps (one SpMV a row).
        prefill_weight: Dense ``[out, in]`` matrix for the prefill; None for W itself, from its packed form.
        bias: ``[out]`` or None.
        variant: SpMV variant; ``"auto"`` takes the fastest for the device.

    Attributes:
        calls: SpMV launches so far.
    """

    def __init__(self, packed: PackedWeight, prefill_weight: Tensor | None, bias: Tensor | None, variant: str = "auto"):
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.packed = packed
        self.prefill_weight = prefill_weight
        self.bias = bias
        self.spmv = bind(packed, variant)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies ``[..., in]`` into ``[..., out]``, in x's dtype.

        Raises:
            RuntimeError: No phase is open (see :mod:`sdbench.engine.phase`): one position may be a decode step or a short prompt.
        """
        # Triton launches on the current device, which is not this layer's where a model is spread over several.
        with torch.cuda.device_of(x):
            return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        phase = current_phase()
        if phase is None:
            raise RuntimeError("a PackedLinear ran outside a phase; drive the model by sdbench.engine.greedy")
        if phase.name == "prefill":
            if self.prefill_weight is not None:
                return F.linear(x, self.prefill_weight, self.bias)
            y = spmm(self.packed, x)
        else:
            rows = x.reshape(-1, self.in_features)
            self.calls += len(rows)
            y = torch.stack([self.spmv(row) for row in rows]) if len(rows) > 1 else self.spmv(rows)
            y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    @property
    def variant(self) -> str:
        """Name of the SpMV variant that runs."""
        return self.spmv.variant.name

    def extra_repr(self) -> str:
        """Shape, pattern and variant."""
        return f"in_features={self.in_features}, out_features={self.out_features}, pattern={self.packed.pattern}, variant={self.variant}"


@contextmanager
def packed_linears(
    model: nn.Module, weights: Mapping[str, PackedWeight], prefill: PrefillWeights, variant: str = "auto"
) -> Iterator[dict[str, PackedLinear]]:
    """Replaces linears of a live model by packed ones inside the ``with`` block; afterwards the model is what it was.

    Args:
        model: A transformers model.
        weights: Packed weight by the linear's dotted name.
        prefill: Matrix of the prefill; ``"dense"`` is the linear's own weight.
        variant: SpMV variant.

    Each module's products, with the variants and configs that it will run, are first checked on random input against the float64 product
    with the unpacked matrix: no rate of a wrong kernel can be measured.

    Yields:
        The modules in place, by name.

    Raises:
        CheckFailed: A module's product is wrong; names the layer.
    """
    originals: dict[str, Any] = {name: model.get_submodule(name) for name in weights}
    modules: dict[str, PackedLinear] = {}
    for name, packed in weights.items():
        linear = originals[name]
        with torch.cuda.device_of(linear.weight):
            modules[name] = PackedLinear(packed, linear.weight.detach() if prefill == "dense" else None, linear.bias, variant)
            _check(modules[name], linear.weight.dtype, name)
    try:
        for name, module in modules.items():
            _replace(model, name, module)
        yield modules
    finally:
        for name, module in originals.items():
            _replace(model, name, module)


def _check(module: PackedLinear, dtype: torch.dtype, name: str) -> None:
    device, generator = module.packed.device, torch.Generator(module.packed.device).manual_seed(0)
    dense = module.packed.unpack().double()

    def wrong(tokens: int) -> float | None:
        """The error of a product with so many rows, where it is more than rounding."""
        x = torch.randn(tokens, module.in_features, device=device, generator=generator).to(dtype)
        y = spmm(module.packed, x) if tokens > 1 else module.spmv(x[0], torch.float32)[None]
        error = relative_error(y, x.double() @ dense.T)
        return None if within(error, TOLERANCE[y.dtype]) else error

    error = wrong(1)
    if error is not None:
        raise CheckFailed(f"layer {name}: the {module.variant} SpMV is wrong here, relative error {error:.1e}; run 'sdbench kernels'")
    error = wrong(2) if module.prefill_weight is None else None
    if error is not None:
        raise CheckFailed(f"layer {name}: the packed product of several tokens is wrong here, relative error {error:.1e}")


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
