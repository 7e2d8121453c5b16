"""Y = X W^T for a packed N:M weight and any number of tokens, without a dense copy that stays: prompts and small batches."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sdbench.devices import at_device_of, elsewhere
from sdbench.errors import SdbenchError
from sdbench.kernels import registry
from sdbench.kernels.launching import can_run
from sdbench.kernels.registry import Config, Product, Variant
from sdbench.kernels.spmv import choose, problem_of
from sdbench.packing import PackedWeight

FEW_TOKENS = 32
"""Up to so many tokens ``"auto"`` means ``tile`` on a GPU, where that takes the weight; else ``expand``, which writes the dense rows first:
a price that many tokens share."""

TUNED_TOKENS = (2, 4, 8, 16, 32)
"""Numbers of tokens that configs are searched for; others take those of the next larger one, and the default beyond the last."""


def auto_variant(packed: PackedWeight, tokens: int) -> str:
    """The variant that ``"auto"`` means for a weight where it lies: on a CPU the torch reference."""
    if packed.device.type != "cuda":
        return "reference"
    problem = problem_of(packed, tokens)
    return "tile" if tokens <= FEW_TOKENS and registry.find("spmm", "tile").constraint(problem) is None else "expand"


def searched_tokens(tokens: int) -> int | None:
    """The number of tokens whose configs serve so many: 1 for one, else the next larger that is searched, if there is one."""
    return next((most for most in (1, *TUNED_TOKENS) if tokens <= most), None)


def config_for(packed: PackedWeight, variant: Variant, tokens: int) -> Config:
    """The tuned config for the next larger number of tokens that has any, else the default; see :func:`sdbench.kernels.spmv.choose`."""
    searched = searched_tokens(max(2, tokens))
    if searched is None or variant.needs == "torch":
        return variant.default(problem_of(packed, tokens))
    return choose(packed, variant, problem_of(packed, searched))


@dataclass(frozen=True, eq=False)
class BoundSpmm:
    """A packed weight, and for each number of tokens what multiplies it, looked up once: a decode step makes hundreds of products.

    Attributes:
        packed: W, ``[out, in]`` in kernel form.
        variant: ``"auto"``, or a registered name.
        found: What multiplies x, by its shape, of those shapes that have come already.
    """

    packed: PackedWeight
    variant: str = "auto"
    found: dict[torch.Size, Product] = field(default_factory=dict)
    _bound: dict[tuple[str, tuple[int, ...]], Product] = field(default_factory=dict)

    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Multiplies ``[..., in]`` into ``[..., out]``; see :func:`spmm`."""
        # Triton launches on the current device, where x and the weight need not be.
        if elsewhere(x):
            with at_device_of(x):
                return self.multiply(x, out_dtype)
        wanted = out_dtype or x.dtype
        y = (self.found.get(x.shape) or self._find(x))(x, wanted)
        return y if y.dtype is wanted else y.to(wanted)

    def _find(self, x: Tensor) -> Product:
        packed, tokens = self.packed, x.numel() // self.packed.in_features
        if x.shape[-1] != packed.in_features:
            raise SdbenchError(f"spmm multiplies rows of {packed.in_features} elements, not a tensor of shape {tuple(x.shape)}")
        self._require_device(x)
        if not tokens:
            return lambda x, dtype: x.new_empty(*x.shape[:-1], packed.out_features, dtype=dtype)
        chosen = registry.find("spmm", auto_variant(packed, tokens) if self.variant == "auto" else self.variant)
        refusal = can_run(chosen.needs, packed.device) or chosen.constraint(problem_of(packed, tokens))
        if refusal:
            raise SdbenchError(f"spmm variant {chosen.name}: {refusal}")
        config = config_for(packed, chosen, tokens)
        # Prompts of all lengths share one: beyond the searched numbers of tokens they have one config.
        key = chosen.name, tuple(config.values())
        if key not in self._bound:
            self._bound[key] = chosen.bind(packed, config) if chosen.bind else partial(self._launch, chosen, config)
        return self.found.setdefault(x.shape, self._bound[key])

    def _launch(self, chosen: Variant, config: Config, x: Tensor, dtype: torch.dtype) -> Tensor:
        self._require_device(x)
        rows = x.reshape(-1, self.packed.in_features)
        y = rows.new_empty(len(rows), self.packed.out_features, dtype=dtype)
        return chosen.launch(self.packed, rows, y, config).view(*x.shape[:-1], self.packed.out_features)

    def _require_device(self, x: Tensor) -> None:
        if x.device != self.packed.device:
            raise SdbenchError(f"spmm: x is on {x.device}, the weight on {self.packed.device}")


def spmm(packed: PackedWeight, x: Tensor, variant: str = "auto", *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiplies a packed weight with any number of tokens.

    Args:
        packed: W, ``[out, in]`` in kernel form.
        x: ``[..., in]``, on the weight's device; bf16, fp16 or fp32. Accumulation is float32.
        variant: ``"auto"``, or a registered name; ``"reference"`` runs anywhere.
        out_dtype: Dtype of Y; x's when None.

    Returns:
        Y, ``[..., out]``.

    Raises:
        UsageError: An unknown variant.
        SdbenchError: x does not fit, or the variant cannot take this product here.
    """
    return BoundSpmm(packed, variant).multiply(x, out_dtype)
