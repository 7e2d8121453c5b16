"""The roofline plot, on the rows of a committed run: what is drawn, by its artists."""

from pathlib import Path
from typing import Any

import pytest

from sdbench.results import read_jsonl
from sdbench.suites.kernels.plot import ROOFLINE, draw
from sdbench.suites.plots import save_plot

pytest.importorskip("matplotlib")

RUN = Path(__file__).parents[2] / "results/nvidia-h200/kernels/five-patterns/rows.jsonl"


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """The committed run, whatever its newest figures are."""
    return [row for row in read_jsonl(RUN) if row["record"] == "result"]


def made(kernel: str, variant: str, pattern: str | None, layer: str, megabytes: float, us: float | None, roofline: float) -> dict[str, Any]:
    """A row with what the plot reads of it."""
    times = {"p20": us, "p50": us, "p80": us} if us else None
    shape = [{"o": 1, "down": 2}[layer], 32]
    kind = {"kernel": kernel, "variant": variant, "pattern": pattern, "layer": layer, "of_shape": shape, "dtype": "bf16"}
    return kind | {"outcome": "correct", "bytes": int(megabytes * 1e6), "us": times, "roofline": roofline if us else None}


MADE = [
    made("dense", "linear", None, "o", 20, 10.0, 0.6),
    made("dense", "gemv", None, "o", 20, 8.0, 0.75),
    made("spmv", "lane_row", "2:4", "o", 11, 5.0, 0.8),
    made("spmv", "lane_row_nibble", "2:4", "o", 11, 4.0, 1.0),
    made("spmv", "portable", "2:4", "o", 11, 16.0, 0.25),
    made("spmv", "lane_row", "1:4", "o", 6, 3.0, 0.9),
    made("dense", "linear", None, "down", 50, 18.0, 2 / 3),
    made("dense", "gemv", None, "down", 50, 20.0, 0.6),
    made("spmv", "lane_row", "2:4", "down", 28, 9.0, 0.8),
]
"""Reading alone takes 2.7 us for 6 MB, 4 for 11, 6 for 20, 7.2 for 28 and 12 for 50."""


def series(figure: Any) -> dict[str, Any]:
    """Lines and points by their label in the legend."""
    (axes,) = figure.axes
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


def drawn(line: Any) -> set[tuple[float, float]]:
    return set(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_a_point_a_shape_for_each_baseline_and_pattern() -> None:
    figure = draw(MADE, "NVIDIA H200")
    assert figure is not None
    assert {label: drawn(line) for label, line in series(figure).items() if label != ROOFLINE} == {
        "F.linear": {(20, 10), (50, 18)},
        "fastest dense": {(20, 8), (50, 18)},  # which may be F.linear
        "fastest SpMV 2:4": {(11, 4), (28, 9)},
        "fastest SpMV 1:4": {(6, 3)},
    }
    (axes,) = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(series(figure))
    assert {text.get_text(): text.xy for text in axes.texts} == {"o": (20, 10), "down": (50, 18)}
    assert axes.get_title().startswith("NVIDIA H200, bf16")
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel()) == ("log", "log", "MB read a call")


def test_the_roofline_is_the_bandwidth_that_the_run_measured() -> None:
    line = series(draw(MADE, ""))[ROOFLINE]
    assert list(line.get_xdata()) == [6, 11, 20, 28, 50]
    assert list(line.get_ydata()) == pytest.approx([2.7, 4, 6, 7.2, 12])


def test_other_baselines_are_series_of_their_own_and_what_has_no_time_is_left_out() -> None:
    others = [
        made("quantized", "int8", None, "o", 10, 5.0, 0.7),
        made("quantized", "int8", None, "down", 25, 9.5, 0.7),
        made("semi_structured", "cusparselt", "2:4", "o", 11.5, 31.0, 0.1),
        made("spmv", "lane_row", "1:4", "down", 15, None, 0.0),
        made("spmv", "lane_row", "4:8", "o", 11, 0.5, 1.0) | {"outcome": "incorrect"},
        made("spmv_partial", "lane_row", "2:4", "o", 11, 3.5, 1.1),
    ]
    found = series(draw(MADE + others, ""))
    assert drawn(found["int8"]) == {(10, 5), (25, 9.5)}
    assert drawn(found["cusparselt 2:4"]) == {(11.5, 31)}
    assert drawn(found["fastest SpMV 1:4"]) == {(6, 3)}
    assert set(found) == set(series(draw(MADE, ""))) | {"int8", "cusparselt 2:4"}


def test_the_committed_run(rows: list[dict[str, Any]]) -> None:
    found = series(draw(rows, "NVIDIA H200"))
    shapes, patterns = {tuple(row["of_shape"]) for row in rows}, dict.fromkeys(row["pattern"] for row in rows if row["kernel"] == "spmv")
    assert len(shapes) == 4 and len(patterns) >= 4
    for label in ("F.linear", "fastest dense", *(f"fastest SpMV {pattern}" for pattern in patterns)):
        assert len(drawn(found[label])) == 4, label
    # Dependent launch hides a part of the ramp that reading alone pays, so that a kernel may be a little faster than the line.
    reading = dict(drawn(found[ROOFLINE]))
    assert all(us > 0.8 * reading[size] for line in found.values() for size, us in drawn(line))


def test_series_differ_without_colour(rows: list[dict[str, Any]]) -> None:
    found = series(draw(rows, ""))
    looks = [(line.get_marker(), line.get_markerfacecolor() == "none", line.get_linestyle()) for line in found.values()]
    assert len(set(looks)) == len(looks)
    assert all((line.get_markerfacecolor() == "none") == ("SpMV" in label) for label, line in found.items())


def test_nothing_to_plot(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    untimed = [row | {"us": None, "gbps": None, "roofline": None} for row in rows]
    assert not save_plot(tmp_path / "plot.png", draw(untimed, "no GPU"))
    assert not save_plot(tmp_path / "plot.png", draw([], "no GPU"))
    assert list(tmp_path.iterdir()) == []


def test_a_saved_plot_is_not_blank(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    from matplotlib.image import imread

    assert save_plot(tmp_path / "plot.png", draw(rows, "NVIDIA H200"))
    image = imread(tmp_path / "plot.png")
    assert image.shape[:2] == (900, 1500)
    inked = (image[..., :3] < 0.9).any(axis=-1)
    assert 0.005 < inked.mean() < 0.5
