"""A GPU whose memory does not reach: a row where one arm failed, one line where the run did."""

from typing import Any

import torch

from sdbench.suites.e2e import runner

SHORT = (
    "--calibration-examples=2",
    "--validation-examples=2",
    "--max-tokens=6",
    "--equal-tokens=5",
    "--warmup-tokens=0",
    "--rate-repeats=1",
)


def fail(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB.\nGPU 0 has")


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
