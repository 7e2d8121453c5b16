"""What the inputs of each linear look like: sums of squares (Wanda) or Hessians (SparseGPT), over the rows of explicit phases."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from sdbench.calibrate.numerics import full_float32
from sdbench.engine.phase import Phase, PhaseName, current_phase
from sdbench.errors import SdbenchError

StatisticsKind = Literal["sum_sq", "hessian"]

TENSOR_CORES = (torch.bfloat16, torch.float16)
"""Products of two such numbers are exact in float32: what a product of matrices loses on them is what its sums lose."""

_ROWS_AT_ONCE = 1024
"""Matrix units cut off what their float32 sums cannot hold, always towards zero: over 8191 rows that was 2 to 4e-5 of the result on an
H200, ten times what float32 loses, and it grows with the number of rows."""


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


@dataclass(frozen=True, eq=False)
class InputSums:
    """The inputs of one linear, summed over the rows that counted: what processes that share the examples can add up.

    Args:
        name: Dotted name of the layer.
        rows: Rows (token positions) that counted.
        weight: Sum of their weights; ``rows`` where they have none.
        total: float32, [in] of ``sum over rows of x_j^2``, or [in, in] of ``X^T X``. Layers that are fed the same tensor hold the same one.
    """

    name: str
    rows: int
    weight: float
    total: Tensor

    def statistics(self) -> LayerStatistics:
        """The sums divided by the rows' weight.

        Raises:
            SdbenchError: The inputs held NaN or Inf, or their squares overflowed.
        """
        mean = self.total / self.weight
        sum_sq = mean if mean.ndim == 1 else mean.diagonal()
        finite = sum_sq.isfinite()
        if not bool(finite.all()):
            column = int((~finite).nonzero()[0])
            raise SdbenchError(
                f"layer {self.name}: NaN or Inf (or a square past float32) among the inputs of column {column} in calibration; "
                "use bf16 or fp32 instead of fp16, or other examples"
            )
        return LayerStatistics(self.name, self.rows, sum_sq, mean if mean.ndim == 2 else None)


def statistics_of(sums: Mapping[str, InputSums]) -> dict[str, LayerStatistics]:
    """Statistics by layer; those of layers with one and the same total share their tensors too.

    Raises:
        SdbenchError: See `InputSums.statistics`.
    """
    made: dict[int, LayerStatistics] = {}
    found = {}
    for name, layer in sums.items():
        if id(layer.total) not in made:
            made[id(layer.total)] = layer.statistics()
        found[name] = replace(made[id(layer.total)], name=name)
    return found


def add_rows(total: Tensor, rows: Tensor, weights: Tensor | None = None) -> None:
    """Adds the rows' squares, or their products, to a sum, in place.

    Args:
        total: float32, [in] or [in, in].
        rows: [rows, in], floating point.
        weights: [rows] float32, what each row counts; None for 1.
    """
    if total.ndim == 2 and rows.is_cuda and rows.dtype in TENSOR_CORES and weights is None:
        # More than ten times as fast as float32 without TF32, and as exact: see `TENSOR_CORES`.
        for part in rows.split(_ROWS_AT_ONCE):
            total += torch.mm(part.T, part, out_dtype=torch.float32)
        return
    rows = rows.float()
    if weights is not None:
        rows = rows * weights.sqrt()[:, None]
    if total.ndim == 1:
        total += rows.square().sum(dim=0)
    else:
        with full_float32():
            total.addmm_(rows.T, rows)


@dataclass(frozen=True, eq=False)
class _Selection:
    """The rows of a phase that count, looked up once a forward: reading a mask back for each layer would stop the device each time."""

    positions: int | None
    index: Tensor | None
    weights: Tensor | None
    rows: int | None
    weight: float

    @classmethod
    def of(cls, running: Phase, device: torch.device) -> Self:
        if running.rows is None:
            return cls(None, None, None, None, 0.0)
        counts = running.rows.reshape(-1)
        places = counts.nonzero().flatten()
        weights = counts[places] if counts.dtype != torch.bool else None
        weight = float(len(places)) if weights is None else float(weights.sum())
        index = places.to(device) if len(places) < len(counts) else None
        return cls(len(counts), index, weights if weights is None else weights.to(device), len(places), weight)


class Collector:
    """Records the inputs of linears while it is open as a context manager.

    Every forward must run inside `sdbench.engine.phase.phase`. A forward of a phase outside ``phases`` leaves no trace; of the others,
    only the rows that the phase says count: no padding, no finished reply. A mask that lies on the CPU is never read back from the device.
    Sums are float32 on the layer's device, so a Hessian costs 4 * in^2 bytes; linears that are fed one and the same tensor, as queries,
    keys and values are, share it. An opened collector can be opened again and goes on counting.

    Args:
        model: The model that holds the linears.
        linears: Layers to watch, by dotted name.
        phases: Phases that count: ``"prefill"``, ``"decode"`` or both.
        kind: ``"sum_sq"`` or ``"hessian"``.

    Raises:
        SdbenchError: No or an unknown phase, an unknown kind, or a linear that isn't part of the model.
    """

    def __init__(self, model: Any, linears: Mapping[str, nn.Linear], phases: Collection[PhaseName], kind: StatisticsKind):
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
        self._leaders: dict[str, str] = {}
        self._rows: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        self._totals: dict[str, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._forget()

    def __enter__(self) -> Self:
        for name, linear in self._linears.items():
            self._hooks.append(linear.register_forward_pre_hook(lambda _, inputs, name=name: self._record(name, inputs[0])))
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._forget()

    def sums(self) -> dict[str, InputSums]:
        """What was recorded, by layer.

        Raises:
            SdbenchError: No row reached a layer.
        """
        found = {}
        for name in self._linears:
            leader = self._leaders.get(name, name)
            if not self._rows.get(leader):
                raise SdbenchError(
                    f"layer {name}: no row reached it in calibration (phases that count: {', '.join(sorted(self._phases))}); "
                    "use more or other examples, or leave it out with --ignore"
                )
            found[name] = InputSums(name, self._rows[leader], self._weights[leader], self._totals[leader])
        return found

    def statistics(self) -> dict[str, LayerStatistics]:
        """The same normalised by rows.

        Raises:
            SdbenchError: No row reached a layer, or its inputs held NaN or Inf (or their squares overflowed).
        """
        return statistics_of(self.sums())

    def _forget(self) -> None:
        """Lets go of the last forward's tensors."""
        self._phase: Phase | None = None
        self._device: torch.device | None = None
        self._selection = _Selection(None, None, None, None, 0.0)
        self._latest: tuple[Tensor, int, str] | None = None

    @torch.no_grad()
    def _record(self, name: str, inputs: Tensor) -> None:
        """Adds one forward's inputs [..., in] to the layer's sums."""
        running = current_phase()
        if running is None:
            raise SdbenchError(
                f"layer {name}: a forward outside of any phase; wrap it in sdbench.engine.phase.phase('prefill' or 'decode')"
            )
        if running.name not in self._phases or self._counted_already(name, inputs):
            return
        # A model may be spread over several devices.
        if running is not self._phase or inputs.device != self._device:
            self._phase, self._device, self._selection = running, inputs.device, _Selection.of(running, inputs.device)
        chosen = self._selection
        rows = inputs.reshape(-1, inputs.shape[-1])
        # Layers that see a re-ordered or routed selection of the tokens (mixture-of-experts) can't tell which rows count.
        if chosen.positions not in (None, len(rows)):
            raise SdbenchError(
                f"layer {name}: the forward feeds it {len(rows)} rows, but the phase marks {chosen.positions}; leave it out with --ignore"
            )
        if chosen.index is not None:
            rows = rows.index_select(0, chosen.index)
        if name not in self._totals:
            shape = (inputs.shape[-1],) * (2 if self._kind == "hessian" else 1)
            self._totals[name] = torch.zeros(shape, dtype=torch.float32, device=inputs.device)
        self._rows[name] = self._rows.get(name, 0) + len(rows)
        self._weights[name] = self._weights.get(name, 0.0) + (len(rows) if chosen.rows is None else chosen.weight)
        add_rows(self._totals[name], rows, chosen.weights)

    def _counted_already(self, name: str, inputs: Tensor) -> bool:
        """Whether another linear was fed this very tensor just before; the first forward that counts settles who shares with whom."""
        version = 0 if inputs.is_inference() else inputs._version
        same = self._latest is not None and self._latest[0] is inputs and self._latest[1] == version
        latest = self._latest[2] if self._latest is not None and same else name
        leader = self._leaders.setdefault(name, latest)
        if leader == name:
            self._latest = (inputs, version, name)
            return False
        if leader != latest:
            raise SdbenchError(
                f"layer {name}: shared its input with {leader} in the first forward and not in a later one; leave it out with --ignore"
            )
        return True
