"""How a product of a fused step is launched: by which kernel and config, seen to be right on the product's own weight."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from sdbench.engine.fused.plan import Unfusable
from sdbench.kernels import registry, tuned
from sdbench.kernels.checked import trouble
from sdbench.kernels.registry import Config, Problem, Variant
from sdbench.kernels.spmm import FEW_TOKENS, searched_tokens
from sdbench.timing import copies_needed, graph_times
from sdbench.words import counted

Buffer = Callable[[int], Tensor]
"""float32 ``[splits, batch, out]`` for so many splits, or ``[1, batch, out]`` where the sum is wanted whole."""


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with its config, and where it writes.

    Attributes:
        variant: The kernel.
        config: Its parameters.
        sums: float32 ``[splits, batch, out]``, written.
    """

    variant: Variant
    config: Config
    sums: Tensor

    def __call__(self, weight: Any, x: Tensor) -> None:
        """Multiplies.

        Args:
            weight: As the variant takes it.
            x: ``[batch, in]``.
        """
        variant, sums = self.variant, self.sums
        if variant.name == "linear" and x.is_cuda:
            # The same product with its sums left as they are.
            torch.mm(x, weight.T, out_dtype=torch.float32, out=sums[0])
        elif variant.kernel == "spmv_partial":
            variant.launch(weight, x[0], sums[:, 0], self.config)
        elif len(sums) > 1 and variant.launch_parts:
            variant.launch_parts(weight, x, sums, self.config)
        else:
            one = len(x) == 1
            y = variant.launch(weight, x[0] if one else x, sums[0, 0] if one else sums[0], self.config)
            if y.data_ptr() != sums.data_ptr():
                sums[0].copy_(y)


def input_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a product's x, by the weights': as the kernels were tuned for; fp16 has no room for a vector before its scaling."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def launch_for(weight: Any, problem: Problem, device: torch.device, int8: bool, buffer: Buffer) -> Launch:
    """The launch of a product: the fastest by tuned choices, or by the clock for a dense one, of which torch's own has none.

    Args:
        weight: A matrix, or what stands for one.
        problem: What it is multiplied with.
        device: Where.
        int8: Whether the weight is of int8 codes.
        buffer: Where sums go.

    Raises:
        Unfusable: No kernel takes the product, or none of those that do gives a right one.
    """
    candidates = _candidates(problem, int8)
    if problem.pattern or int8:
        return _right(tuned.fastest(candidates, _searched(problem), device), weight, problem, device, buffer)
    known = _QUICKEST.get((problem, device))
    launches, reason = [], ""
    for variant in candidates if known is None else [known, *(other for other in candidates if other != known)]:
        try:
            launches.append(_right(variant, weight, problem, device, buffer))
        except Unfusable as error:
            reason = str(error)
        if launches and known:
            break
    if not launches:
        raise Unfusable(reason)
    if len(launches) == 1 or device.type != "cuda":
        return launches[0]
    quickest = _quickest(launches, weight, problem, device)
    if quickest is None:
        what = f"{problem.out_features}x{problem.in_features}, {counted(problem.tokens, 'token')}"
        warnings.warn(f"no room to time the dense products of {what}; {launches[0].variant.name} is used", stacklevel=2)
        return launches[0]
    _QUICKEST[problem, device] = quickest.variant
    return quickest


_QUICKEST: dict[tuple[Problem, torch.device], Variant] = {}
"""The dense product that was the fastest by the clock."""


def _candidates(problem: Problem, int8: bool) -> list[Variant]:
    several = problem.tokens > 1
    if several and (int8 or problem.dtype == torch.float16):
        what = "int8 weights" if int8 else "float16, which has no room for sums before a norm's scaling"
        raise Unfusable(f"no fused step for several prompts at once with {what}")
    if problem.pattern is None:
        names = [("quantized", "int8")] if int8 else [("dense", name) for name in ("gemv", "linear", "gemm")]
        # Torch multiplies no float32 x, which float16 weights have here.
        dense = [registry.find(*name) for name in names if problem.dtype != torch.float16 or name[1] != "linear"]
        return [variant for variant in dense if variant.serves(problem.tokens)]
    alternatives = [[("spmm", "tile")], [("spmm", "expand")]]
    if problem.tokens > FEW_TOKENS:
        alternatives.reverse()
    if not several:
        alternatives = [[("spmv_partial", "lane_row_nibble"), ("spmv_partial", "lane_row")], [("spmv", "portable")]]
    for found in alternatives:
        taking = [variant for variant in (registry.find(*name) for name in found) if variant.constraint(problem) is None]
        if taking:
            return taking
    raise Unfusable(f"no fused step: no kernel takes pattern {problem.pattern} in {problem.dtype}")


def _searched(problem: Problem) -> Problem:
    """The problem that configs of this one were searched for."""
    return replace(problem, tokens=searched_tokens(problem.tokens) or problem.tokens)


def _right(variant: Variant, weight: Any, problem: Problem, device: torch.device, buffer: Buffer) -> Launch:
    """The variant with its tuned config where that is right, else with its default."""
    config, source = tuned.lookup(variant, _searched(problem), device)
    what = f"{variant.kernel} variant {variant.name}, {problem.out_features}x{problem.in_features}"
    launch = _with(variant, config, problem, buffer)
    found = _trouble(launch, weight, problem, device)
    if found and source != "default":
        message = f"{what}: the {source} config {dict(config)} {found}; the default is used. 'sdbench tune' finds a right one"
        warnings.warn(message, stacklevel=2)
        launch = _with(variant, variant.default(problem), problem, buffer)
        found = _trouble(launch, weight, problem, device)
    if found:
        raise Unfusable(f"no fused step: {what} {found}; run 'sdbench kernels'")
    return launch


def _with(variant: Variant, config: Config, problem: Problem, buffer: Buffer) -> Launch:
    # All kernels of a step take part in dependent launch.
    if "pdl" in config and problem.tokens == 1:
        config = {**config, "pdl": config["pdl"] or problem.dependent_launch}
    leaves_parts = variant.kernel == "spmv_partial" if problem.tokens == 1 else variant.launch_parts is not None
    return Launch(variant, config, buffer(config.get("splits", 1) if leaves_parts else 1))


def _trouble(launch: Launch, weight: Any, problem: Problem, device: torch.device) -> str | None:
    """What is wrong with a launch, its sums full of NaN before; None for a right one."""
    # What torch multiplies is as near as its own dtype.
    rounded = input_dtype(problem.dtype) if launch.variant.name in ("linear", "expand") else torch.float32

    def product(x: Tensor) -> Tensor:
        launch.sums.fill_(torch.nan)
        launch(weight, x)
        return launch.sums.sum(0).to(rounded)

    return trouble(product, weight, (problem.tokens, problem.in_features), input_dtype(problem.dtype), device, times=2)


def _quickest(launches: Sequence[Launch], weight: Tensor, problem: Problem, device: torch.device) -> Launch | None:
    """The fastest of right launches over copies of the weight that the cache does not hold; None where there is no room for them."""
    x = torch.randn(problem.tokens, problem.in_features, device=device).to(input_dtype(problem.dtype))
    try:
        copies = [weight, *(weight.clone() for _ in range(copies_needed(weight.nbytes, device) - 1))]
        times = [graph_times([partial(launch, copy, x) for copy in copies], replays=5) for launch in launches]
    except (torch.OutOfMemoryError, TritonError):
        return None
    return min(zip(launches, times, strict=True), key=lambda pair: pair[1].p50 if pair[1] else torch.inf)[0]
