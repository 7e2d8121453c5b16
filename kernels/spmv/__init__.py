"""y = W x for a packed N:M weight at batch 1: the public call over the registered variants."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sdbench.errors import SdbenchError
from sdbench.kernels import registry
from sdbench.kernels.launching import can_run, capability, sm_count
from sdbench.kernels.registry import Config, Problem, Variant
from sdbench.packing import PackedWeight


def problem_of(packed: PackedWeight) -> Problem:
    """The registry's description of a packed weight."""
    return Problem(*packed.shape, packed.dtype, packed.pattern, sm_count(packed.device), capability(packed.device))


def auto_variant(packed: PackedWeight) -> str:
    """The variant that ``"auto"`` means for a weight where it lies.

    On a GPU the fastest one that takes the pattern; on a CPU the torch reference, since the interpreter is for checks.
    """
    if packed.device.type != "cuda":
        return "reference"
    problem = problem_of(packed)
    for name in ("lane_row_nibble", "lane_row", "portable"):
        variant = registry.find("spmv", name)
        if can_run(variant.needs, packed.device) is None and variant.constraint(problem) is None:
            return name
    raise SdbenchError(f"no SpMV variant takes pattern {packed.pattern} in {packed.dtype} on {packed.device}")


def bind(packed: PackedWeight, variant: str = "auto", config: Config | None = None) -> "BoundSpmv":
    """Looks up and checks once what :func:`spmv` would at every call; a decode step makes hundreds of them.

    Args:
        packed: W, ``[out, in]`` in kernel form.
        variant: ``"auto"``, or a registered name; ``"reference"`` runs anywhere.
        config: Launch parameters of the variant; None for its default.

    Raises:
        UsageError: An unknown variant.
        SdbenchError: The variant cannot take this weight here.
    """
    chosen = registry.find("spmv", auto_variant(packed) if variant == "auto" else variant)
    problem = problem_of(packed)
    refusal = can_run(chosen.needs, packed.device) or chosen.constraint(problem)
    if refusal:
        raise SdbenchError(f"spmv variant {chosen.name}: {refusal}")
    return BoundSpmv(packed, chosen, chosen.default(problem) if config is None else config)


@dataclass(frozen=True, eq=False)
class BoundSpmv:
    """A packed weight with the variant and config that multiply it; made by :func:`bind`."""

    packed: PackedWeight
    variant: Variant
    config: Config

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Multiplies one vector; see :func:`spmv`."""
        packed = self.packed
        if x.shape[-1] != packed.in_features or x.numel() != packed.in_features:
            raise SdbenchError(f"spmv multiplies one vector of {packed.in_features} elements, not a tensor of shape {tuple(x.shape)}")
        if x.device != packed.device:
            raise SdbenchError(f"spmv: x is on {x.device}, the weight on {packed.device}")
        y = torch.empty(packed.out_features, dtype=out_dtype or x.dtype, device=x.device)
        y = self.variant.launch(packed, x.reshape(-1).contiguous(), y, self.config)
        return y.view(*x.shape[:-1], packed.out_features)


def spmv(
    packed: PackedWeight, x: Tensor, variant: str = "auto", config: Config | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiplies a packed weight with one vector.

    Args:
        packed: W, ``[out, in]`` in kernel form.
        x: ``[in]``, or ``[..., in]`` with leading dimensions of 1, on the weight's device; bf16, fp16 or fp32. Accumulation is float32.
        variant: ``"auto"``, or a registered name; ``"reference"`` runs anywhere.
        config: Launch parameters of the variant; None for its default.
        out_dtype: Dtype of y; x's when None.

    Returns:
        y, ``[out]`` with x's leading dimensions.

    Raises:
        UsageError: An unknown variant.
        SdbenchError: x does not fit, or the variant cannot take this weight here.
    """
    return bind(packed, variant, config)(x, out_dtype)
