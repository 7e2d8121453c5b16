"""An end-to-end run as plots: speed against quality, and layer by layer what calibration misses and what pruning costs."""

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from sdbench.suites import plots
from sdbench.suites.e2e.arms import DENSE
from sdbench.suites.statistics import over_positions, ratio_of_means, share_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (
    ("discrepancy", "discrepancy from the decode Hessian", "log"),
    ("reconstruction_error", "relative error of its decode outputs", "linear"),
)
PREFILLS = ("pruned", "dense")

Row = dict[str, Any]
Span = tuple[float, float, float]
"""A figure and both ends of its interval; all three the same where it has none."""


@plots.style()
def draw(layers: Sequence[Row], title: str) -> "Figure | None":
    """A panel a figure, a line an arm: the median over each block's linears against the block's number.

    Args:
        layers: Rows of ``--diagnose``; layers outside of numbered blocks are left out.
        title: Heading.

    Returns:
        None where no row is left.
    """
    series = {key: points for key, _, _ in PANELS if (points := _by_arm(layers, key))}
    if not series:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5 * len(series), 4.5), layout="constrained")
    figure.suptitle(title)
    shown = [panel for panel in PANELS if panel[0] in series]
    arms = plots.looks(arm for points in series.values() for arm in points)
    for number, (key, label, scale) in enumerate(shown, start=1):
        axes = figure.add_subplot(1, len(shown), number, xlabel="block, median of its linears", ylabel=label, yscale=scale)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if scale == "log":
            plots.log_ticks(axes.yaxis, [value for blocks in series[key].values() for value in blocks.values()])
        for arm, blocks in series[key].items():
            axes.plot(list(blocks), list(blocks.values()), **arms[arm], markersize=4, linewidth=1, label=arm)
    plots.legend_below(figure)
    return figure


def _by_arm(layers: Sequence[Row], key: str) -> dict[str, dict[int, float]]:
    """By arm, the median of a figure over the linears of each block."""
    values: dict[str, dict[int, list[float]]] = {}
    for row in layers:
        block = re.search(r"\.(\d+)\.", row["layer"])
        if block and row.get(key) is not None:
            values.setdefault(row["arm"], {}).setdefault(int(block[1]), []).append(row[key])
    return {arm: {block: median(found) for block, found in sorted(blocks.items())} for arm, blocks in values.items()}


@plots.style()
def draw_speed_quality(arms: Sequence[Row], fidelity: Sequence[Row]) -> "Figure | None":
    """A point an arm, decode rate over quality, up and to the right being better; answer match and KL have a panel each.

    Bars are p20 to p80 of the rate, Wilson's 95% interval of the answer match, and a 95% bootstrap interval over questions of the KL. What
    has a rate and no quality is a horizontal line. Where no arm has a rate (``--fidelity-only``) the KL stands alone, a line an arm.

    Args:
        arms: Rows of the arms.
        fidelity: Rows of ``--fidelity``, one an arm, prefill and question.

    Returns:
        None where no arm has a figure of quality that can be drawn.
    """
    timed = [arm for arm in arms if arm["decode_rate"]]
    match = {arm["arm"]: _match(arm) for arm in timed if arm["answer_match"] is not None and arm["examples"]}
    divergence = _divergence(fidelity)
    rated = {key: span for key, span in divergence.items() if any(arm["arm"] == key[0] for arm in timed)}
    panels: list[Callable[[Axes], None]] = []
    looks = plots.looks(arm["arm"] for arm in arms)
    if match:
        panels.append(lambda axes: _draw_match(axes, timed, match, looks))
    if rated:
        panels.append(lambda axes: _draw_divergence(axes, timed, rated, looks))
    if divergence and not rated:
        panels.append(lambda axes: _draw_divergence_alone(axes, divergence, looks))
    if not panels:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10 if len(panels) > 1 else 7.5, 5), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        panel(figure.add_subplot(1, len(panels), number))
    plots.legend_below(figure, 3)
    return figure


def _match(arm: Row) -> Span:
    # Of generated code some is never run, and not judged.
    share = share_interval(arm["answer_match"], arm.get("graded") or arm["examples"])
    return 100 * share.estimate, 100 * share.low, 100 * share.high


def _divergence(fidelity: Sequence[Row]) -> dict[tuple[str, str], Span]:
    """Mean KL over all positions and its interval, by arm and prefill."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in fidelity:
        groups.setdefault((row["arm"], row["prefill"]), []).append(row)
    found = {}
    for key, rows in groups.items():
        over, positions = over_positions(rows, "kl"), [row["positions"] for row in rows]
        interval = ratio_of_means(over, positions)
        mean = sum(over) / sum(positions)
        found[key] = (mean, interval.low, interval.high) if interval else (mean, mean, mean)
    return found


def _draw_match(axes: "Axes", timed: Sequence[Row], match: Mapping[str, Span], looks: Mapping[str, Any]) -> None:
    axes.set(xlabel="right answers, %", ylabel="tok/s")
    for arm in timed:
        if arm["arm"] in match:
            _point(axes, arm["arm"], match[arm["arm"]], _rate(arm), looks[arm["arm"]])
        else:
            axes.axhline(arm["decode_rate"], color=plots.REFERENCE, linestyle=":", label=f"{arm['arm']}, answers not graded")
    axes.margins(x=0.15)
    axes.set_xlim(right=min(axes.get_xlim()[1], 101))
    _from_zero(axes, timed)


def _draw_divergence(axes: "Axes", timed: Sequence[Row], rated: Mapping[tuple[str, str], Span], looks: Mapping[str, Any]) -> None:
    axes.set(xlabel="KL(dense || pruned), nats: smaller to the right", ylabel="tok/s")
    _scale_divergence(axes, rated)
    axes.invert_xaxis()
    for arm in timed:
        for prefill in PREFILLS:
            if (arm["arm"], prefill) in rated:
                label, span = f"{arm['arm']}, {prefill} prefill", rated[arm["arm"], prefill]
                _point(axes, label, span, _rate(arm), looks[arm["arm"]], hollow=prefill == "dense")
        if arm["arm"] == DENSE:
            axes.axhline(arm["decode_rate"], color=plots.REFERENCE, linestyle=":", label="dense (KL 0)")
    _from_zero(axes, timed)


def _draw_divergence_alone(axes: "Axes", divergence: Mapping[tuple[str, str], Span], looks: Mapping[str, Any]) -> None:
    axes.set(xlabel="KL(dense || pruned), nats: smaller is better")
    _scale_divergence(axes, divergence)
    names = list(dict.fromkeys(arm for arm, _ in divergence))
    for (arm, prefill), span in divergence.items():
        place = names.index(arm) + (0.15 if prefill == "dense" else -0.15)
        _point(axes, f"{arm}, {prefill} prefill", span, (place, place, place), looks[arm], hollow=prefill == "dense")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(0.15)


def _from_zero(axes: "Axes", timed: Sequence[Row]) -> None:
    # A few percent must not look like a gap.
    axes.margins(x=0.15)
    axes.set_ylim(0, 1.15 * max(arm["decode_rate"] for arm in timed))


def _scale_divergence(axes: "Axes", divergence: Mapping[tuple[str, str], Span]) -> None:
    # Pruning methods differ by factors; a KL of 0 has no place on a logarithmic axis.
    if all(low > 0 for _, low, _ in divergence.values()):
        axes.set_xscale("log")
        plots.log_ticks(axes.xaxis, [end for span in divergence.values() for end in span])


def _rate(arm: Row) -> Span:
    rate = float(arm["decode_rate"])
    spread = arm.get("decode_rate_spread") or {"p20": rate, "p80": rate}
    return rate, spread["p20"], spread["p80"]


def _point(axes: "Axes", label: str, across: Span, up: Span, look: Mapping[str, Any], hollow: bool = False) -> None:
    (x, left, right), (y, bottom, top) = across, up
    axes.hlines(y, left, right, color=look["color"], linewidth=1)
    axes.vlines(x, bottom, top, color=look["color"], linewidth=1)
    axes.plot([x], [y], **look, linestyle="none", markersize=8, markerfacecolor=plots.PAPER if hollow else look["color"], label=label)
