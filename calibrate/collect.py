"""What the inputs of each linear look like: sums of squares (Wanda) or Hessians (SparseGPT), over the rows of explicit phases."""

from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from sdbench.calibrate.numerics import full_float32
from sdbench.engine.phase import PhaseName, current_phase
from sdbench.errors import SdbenchError

StatisticsKind = Literal["sum_sq", "hessian"]


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """The inputs of one linear, summed over the rows that counted and divided by their number (by their weight, where they have weights).

    Args:
        name: Dotted name of the layer.
        rows: Rows (token positions) that counted.
        sum_sq: [in] float32, ``sum over rows of x_j^2``, divided by ``rows``.
        hessian: [in, in] float32, ``X^T X`` divided by ``rows``, with ``sum_sq`` on its diagonal; None where only ``sum_sq`` was collected.
    """

    name: str
    rows: int
    sum_sq: Tensor
    hessian: Tensor | None = None


class Collector:
    """Records the inputs of linears while it is open as a context manager.

    Every forward must run inside `sdbench.engine.phase.phase`. A forward of a phase outside ``phases`` leaves no trace; of the others,
    only the rows that the phase says count: no padding, no finished reply. Sums are float32 on the layer's device, so a Hessian costs
    4 * in^2 bytes a layer. An opened collector can be opened again and goes on counting.

    Args:
        model: The model that holds the linears.
        linears: Layers to watch, by dotted name.
        phases: Phases that count: ``"prefill"``, ``"decode"`` or both.
        kind: ``"sum_sq"`` or ``"hessian"``.

    Raises:
        SdbenchError: No or an unknown phase, an unknown kind, or a linear that isn't part of the model.
    """

    def __init__(self, model: Any, linears: dict[str, nn.Linear], phases: Collection[PhaseName], kind: StatisticsKind):
        if not phases or set(phases) - set(get_args(PhaseName)):
            raise SdbenchError(f"phases {sorted(phases)}: name prefill, decode or both")
        if kind not in get_args(StatisticsKind):
            raise SdbenchError(f"statistics kind {kind!r}: choose sum_sq or hessian")
        members = set(model.modules())
        for name, linear in linears.items():
            if linear not in members:
                raise SdbenchError(f"layer {name}: not a part of this {type(model).__name__}, so no forward would reach it")
        self._linears = dict(linears)
        self._phases = frozenset(phases)
        self._kind = kind
        self._rows = dict.fromkeys(linears, 0)
        self._weights = dict.fromkeys(linears, 0.0)
        self._sums: dict[str, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        for name, linear in self._linears.items():
            if name not in self._sums:
                shape = (linear.in_features,) * (2 if self._kind == "hessian" else 1)
                self._sums[name] = torch.zeros(shape, dtype=torch.float32, device=linear.weight.device)
            self._hooks.append(linear.register_forward_pre_hook(lambda _, inputs, name=name: self._record(name, inputs[0])))
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def statistics(self) -> dict[str, LayerStatistics]:
        """What was recorded, by layer, normalised by rows.

        Raises:
            SdbenchError: No row reached a layer, or its inputs held NaN or Inf (or their squares overflowed).
        """
        return {name: self._statistics(name) for name in self._linears}

    @torch.no_grad()
    def _record(self, name: str, inputs: Tensor) -> None:
        """Adds one forward's inputs [..., in] to the layer's sums."""
        running = current_phase()
        if running is None:
            raise SdbenchError(
                f"layer {name}: a forward outside of any phase; wrap it in sdbench.engine.phase.phase('prefill' or 'decode')"
            )
        if running.name not in self._phases:
            return
        rows = inputs.reshape(-1, inputs.shape[-1])
        weights: Tensor | None = None
        if running.rows is not None:
            counts = running.rows.reshape(-1).to(rows.device)
            # Layers that see a re-ordered or routed selection of the tokens (mixture-of-experts) can't tell which rows count.
            if len(counts) != len(rows):
                raise SdbenchError(
                    f"layer {name}: the forward feeds it {len(rows)} rows, but the phase marks {len(counts)}; leave it out with --ignore"
                )
            if counts.dtype != torch.bool:
                counts, weights = counts != 0, counts[counts != 0]
            rows = rows[counts]
        self._rows[name] += len(rows)
        self._weights[name] += len(rows) if weights is None else float(weights.sum())
        rows = rows.float()
        if weights is not None:
            rows = rows * weights.sqrt()[:, None]
        if self._kind == "sum_sq":
            self._sums[name] += rows.square().sum(dim=0)
        else:
            with full_float32():
                self._sums[name].addmm_(rows.T, rows)

    def _statistics(self, name: str) -> LayerStatistics:
        rows = self._rows[name]
        if rows == 0:
            raise SdbenchError(
                f"layer {name}: no row reached it in calibration (phases that count: {', '.join(sorted(self._phases))}); "
                "use more or other examples, or leave it out with --ignore"
            )
        total = self._sums[name] / self._weights[name]
        sum_sq = total if self._kind == "sum_sq" else total.diagonal()
        finite = sum_sq.isfinite()
        if not bool(finite.all()):
            column = int((~finite).nonzero()[0])
            raise SdbenchError(
                f"layer {name}: NaN or Inf (or a square past float32) among the inputs of column {column} in calibration; "
                "use bf16 or fp32 instead of fp16, or other examples"
            )
        return LayerStatistics(name, rows, sum_sq, total if self._kind == "hessian" else None)
