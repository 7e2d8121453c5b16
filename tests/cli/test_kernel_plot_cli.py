"""``sdbench kernels --plot`` as a user calls it. Without a GPU there are no timings, so figures are put into a finished run's rows."""

import sys

import pytest

from sdbench.results import read_jsonl, strict_json

SMALL = ["kernels", "--shapes", "8x32", "--device", "cpu", "--variant", "reference"]


def put_timings(run) -> None:
    rows = read_jsonl(run / "rows.jsonl")
    for row in rows:
        if row["record"] == "result":
            row |= {"us": {"p20": 2.0, "p50": 2.0, "p80": 2.0}, "gbps": 1000.0, "roofline": 0.5}
    (run / "rows.jsonl").write_text("".join(strict_json(row) + "\n" for row in rows))


def test_a_plot_of_the_runs_rows(sdbench, tmp_path):
    call = (*SMALL, "--output", "run", "--plot", "run/plots/roofline.svg")
    first = sdbench(*call)
    assert first.code == 5
    assert first.err.splitlines()[-1] == "sdbench: error: nothing to plot in run/plots/roofline.svg: no row has a timing"
    assert "reference" in first.out  # the table is there all the same
    assert not (tmp_path / "run/plots").exists()
    put_timings(tmp_path / "run")
    assert sdbench(*call).code == 0
    assert (tmp_path / "run/plots/roofline.svg").read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("plot.jpg", 2, "--plot plot.jpg: the suffix chooses the format; write one of .png, .svg, .pdf"),
        ("plot", 2, "the suffix chooses the format"),
        ("folder.png", 2, "--plot folder.png is a folder"),
        ("file/plot.png", 1, "--plot file/plot.png: cannot write to the folder"),
        ("/proc/plot.png", 1, "--plot /proc/plot.png: cannot write to the folder /proc"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_before_the_run(name, code, message, sdbench, tmp_path):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    sdbench(*SMALL, "--output", "run", "--plot", name).refuses(code, message)
    assert not (tmp_path / "run").exists()


def test_without_matplotlib(sdbench, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    sdbench(*SMALL, "--output", "run", "--plot", "plot.png").refuses(1, "--plot needs matplotlib", "pip install 'sdbench[plots]'")
    assert not (tmp_path / "run").exists()
