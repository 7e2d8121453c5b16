"""A linear whose decode steps run through the packed SpMV, and the swap of a live model's linears for such modules."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdbench.engine.phase import current_phase
from sdbench.engine.siblings import Siblings, group
from sdbench.errors import CheckFailed
from sdbench.kernels.checked import exact
from sdbench.kernels.spmm import FEW_TOKENS, BoundSpmm
from sdbench.kernels.spmv import bind
from sdbench.packing import PackedWeight
from sdbench.timing import TOLERANCE, relative_error, within
from sdbench.words import counted

PrefillWeights = Literal["pruned", "dense"]
"""Which matrix the prompt runs on: the pruned one, as in a packed checkpoint, or the original."""


class PackedLinear(nn.Module):
    """y = W x + b with W packed N:M; the explicit phase says which way it runs.

    Args:
        packed: W ``[out, in]``, for decode steps: an SpMV for one row, the product of several tokens for more.
        prefill_weight: Dense ``[out, in]`` matrix for the prefill; None for W itself, from its packed form.
        bias: ``[out]`` or None.
        variant: SpMV variant; ``"auto"`` takes the fastest for the device.

    Attributes:
        calls: Rows of decode steps that came through this forward so far, whether multiplied alone or with those of its siblings.
        siblings: What multiplies several tokens together with other linears of the same input, and the place among them; None alone.
    """

    def __init__(self, packed: PackedWeight, prefill_weight: Tensor | None, bias: Tensor | None, variant: str = "auto"):
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.packed = packed
        self.prefill_weight = prefill_weight
        self.bias = bias
        self.calls = 0
        self.siblings: tuple[Siblings, int] | None = None
        self.look_up(variant)

    def look_up(self, variant: str = "auto") -> None:
        """Finds what multiplies the packed weight that is there now; a tuned config is tried on it.

        Args:
            variant: SpMV variant.
        """
        self.spmv, self.spmm = bind(self.packed, variant), BoundSpmm(self.packed)

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies ``[..., in]`` into ``[..., out]``, in x's dtype.

        Raises:
            RuntimeError: No phase is open (see :mod:`sdbench.engine.phase`): one position may be a decode step or a short prompt.
        """
        phase = current_phase()
        if phase is None:
            raise RuntimeError("a PackedLinear ran outside a phase; drive the model by sdbench.engine.greedy")
        if phase.name == "prefill" and self.prefill_weight is not None:
            return F.linear(x, self.prefill_weight, self.bias)
        if phase.name == "decode":
            self.calls += x.numel() // self.in_features
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        """W x for any number of tokens ``[..., in]``, without the bias; together with its siblings, where it has any."""
        found = self.siblings[0].product(self.siblings[1], x) if self.siblings else None
        if found is not None:
            return found
        return self.spmv(x) if x.numel() == self.in_features else self.spmm.multiply(x)

    @property
    def variant(self) -> str:
        """Name of the SpMV variant that runs."""
        return (self.siblings and self.siblings[0].variant) or self.spmv.variant.name

    def extra_repr(self) -> str:
        """Shape, pattern and variant."""
        return f"in_features={self.in_features}, out_features={self.out_features}, pattern={self.packed.pattern}, variant={self.variant}"


@contextmanager
def packed_linears(
    model: nn.Module, weights: Mapping[str, PackedWeight], prefill: PrefillWeights, variant: str = "auto"
) -> Iterator[dict[str, PackedLinear]]:
    """Replaces linears of a live model by packed ones inside the ``with`` block; afterwards the model is what it was.

    Dense weights that nothing reads then lie in main memory: a GPU holds what the pruned model needs, and no more.

    Args:
        model: A transformers model.
        weights: Packed weight by the linear's dotted name.
        prefill: Matrix of the prefill; ``"dense"`` is the linear's own weight.
        variant: SpMV variant.

    Each module's products, with the variants and configs that it will run, are first checked on random input against the float64 product
    with the unpacked matrix: no rate of a wrong kernel can be measured.

    Packed weights move: a CUDA graph that was captured on them before must not be replayed after.

    Yields:
        The modules in place, by name.

    Raises:
        CheckFailed: A module's product is wrong; names the layer.
    """
    originals: dict[str, Any] = {name: model.get_submodule(name) for name in weights}
    modules: dict[str, PackedLinear] = {}
    for name, packed in weights.items():
        linear = originals[name]
        modules[name] = PackedLinear(packed, linear.weight.detach() if prefill == "dense" else None, linear.bias, variant)
    with in_place(model, modules), _in_main_memory(model, originals.values()) if prefill == "pruned" else nullcontext():
        together = group(weights, originals, variant)
        for name, siblings in together.items():
            modules[name].siblings = siblings
        stacks = (siblings.weight for siblings, _ in together.values())
        _lie_together(tensor for weight in (*weights.values(), *stacks) for tensor in weight.tensors)
        # A prompt is mostly long enough for another variant than a few tokens.
        tokens = (1, 2, FEW_TOKENS + 1) if prefill == "pruned" else (1, 2)
        for name, module in modules.items():
            require_right(module, originals[name].weight.dtype, name, tokens)
        yield modules


@contextmanager
def in_place(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, the model has these modules at their dotted names; afterwards it is what it was."""
    before = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            _replace(model, name, module)
        yield
    finally:
        for name, module in before.items():
            _replace(model, name, module)


@contextmanager
def _in_main_memory(model: nn.Module, linears: Iterable[nn.Linear]) -> Iterator[None]:
    """Inside, weights of linears that a model no longer has lie in main memory; one that it has elsewhere too (a tied lm_head) stays."""
    needed = list(model.parameters())
    weights = {id(linear.weight): linear.weight for linear in linears}
    for parameter in needed:
        weights.pop(id(parameter), None)
    leaving = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    for parameter in needed:
        # Rows of a matrix that a decoder made of several linears would keep all of it.
        if parameter.untyped_storage().data_ptr() in leaving:
            parameter.data = parameter.data.clone()
    devices = {key: weight.device for key, weight in weights.items()}
    try:
        for weight in weights.values():
            weight.data = weight.data.cpu()
        yield
    finally:
        for key, weight in weights.items():
            weight.data = weight.data.to(devices[key])


def _lie_together(tensors: Iterable[Tensor]) -> None:
    """Gives memory back to the driver that packing left between packed weights on a GPU: they leave it and come back one by one."""
    memories: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        memories.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = tensor
    devices = {tensor.device for views in memories.values() for tensor in views.values()}
    if len(devices) != 1 or (device := devices.pop()).type != "cuda":
        return
    for views in memories.values():
        _move(views.values(), torch.device("cpu"))
    torch.cuda.empty_cache()
    for views in memories.values():
        _move(views.values(), device)


def _move(views: Iterable[Tensor], device: torch.device) -> None:
    """Moves a memory; its views are views of it there too."""
    storage = next(iter(views)).untyped_storage().to(device=device)
    for view in views:
        view.data = torch.empty(0, dtype=view.dtype, device=device).set_(storage, view.storage_offset(), view.shape, view.stride())


def require_right(module: PackedLinear, dtype: torch.dtype, name: str, tokens: Sequence[int]) -> None:
    """Checks a module's products on random input against the float64 product with the unpacked matrix.

    Args:
        module: The module.
        dtype: Of its input.
        name: What messages call it.
        tokens: Numbers of rows at once.

    Raises:
        CheckFailed: One is wrong by more than rounding.
    """
    device = module.packed.device
    generator, dense = torch.Generator(device).manual_seed(0), module.packed.unpack()
    for count in tokens:
        x = torch.randn(count, module.in_features, device=device, generator=generator).to(dtype)
        want = exact(dense, x)
        # Twice: a first product looks launches up, and the second repeats them, as all later ones do.
        _products(module, x)
        products = _products(module, x)
        for what, y in products.items():
            error = relative_error(y, want)
            if not within(error, TOLERANCE[y.dtype]):
                raise CheckFailed(f"layer {name}: the {what} is wrong here, relative error {error:.1e}; run 'sdbench kernels'")


def _products(module: PackedLinear, x: Tensor) -> dict[str, Tensor]:
    """Each way in which a module multiplies so many tokens ``[tokens, in]``, by what messages call it."""
    dtypes = {f"packed product of {counted(len(x), 'token')}": x.dtype}
    if len(x) == 1:
        # In float32, where an error shows, and as decode steps want it.
        dtypes = {f"{module.variant} SpMV": torch.float32, f"{module.variant} SpMV of a decode step": x.dtype}
    found = {}
    for name, dtype in dtypes.items():
        found[name] = module.spmv(x, dtype) if len(x) == 1 else module.spmm.multiply(x)
        if module.siblings:
            together, place = module.siblings
            # The first one multiplies for all.
            first = together.product(0, x, dtype)
            y = first if place == 0 else together.product(place, x)
            if y is not None:
                found[f"{name} with its siblings"] = y
    return found


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
