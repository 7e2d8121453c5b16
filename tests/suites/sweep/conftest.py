"""Sweeps whose runs take half a second each."""

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sdbench.progress import Progress
from sdbench.suites.sweep.driver import Plan, sweep
from sdbench.suites.sweep.executors import Executor, LocalExecutor
from sdbench.suites.sweep.grid import Grid, Option, expand
from sdbench.suites.sweep.record import SweepRecord

PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "fakes" / "sweep_program.py"))
KNOWN = {"task": Option("--task"), "seed": Option("--seed")}


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    """A plan of one run a task (as the fake program names how a run ends)."""

    def make(*tasks: str, retries: int = 1, seeds: Sequence[int] = (0,)) -> Plan:
        grid = Grid.model_validate({"axes": {"task": list(tasks), "seed": [str(seed) for seed in seeds]}})
        runs = expand(Path("grid.yaml"), grid, KNOWN)
        return Plan(Path("grid.yaml"), runs, [dict(run.values) for run in runs], tmp_path / "sweep", retries)

    return make


@pytest.fixture
def run() -> Callable[..., tuple[SweepRecord, list[str]]]:
    """Runs a plan; returns the record and the lines of its progress."""

    def call(plan: Plan, executor: Executor | None = None) -> Any:
        out = io.StringIO()
        with Progress(Console(file=out, width=200)) as progress:
            record = sweep(plan, executor or LocalExecutor(), progress, PROGRAM)
        return record, out.getvalue().splitlines()

    return call
