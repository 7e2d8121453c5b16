"""y = W x for a packed N:M weight at batch 1: the public call over the registered variants."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from sdbench.devices import at_device_of, elsewhere
from sdbench.errors import SdbenchError
from sdbench.kernels import registry, tuned
from sdbench.kernels.checked import trouble
from sdbench.kernels.finish import NOTHING, Epilogue, finish
from sdbench.kernels.launching import can_run, capability, sm_count
from sdbench.kernels.registry import Config, Problem, Product, Variant
from sdbench.packing import PackedWeight


def problem_of(packed: PackedWeight, tokens: int = 1) -> Problem:
    """The registry's description of a packed weight, multiplied with so many tokens."""
    return Problem(*packed.shape, packed.dtype, packed.pattern, sm_count(packed.device), capability(packed.device), tokens)


def auto_variant(packed: PackedWeight) -> str:
    """The variant that ``"auto"`` means for a weight where it lies.

    On a GPU the fastest one that takes the pattern; on a CPU the torch reference, since the interpreter is for checks.
    """
    if packed.device.type != "cuda":
        return "reference"
    problem = problem_of(packed)
    for names in (("lane_row_nibble", "lane_row"), ("portable",)):
        variants = [registry.find("spmv", name) for name in names]
        taking = [v for v in variants if can_run(v.needs, packed.device) is None and v.constraint(problem) is None]
        if taking:
            return tuned.fastest(taking, problem, packed.device).name
    raise SdbenchError(f"no SpMV variant takes pattern {packed.pattern} in {packed.dtype} on {packed.device}")


def bind(packed: PackedWeight, variant: str = "auto", config: Config | None = None) -> "BoundSpmv":
    """Looks up and checks once what :func:`spmv` would at every call; a decode step makes hundreds of them.

    Args:
        packed: W, ``[out, in]`` in kernel form.
        variant: ``"auto"``, or a registered name; ``"reference"`` runs anywhere.
        config: Launch parameters of the variant; None for the tuned ones, on a GPU that has them, else for its default.

    Raises:
        UsageError: An unknown variant.
        SdbenchError: The variant cannot take this weight here.
    """
    chosen = registry.find("spmv", auto_variant(packed) if variant == "auto" else variant)
    problem = problem_of(packed)
    refusal = can_run(chosen.needs, packed.device) or chosen.constraint(problem)
    if refusal:
        raise SdbenchError(f"spmv variant {chosen.name}: {refusal}")
    # Triton launches on the current device, where a weight need not be; a tuned config is tried.
    with at_device_of(packed.values):
        found = choose(packed, chosen, problem) if config is None else config
        return BoundSpmv(packed, chosen, found, chosen.bind(packed, found) if chosen.bind else None)


def choose(packed: PackedWeight, variant: Variant, problem: Problem) -> Config:
    """The tuned config of a weight on a GPU, once it has been seen to be right there; else the default.

    Args:
        packed: The weight.
        variant: Of any kernel that takes packed weights.
        problem: What is multiplied, with the number of tokens to look up.
    """
    default = variant.default(problem)
    if packed.device.type != "cuda":
        return default
    config, source = tuned.lookup(variant, problem, packed.device)
    return config if source == "default" or _is_right(packed, variant, problem, config, source) else default


_RIGHT: dict[tuple[object, ...], bool] = {}


def _is_right(packed: PackedWeight, variant: Variant, problem: Problem, config: Config, source: str) -> bool:
    """Compares a tuned config with the float64 product on random x, the first time in a process; a wrong one is a warning.

    Raises:
        SdbenchError: A CUDA graph is being captured, where nothing can be compared.
    """
    key = (variant.kernel, variant.name, problem, packed.device, *sorted(config.items()))
    if key not in _RIGHT:
        if packed.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise SdbenchError(
                f"{variant.kernel} variant {variant.name}: bind the weight, or multiply once, before a capture, "
                "since a tuned config is checked first"
            )
        rows = (problem.tokens,) if problem.tokens > 1 else ()
        y = torch.full((*rows, packed.out_features), float("nan"), device=packed.device)
        shape = (*rows, packed.in_features)
        found = trouble(lambda x: variant.launch(packed, x, y, config), packed, shape, packed.dtype, packed.device)
        _RIGHT[key] = found is None
        if found:
            warnings.warn(
                f"{variant.kernel} variant {variant.name}, {'x'.join(map(str, packed.shape))} at {packed.pattern}: the {source} config "
                f"{dict(config)} {found}; the default is used. 'sdbench tune' finds a right one",
                stacklevel=4,
            )
    return _RIGHT[key]


@dataclass(frozen=True, eq=False)
class BoundSpmv:
    """A packed weight with the variant and config that multiply it, and what the variant bound; made by :func:`bind`."""

    packed: PackedWeight
    variant: Variant
    config: Config
    product: Product | None = None

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, epilogue: Epilogue = NOTHING) -> Tensor:
        """Multiplies one vector; see :func:`spmv`."""
        if elsewhere(x):
            with at_device_of(x):
                return self(x, out_dtype, epilogue)
        packed = self.packed
        if x.shape[-1] != packed.in_features or x.numel() != packed.in_features:
            raise SdbenchError(f"spmv multiplies one vector of {packed.in_features} elements, not a tensor of shape {tuple(x.shape)}")
        if x.device != packed.device:
            raise SdbenchError(f"spmv: x is on {x.device}, the weight on {packed.device}")
        if self.product and epilogue is NOTHING:
            return self.product(x, out_dtype or x.dtype)
        y = torch.empty(epilogue.size(packed.out_features), dtype=out_dtype or x.dtype, device=x.device)
        vector = x.reshape(-1).contiguous()
        if epilogue is NOTHING:
            y = self.variant.launch(packed, vector, y, self.config)
        else:
            finish(self._sums(vector), y, epilogue, dependent=bool(self.config.get("pdl")))
        return y.view(*x.shape[:-1], -1)

    def _sums(self, x: Tensor) -> Tensor:
        """float32 ``[splits, out]``: the variant's partial sums where it splits K, else its y."""
        y = torch.empty(self.packed.out_features, device=x.device)
        if self.config.get("splits", 1) > 1:
            for partial in registry.variants("spmv_partial"):
                if partial.name == self.variant.name:
                    return partial.launch(self.packed, x, y, self.config)
        return self.variant.launch(self.packed, x, y, self.config)[None]


def spmv(
    packed: PackedWeight,
    x: Tensor,
    variant: str = "auto",
    config: Config | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    epilogue: Epilogue = NOTHING,
) -> Tensor:
    """Multiplies a packed weight with one vector.

    Args:
        packed: W, ``[out, in]`` in kernel form.
        x: ``[in]``, or ``[..., in]`` with leading dimensions of 1, on the weight's device; bf16, fp16 or fp32. Accumulation is float32.
        variant: ``"auto"``, or a registered name; ``"reference"`` runs anywhere.
        config: Launch parameters of the variant; None for the tuned ones, on a GPU that has them, else for its default.
        out_dtype: Dtype of y; x's when None.
        epilogue: Bias, residual or ``silu(gate) * up``, applied to the float32 sums before they are rounded.

    Returns:
        y, ``[out]``, or ``[out/2]`` of a gated epilogue, with x's leading dimensions.

    Raises:
        UsageError: An unknown variant.
        SdbenchError: x does not fit, or the variant cannot take this weight here.
    """
    return bind(packed, variant, config)(x, out_dtype, epilogue)
