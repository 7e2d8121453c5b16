"""``sdbench kernels --plot`` as a user calls it."""

import sys

import pytest

SMALL = ["kernels", "--shapes", "8x32", "--variant", "reference", "--variant", "lane_row"]


def test_a_plot_of_the_runs_rows(sdbench, timed_run, tmp_path):
    call = (*SMALL, "--output", "run", "--plot", "run/plots/roofline.svg")
    done = sdbench(*call)
    assert done.code == 0, done.err
    assert (tmp_path / "run/plots/roofline.svg").read_text().count("<svg") == 1
    (tmp_path / "run/plots/roofline.svg").unlink()
    timed_run(us=None, gbps=None)
    untimed = sdbench(*call)
    assert untimed.code == 5
    assert untimed.err.splitlines()[-1] == "sdbench: error: nothing to plot in run/plots/roofline.svg: no row has a timing"
    assert "reference" in untimed.out  # the table is there all the same
    assert not (tmp_path / "run/plots/roofline.svg").exists()


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
