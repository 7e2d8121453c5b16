"""Plots of end-to-end and decode runs, by their artists."""

from typing import Any

import pytest

pytest.importorskip("matplotlib")

from sdbench.suites import plots
from sdbench.suites.decode.plot import draw_contexts, draw_profiles
from sdbench.suites.e2e.plot import draw_speed_quality
from sdbench.suites.statistics import share_interval


def arm(name: str, rate: float | None, match: int | None = None, **more: Any) -> dict[str, Any]:
    spread = {"p20": rate - 1, "p50": rate, "p80": rate + 1} if rate else None
    return {"arm": name, "decode_rate": rate, "decode_rate_spread": spread, "answer_match": match, "examples": 40, **more}


def fidelity(name: str, prefill: str, *kl: float) -> list[dict[str, Any]]:
    return [{"arm": name, "prefill": prefill, "kl": one, "positions": 10 + 10 * number} for number, one in enumerate(kl)]


def points(axes: Any) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def test_answers_and_rates_with_their_intervals() -> None:
    arms = [arm("dense", 100.0, 40), arm("decode", 140.0, 30), arm("odd", 120.0), arm("slow", None, 39)]
    figure = draw_speed_quality(arms, [])
    assert figure is not None
    (axes,) = figure.axes
    found = points(axes)
    assert (found["dense"], found["decode"]) == ([(100, 100)], [(75, 140)])
    assert [y for _, y in found["odd, answers not graded"]] == [120, 120]
    assert "slow" not in found
    across = [tuple(path.vertices[:, 0]) for lines in axes.collections for path in lines.get_paths() if len({*path.vertices[:, 1]}) == 1]
    low, high = share_interval(30, 40).low, share_interval(30, 40).high
    assert (pytest.approx(100 * low), pytest.approx(100 * high)) in across
    assert axes.get_ylim()[0] == 0


def test_only_graded_answers_count() -> None:
    figure = draw_speed_quality([arm("dense", 100.0, 30, graded=30), arm("decode", 140.0, 10, graded=20)], [])
    assert figure is not None
    found = points(figure.axes[0])
    assert (found["dense"], found["decode"]) == ([(100, 100)], [(50, 140)])


def test_divergence_beside_answers() -> None:
    arms = [arm("dense", 100.0, 40), arm("decode", 140.0, 30)]
    figure = draw_speed_quality(arms, [*fidelity("decode", "pruned", 0.1, 0.4), *fidelity("decode", "dense", 0.2, 0.2)])
    assert figure is not None
    _, right = figure.axes
    assert points(right)["decode, pruned prefill"] == [(pytest.approx((0.1 * 10 + 0.4 * 20) / 30), 140)]
    assert points(right)["decode, dense prefill"] == [(pytest.approx(0.2), 140)]
    assert right.get_xlim()[0] > right.get_xlim()[1] and right.get_xscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()].count("decode") == 1


def test_fidelity_alone_has_no_rate() -> None:
    rows = [*fidelity("teacher-forced", "pruned", 0.3, 0.3), *fidelity("decode", "pruned", 0.0, 0.0)]
    figure = draw_speed_quality([arm("dense", 100.0, 40), arm("teacher-forced", None), arm("decode", None)], rows)
    assert figure is not None
    _, axes = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["teacher-forced", "decode"]
    assert points(axes)["decode, pruned prefill"][0][0] == 0 and axes.get_xscale() == "linear"


def test_nothing_to_judge() -> None:
    assert draw_speed_quality([], []) is None
    assert draw_speed_quality([arm("dense", 100.0), arm("decode", None, 3)], []) is None
    assert draw_contexts([{"decode_rate": None}]) is None and draw_profiles([{"profile": None}]) is None


def decoded(name: str, path: str, context: int, rate: float | None, profile: dict[str, Any] | None = None) -> dict[str, Any]:
    spread = {"p20": rate - 1, "p50": rate, "p80": rate + 1} if rate else None
    return {"arm": name, "path": path, "context": context, "decode_rate": spread, "ceiling": rate and 2 * rate, "profile": profile}


def test_contexts() -> None:
    rows = [
        decoded("dense", "fused", 2048, 90.0),
        decoded("dense", "fused", 128, 100.0),
        decoded("dense", "eager", 128, 10.0),
        decoded("2:4", "fused", 128, 140.0),
        decoded("2:4", "fused", 2048, None),
    ]
    figure = draw_contexts(rows)
    assert figure is not None
    (axes,) = figure.axes
    assert points(axes) == {"dense, fused": [(128, 100), (2048, 90)], "dense, eager": [(128, 10)], "2:4": [(128, 140)]}
    dotted = [list(line.get_ydata()) for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert dotted == [[200, 180]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["128", "2048"]


def test_profiles_begin_with_what_pruning_changes() -> None:
    kinds = {"attention": {"us": 5.0, "launches": 2.0}, "pruned products": {"us": 7.0, "launches": 4.0}}
    figure = draw_profiles([decoded("2:4", "fused", 128, 1.0, kinds), decoded("dense", "fused", 128, 1.0, {"attention": {"us": 6.0}})])
    assert figure is not None
    (axes,) = figure.axes
    bars = {bars.get_label(): [(bar.get_x(), bar.get_width()) for bar in bars] for bars in axes.containers}
    assert bars == {"pruned products": [(0, 7), (0, 0)], "attention": [(7, 5), (0, 6)]}


def test_names_are_no_formulas_and_differ_without_colour() -> None:
    figure = draw_contexts([decoded("$a_b$ _^ 😀", "fused", 128, 1.0)])
    assert figure is not None and figure.legends[0].get_texts()[0].get_text() == "$a_b$ _^ 😀"
    assert not figure.legends[0].get_texts()[0].get_parse_math()
    looks = plots.looks(f"arm {number}" for number in range(7))
    assert len({look["marker"] for look in looks.values()}) == 7


@pytest.mark.parametrize(("low", "high"), [(5, 9), (1, 30), (1e-6, 0.2), (0.01, 100)])
def test_ticks_of_a_logarithmic_axis_are_some_and_not_too_many(low: float, high: float) -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot(xscale="log", xlim=(low, high))
    plots.log_ticks(axes.xaxis, [0.0, low, high])
    assert 2 <= sum(low <= tick <= high for tick in axes.get_xticks()) <= 12
