"""The pruning methods by name, and their use on the linears of a model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(frozen=True)
class Method:
    """A way to prune one matrix.

    Args:
        description: One line for help texts.
        needs: Statistics that it reads: none, the sums of squares of the input columns, or their Hessian.
        prune: ``(weight [out, in], statistics, pattern, layer name) -> Pruned``; must leave the weight as it is.
    """

    description: str
    needs: Literal["none", "sum_sq", "hessian"]
    prune: PruneFunction


def _magnitude(weight: Tensor, statistics: LayerStatistics | None, pattern: Pattern, layer: str) -> Pruned:
    keep = magnitude.keep_mask(weight, pattern, layer)
    return Pruned(weight.detach().masked_fill(~keep, 0.0), keep)


def _wanda(weight: Tensor, statistics: LayerStatistics | None, pattern: Pattern, layer: str) -> Pruned:
    inputs = _given(statistics, layer, "sum_sq")
    keep = wanda.keep_mask(weight, inputs.sum_sq, pattern, layer)
    return Pruned(weight.detach().masked_fill(~keep, 0.0), keep, {"rows": inputs.rows})


def _sparsegpt(weight: Tensor, statistics: LayerStatistics | None, pattern: Pattern, layer: str, *, damp_by: sparsegpt.DampBy) -> Pruned:
    inputs = _given(statistics, layer, "hessian")
    hessian = _given(inputs.hessian, layer, "hessian")
    result = sparsegpt.prune_with_report(weight, hessian, pattern, damp_by=damp_by, layer=layer)
    report = {
        "rows": inputs.rows,
        "damp": result.damp,
        "damp_used": result.damp_used,
        "damp_by": result.damp_by,
        "dead_columns": result.dead_columns,
    }
    return Pruned(result.weight, result.keep, report)


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
        "least output error, kept weights compensated; damping 1% of the mean diagonal", "hessian", partial(_sparsegpt, damp_by="mean")
    ),
    "sparsegpt-median": Method(
        "sparsegpt with damping 1% of the median diagonal, which huge first-position activations can't swamp",
        "hessian",
        partial(_sparsegpt, damp_by="median"),
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
        An iterator of names and pruned weights, on the layers' devices; each is made when it is asked for, and none is kept.

    Raises:
        UsageError: Unknown method, or a width that is not a multiple of M; at once, for all layers.
        SdbenchError: Statistics that are missing, or NaN or Inf; when the layer's turn comes.
    """
    chosen = lookup("method", method, METHODS)
    for name, linear in linears.items():
        pattern.require_width(linear.in_features, name)
    return ((name, chosen.prune(linear.weight, statistics.get(name), pattern, name)) for name, linear in linears.items())
