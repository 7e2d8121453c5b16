"""The registry of kernel variants: tests, timings, compile-only checks and the search iterate over it.

A variant lives in a file of its own under ``kernels/<kernel>/`` and registers itself when that file is imported.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdbench.errors import SdbenchError, UsageError
from sdbench.packing import pack
from sdbench.pattern import WORD, Pattern

Config = Mapping[str, int]
"""Launch parameters of one kernel, by their readable names."""


@dataclass(frozen=True)
class Problem:
    """What a kernel is asked to multiply.

    Attributes:
        out_features: Rows of the weight.
        in_features: Columns of the weight.
        dtype: Dtype of the weight.
        pattern: N:M of a packed weight; None for a dense one.
        sm_count: Streaming multiprocessors of the device, for the choice of defaults.
        capability: Compute capability of an NVIDIA device, 90 for 9.0; 0 elsewhere.
        tokens: Rows of x: 1 but for kernels that take several.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype
    pattern: Pattern | None
    sm_count: int
    capability: int = 0
    tokens: int = 1

    @property
    def words(self) -> int:
        """Mask words along a row of the packed form."""
        return -(-self.in_features // WORD)

    @property
    def dependent_launch(self) -> int:
        """1 where the device takes programmatic dependent launch (Hopper and newer), as configs hold it."""
        return int(self.capability >= 90)


@dataclass(frozen=True)
class CompileSource:
    """What ``triton.compile`` needs to compile a variant without a GPU.

    Attributes:
        function: The bare ``@triton.jit`` function.
        signature: Argument name -> Triton type name.
        constexprs: Argument name -> compile-time value.
        num_warps: Warps a program.
    """

    function: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int


Prepare = Callable[[Tensor, Tensor | None, Pattern | None], tuple[Any, Tensor]]
"""``prepare(dense, keep, pattern)`` makes what a kernel reads from a matrix ``[out, in]`` and its keep mask, bool ``[out, in]``.

Returns the operand, which has ``nbytes`` and ``clone()``, and the matrix ``[out, in]`` that it stands for exactly (any float dtype):
pruned, quantised or as it was. ``keep`` and ``pattern`` are None together.
"""


Product = Callable[[Tensor, torch.dtype], Tensor]
"""``product(x, dtype)`` multiplies ``[..., in]`` into ``[..., out]``: in that dtype where it can choose, else in its own."""


def as_it_is(dense: Tensor, keep: Tensor | None, pattern: Pattern | None) -> tuple[Any, Tensor]:
    """A ``Prepare`` of the dense matrix itself, or of its PackedWeight where there is a pattern."""
    if keep is None or pattern is None:
        return dense, dense
    return pack(dense, keep, pattern), torch.where(keep, dense, 0)


@dataclass(frozen=True)
class Variant:
    """One way to compute y = W x.

    Attributes:
        kernel: The folder it lives in: ``"spmv"`` (the operand is a PackedWeight), ``"dense"`` (a matrix ``[out, in]``), and others whose
            operands ``prepare`` makes.
        name: Name within the kernel.
        summary: One line for tables and docs.
        launch: ``launch(operand, x, y, config)`` computes W x for x ``[in]`` and returns it, ``[out]``: in y, where the variant can. With
            several tokens x is ``[tokens, in]`` and the result ``[tokens, out]``.
        space: Configs to search for a problem; each must be valid, or its failure becomes a record.
        default: Config without a search, from the shape and the SM count.
        constraint: Why the variant cannot take a problem, or None.
        needs: ``"torch"`` runs anywhere, ``"triton"`` on a GPU or in Triton's interpreter.
        compile_source: For compile-only checks; None for variants without a kernel of ours.
        prepare: Makes the operand; variants with one and the same function share their operands.
        tokens: Fewest and most rows of x that it is for; None for no limit.
        bind: ``bind(operand, config)`` gives a product that holds what its calls share; None where ``launch`` has nothing to hold.
        launch_parts: ``launch_parts(operand, x, parts, config)``, for several tokens, fills float32 ``[splits, tokens, out]`` with what
            ``launch`` would add; None for variants that split no K.
    """

    kernel: str
    name: str
    summary: str
    launch: Callable[[Any, Tensor, Tensor, Config], Tensor]
    space: Callable[[Problem], list[Config]]
    default: Callable[[Problem], Config]
    constraint: Callable[[Problem], str | None] = lambda problem: None
    needs: str = "triton"
    compile_source: Callable[[Problem, Config], CompileSource] | None = None
    prepare: Prepare = as_it_is
    tokens: tuple[int, int | None] = (1, 1)
    bind: Callable[[Any, Config], Product] | None = None
    launch_parts: Callable[[Any, Tensor, Tensor, Config], None] | None = None

    def serves(self, tokens: int) -> bool:
        """Whether it is for so many rows of x."""
        least, most = self.tokens
        return least <= tokens and (most is None or tokens <= most)


_VARIANTS: dict[tuple[str, str], Variant] = {}


def register(variant: Variant) -> Variant:
    """Adds a variant; called at import by the variant's own file."""
    key = (variant.kernel, variant.name)
    if key in _VARIANTS:
        raise SdbenchError(f"kernel variant {variant.kernel}/{variant.name} is registered twice")
    _VARIANTS[key] = variant
    return variant


def variants(kernel: str) -> list[Variant]:
    """Every variant of one kernel, by name."""
    _load_all()
    return [variant for key, variant in sorted(_VARIANTS.items()) if key[0] == kernel]


def find(kernel: str, name: str) -> Variant:
    """One variant by name.

    Raises:
        UsageError: No such variant, with the closest name.
    """
    names = [variant.name for variant in variants(kernel)]
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"{kernel} variant {name!r} is unknown: {hint}known: {', '.join(names)}")
    return _VARIANTS[kernel, name]


@cache
def _load_all() -> None:
    for folder in sorted(p for p in Path(__file__).parent.iterdir() if (p / "__init__.py").is_file()):
        package = importlib.import_module(f"sdbench.kernels.{folder.name}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
