"""``sdbench report --html`` as a user calls it."""

import sys

import pytest

from .test_report_cli import ASKED, E2E, ROWS, arm

pytest.importorskip("matplotlib")


def test_a_page_beside_the_table(sdbench, saved_run, tmp_path):
    saved_run("one", "kernels", ASKED, ROWS)
    saved_run("two", "e2e", E2E, [arm("dense", 100.0), arm("decode", 125.0, decode_rate_note="CPU rates <say> nothing")])
    plain = sdbench("report", "one", "two")
    done = sdbench("report", "one", "two", "--html", "page.html")
    assert (done.code, done.out, done.err) == (0, plain.out, "wrote page.html\n")
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<article") == 2 and page.count("<svg") == 2
    assert "2.97×" in page and "1.25×" in page
    assert "<small>125.0 tok/s, 3 of 4 right; CPU rates &lt;say&gt; nothing</small>" in page


def test_every_command_with_a_report_has_a_page(sdbench, saved_run, tmp_path):
    saved_run("tuned", "tune", ASKED, ROWS)
    assert sdbench("report", "tuned", "--html", "page.html").code == 0
    assert "spmv/lane_row" in (tmp_path / "page.html").read_text()


def test_a_pruning_run(sdbench, saved_run, tmp_path):
    """What the method reports of its layers, once where it is the same of several, and what the run took; CSV has a line each."""
    told = {"rows": 57, "damp": 0.01, "damp_used": 0.1, "damp_by": "mean", "dead_columns": 3}
    raised = told | {"damp_used": 1.0}
    reports = {"model.up_proj": told, "model.down_proj": raised, "model.gate_proj": told}
    layers = [{"record": "layer", "layer": name, "report": report} for name, report in reports.items()]
    speed = {"tokens_per_second": None}
    result = {
        "record": "result", "output": "out", "bytes": 1250, "dense_bytes": 2000, "peak_bytes": 5e8, "calibration": speed,
        "seconds": {"load": 1.0, "pruning": 2.5},
    }  # fmt: skip
    asked = {"model": "demo", "pattern": "2:4", "method": "sparsegpt", "dtype": "float32"}
    saved_run("run", "prune", asked, [{"record": "source", "sha256": "0"}, *layers, result])
    out = sdbench("report", "run", "--html", "page.html").out
    lines = [line.split() for line in out.splitlines()]
    assert ["layer", "rows", "damp", "used", "by", "columns"] in lines
    at = lines.index(["2", "layers", "57", "0.01", "0.1", "mean", "3"])
    assert lines[at + 1] == ["model.down_proj", "57", "0.01", "1", "mean", "3"]
    assert "model.up_proj" not in out and "model.gate_proj" not in out
    assert "out: 1,250 bytes of weights, 0.625 of the dense model's\n" in out and "seconds: load 1.0, pruning 2.5\n" in out
    assert "model.down_proj" in (tmp_path / "page.html").read_text()
    csv = sdbench("report", "run", "--format", "csv").out.splitlines()
    assert csv[1] == '"model.up_proj",57,0.01,0.1,"mean",3' and len(csv) == 1 + 3
    saved_run("magnitude", "prune", asked | {"method": "magnitude"}, [{"record": "layer", "layer": "model.up_proj", "report": {}}])
    assert "model.up_proj" in sdbench("report", "magnitude").out
    saved_run("bad", "prune", asked, [{"record": "layer", "layer": "model.up_proj"}])
    sdbench("report", "bad").refuses(1, "a row of kind 'layer' with a fault (report: Field required)")


def test_a_file_that_is_there_is_not_replaced(sdbench, saved_run, tmp_path):
    folder = saved_run("run", "kernels", ASKED, ROWS)
    before = (folder / "run.json").read_bytes()
    sdbench("report", "run", "--html", "run/run.json", "--force").refuses(
        2, "--html run/run.json is a file of the run itself; name another"
    )
    assert (folder / "run.json").read_bytes() == before
    (tmp_path / "page.html").write_text("mine")
    sdbench("report", "run", "--html", "page.html").refuses(2, "--html page.html is there already; --force replaces it")
    assert (tmp_path / "page.html").read_text() == "mine"
    assert sdbench("report", "run", "--html", "page.html", "--force").code == 0
    sdbench("report", "run", "--html", "none/page.html").refuses(1, "cannot write none/page.html: No such file")
    sdbench("report", "run", "--html", "same", "--output", "same").refuses(2, "--html and --output name one file, same")


def test_without_matplotlib(sdbench, saved_run, tmp_path, monkeypatch):
    saved_run("run", "kernels", ASKED, ROWS)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    sdbench("report", "run", "--html", "page.html").refuses(1, "--html needs matplotlib", "pip install 'sdbench[plots]'")
    assert not (tmp_path / "page.html").exists()
    assert sdbench("report", "run").code == 0


def test_a_page_needs_no_torch(saved_run, heavy_imports) -> None:
    folder = saved_run("run", "kernels", ASKED, ROWS)
    done = heavy_imports(folder.parent, "report", "run", "--html", "page.html")
    assert (done.returncode, done.stderr) == (0, "wrote page.html\n[]\n") and (folder.parent / "page.html").exists()
