"""A GPU whose memory does not reach: a row where one arm failed, one line where the run did."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sdbench.cli import options
from sdbench.results import RunRecord
from sdbench.suites.e2e import runner

from .short import SHORT


def fail(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB.\nGPU 0 has")


E2E = ("e2e", "--device", "cpu", "--model", "demo")
KEPT = "or a larger GPU; what is finished is in run"


@pytest.mark.parametrize(
    ("command", "step", "advice"),
    [
        (E2E, "sdbench.suites.e2e.suite.calibrate", "use a smaller --batch-size for calibration replies, fewer --max-tokens"),
        (("decode", "--device", "cpu", "--model", "demo"), "sdbench.suites.decode.suite.select_linears", "use a shorter --context"),
        (("kernels", "--device", "cpu", "--shapes", "8x32"), "sdbench.suites.kernels.suite.run", "use smaller --shapes"),
        (("prune", "--device", "cpu", "--model", "demo"), "sdbench.suites.prune.calibrate", "use a smaller --batch-size for replies"),
    ],
    ids=["e2e", "decode", "kernels", "prune"],
)
def test_outside_of_arms_it_is_one_line(command, step, advice, sdbench, monkeypatch):
    monkeypatch.setattr(step, fail)
    done = sdbench(*command, "--output", "run")
    done.refuses(1, "sdbench: error: out of GPU memory (CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has); ", advice, KEPT)
    if command[0] != "prune":
        assert RunRecord.model_validate_json(Path("run/run.json").read_bytes()).outcome == "failed"


def test_without_the_dense_answers_there_is_no_run(sdbench, monkeypatch):
    monkeypatch.setattr(runner, "answer_runs", fail)
    sdbench(*E2E, *SHORT, "--method", "magnitude", "--output", "run").refuses(1, "out of GPU memory (CUDA out of memory", KEPT)


def test_without_a_run_directory_nothing_is_kept(sdbench, monkeypatch):
    monkeypatch.setattr("sdbench.suites.decode.suite.select_linears", fail)
    sdbench("decode", "--device", "cpu", "--model", "demo").refuses(1, "or a larger GPU; without --output nothing is kept")


def test_every_command_that_keeps_a_run_says_what_to_do():
    source = "".join(file.read_text() for file in Path(options.__file__).parent.glob("*.py"))
    assert {*re.findall(r'run_directory\(output, "(\w+)"', source), "prune"} == set(options.MORE_ROOM)


def test_the_other_arms_are_shown(sdbench, checkpoint, monkeypatch):
    monkeypatch.setattr(runner, "round_linears", fail)
    done = sdbench("e2e", "--model", checkpoint(), *SHORT, "--method", "magnitude", "--alternatives", "--output", "run")
    assert done.code == 0, done.err
    assert "int8: not measured, out_of_resources (CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has)" in done.out.splitlines()
    assert done.out.split("run directory:")[0] == sdbench("report", "run").out.split("\n", 1)[1]


def test_a_run_without_any_rate_fails_once_its_answers_are_shown(sdbench, checkpoint, monkeypatch):
    monkeypatch.setattr(runner, "rate_runs", fail)
    done = sdbench("e2e", "--model", checkpoint(), *SHORT, "--method", "magnitude", "--output", "run")
    assert done.code == 1 and "magnitude: not timed, out_of_resources" in done.out
    assert done.err.splitlines()[-1].startswith("sdbench: error: no arm could be measured; dense: CUDA out of memory. Tried")
