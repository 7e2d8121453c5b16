"""The pruning methods by name, and their use on the linears of a model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from sdbench.calibrate import magnitude, sparsegpt, wanda
from sdbench.calibrate.collect import LayerStatistics
from sdbench.calibrate.registry import lookup
from sdbench.errors import SdbenchError
from sdbench.pattern import Pattern


@dataclass(frozen=True, eq=False)
class Pruned:
    """One pruned matrix.

    Args:
        weight: [out, in] in the layer's dtype, 0 where ``keep`` is false; a new tensor.
        keep: Bool [out, in], exactly N true in every group of M.
        report: What the method has to say about this layer; plain JSON values.
    """

    weight: Tensor
    keep: Tensor
    report: dict[str, Any] = field(default_factory=dict)


Value = TypeVar("Value")

PruneFunction = Callable[[Tensor, LayerStatistics | None, Pattern, str], Pruned]
TogetherFunction = Callable[[Mapping[str, Tensor], LayerStatistics, Pattern], dict[str, Pruned]]


@dataclass(frozen=True)
class Method:
    """A way to prune one matrix.

    Args:
        description: One line for help texts.
        needs: Statistics that it reads: none, the sums of squares of the input columns, or their Hessian.
        prune: ``(weight [out, in], statistics, pattern, layer name) -> Pruned``; must leave the weight as it is.
        together: ``(weights by layer name, their common statistics, pattern) -> results by name``, the same results as one by one, where
            a method saves work on linears that read the same input; None otherwise.
    """

    description: str
    needs: Literal["none", "sum_sq", "hessian"]
    prune: PruneFunction
    together: TogetherFunction | None = None


def _magnitude(weight: Tensor, statistics: LayerStatistics | None, pattern: Pattern, layer: str) -> Pruned:
    keep = magnitude.keep_mask(weight, pattern, layer)
    return Pruned(weight.detach().masked_fill(~keep, 0.0), keep)


def _wanda(weight: Tensor, statistics: LayerStatistics | None, pattern: Pattern, layer: str) -> Pruned:
    inputs = _given(statistics, layer, "sum_sq")
    keep = wanda.keep_mask(weight, inputs.sum_sq, pattern, layer)
    return Pruned(weight.detach().masked_fill(~keep, 0.0), keep, {"rows": inputs.rows})


def _sparsegpt(weight: Tensor, statistics: LayerStatistics | None, pattern: Pattern, layer: str, *, damp_by: sparsegpt.DampBy) -> Pruned:
    return _sparsegpt_together({layer: weight}, _given(statistics, layer, "hessian"), pattern, damp_by=damp_by)[layer]


def _sparsegpt_together(
    weights: Mapping[str, Tensor], inputs: LayerStatistics, pattern: Pattern, *, damp_by: sparsegpt.DampBy
) -> dict[str, Pruned]:
    hessian = _given(inputs.hessian, next(iter(weights)), "hessian")
    results = sparsegpt.prune_together(weights, hessian, pattern, damp_by=damp_by)
    return {
        layer: Pruned(
            result.weight,
            result.keep,
            {
                "rows": inputs.rows,
                "damp": result.damp,
                "damp_used": result.damp_used,
                "damp_by": result.damp_by,
                "dead_columns": result.dead_columns,
            },
        )
        for layer, result in results.items()
    }


def _given(value: Value | None, layer: str, kind: str) -> Value:
    if value is None:
        raise SdbenchError(
            f"layer {layer}: the method needs a {kind} of the inputs and there is none; collect statistics of kind {kind} first"
        )
    return value


METHODS: dict[str, Method] = {
    "wanda": Method("|W| times the norm of the input column; kept weights unchanged", "sum_sq", _wanda),
    "magnitude": Method("|W| alone; needs no calibration", "none", _magnitude),
    "sparsegpt": Method(
        "least output error, kept weights compensated; damping 1% of the mean diagonal",
        "hessian",
        partial(_sparsegpt, damp_by="mean"),
        partial(_sparsegpt_together, damp_by="mean"),
    ),
    "sparsegpt-median": Method(
        "sparsegpt with damping 1% of the median diagonal, which huge first-position activations can't swamp",
        "hessian",
        partial(_sparsegpt, damp_by="median"),
        partial(_sparsegpt_together, damp_by="median"),
    ),
}


def prune_linears(
    linears: Mapping[str, nn.Linear], statistics: Mapping[str, LayerStatistics], pattern: Pattern, method: str
) -> Iterator[tuple[str, Pruned]]:
    """Prunes one linear's weight after the other; the model itself stays as it is.

    Args:
        linears: Layers by dotted name.
        statistics: By the same names; may be empty for a method that needs none.
        pattern: N:M.
        method: A name in `METHODS`.

    Returns:
        An iterator of names and pruned weights, on the layers' devices; each is made when it is asked for, and none is kept. Layers that
        follow one another and share a Hessian are made together, by a method that gains by it.

    Raises:
        UsageError: Unknown method, or a width that is not a multiple of M; at once, for all layers.
        SdbenchError: Statistics that are missing, or NaN or Inf; when the layer's turn comes.
    """
    chosen = lookup("method", method, METHODS)
    for name, linear in linears.items():
        pattern.require_width(linear.in_features, name)
    return _in_turn(chosen, linears, statistics, pattern)


def _in_turn(
    chosen: Method, linears: Mapping[str, nn.Linear], statistics: Mapping[str, LayerStatistics], pattern: Pattern
) -> Iterator[tuple[str, Pruned]]:
    def shared(name: str) -> object:
        """What layers that are pruned together have in common."""
        inputs = statistics.get(name)
        return id(inputs.hessian) if chosen.together and inputs and inputs.hessian is not None else name

    for _, names in groupby(linears, shared):
        first, *others = names
        if others and chosen.together:
            yield from chosen.together({name: linears[name].weight for name in (first, *others)}, statistics[first], pattern).items()
        else:
            yield first, chosen.prune(linears[first].weight, statistics.get(first), pattern, first)
