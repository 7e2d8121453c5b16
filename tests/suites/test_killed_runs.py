"""A run that is killed, at any point and any number of times, goes on and loses and repeats nothing that was finished."""

import json
import multiprocessing
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdbench.records import RunRecord
from sdbench.suites.reports import render
from sdbench.suites.runs import read_run

FAKES = Path(__file__).parent / "fakes"
KERNELS = ("kernels", "--shapes", "8x32,40x64", "--variant", "portable", "--device", "cpu", "--output", "run")
E2E = (
    "e2e", "--model", "demo", "--calibration-examples", "2", "--validation-examples", "3", "--max-tokens", "5", "--equal-tokens", "3",
    "--rate-repeats", "1", "--warmup-tokens", "1", "--fidelity", "--device", "cpu", "--output", "run",
)  # fmt: skip

Start = Callable[..., multiprocessing.process.BaseProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a command in a process of its own, which takes a moment where a server has imported everything before."""
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from killing import call

    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sdbench.suites.kernels.suite", "sdbench.suites.e2e.suite", "sdbench.suites.reports"])

    def started(arguments: tuple[str, ...], at: int | None = None, torn: int = 0) -> multiprocessing.process.BaseProcess:
        process: multiprocessing.process.BaseProcess = context.Process(target=call, args=(arguments, str(tmp_path), at, torn))
        process.start()
        return process

    return started


def lines(file: Path) -> list[bytes]:
    """Complete lines."""
    return file.read_bytes().split(b"\n")[:-1] if file.exists() else []


def held(folder: Path) -> dict[str, list[bytes]]:
    return {name: lines(folder / name) for name in ("rows.jsonl", "samples.jsonl")}


def require_kept(before: dict[str, list[bytes]], after: dict[str, list[bytes]]) -> None:
    """Nothing that was finished is lost, moved or changed."""
    for name, old in before.items():
        assert after[name][: len(old)] == old, name


def require_once(folder: Path, kind: str, *key: str) -> None:
    rows = [json.loads(line) for line in lines(folder / "rows.jsonl")]
    counts = Counter(tuple(str(row[name]) for name in key) for row in rows if row["record"] == kind)
    assert counts and set(counts.values()) == {1}, counts


def require_audit(folder: Path, killed: int) -> None:
    """Every attempt that left a record is in the audit, in order, with what it found and how it ended."""
    record = RunRecord.model_validate_json((folder / "run.json").read_bytes())
    assert record.outcome == "complete" and record.outcome_reason is None
    *earlier, last = record.audit
    assert [attempt.attempt for attempt in record.audit] == list(range(1, len(record.audit) + 1))
    assert len(earlier) <= killed  # one that was killed before its first write has left none
    # One that was killed as it printed what it had found was complete.
    ends = {(attempt.outcome, attempt.reason, attempt.ended is None) for attempt in earlier}
    assert ends <= {("interrupted", "killed", True), ("complete", None, False)}
    assert last.outcome == "complete" and last.ended
    rows = [json.loads(line) for line in lines(folder / "rows.jsonl")]
    assert [attempt.resumed_rows for attempt in record.audit] == [
        sum(row["attempt"] < attempt.attempt for row in rows) for attempt in record.audit
    ]


def run_and_kill(folder: Path, attempts: Iterable[Callable[[], multiprocessing.process.BaseProcess]]) -> int:
    """Makes attempts until one ends by itself; returns how many were killed before it."""
    for killed, attempt in enumerate(attempts):
        before = held(folder)
        process = attempt()
        process.join(120)
        require_kept(before, held(folder))
        if process.exitcode == 0:
            return killed
        assert process.exitcode == -signal.SIGKILL, (folder.parent / "log").read_text()
    raise AssertionError("no attempt came to its end")


def require_all_once(command: tuple[str, ...], folder: Path) -> None:
    if command is KERNELS:
        require_once(folder, "result", "kernel", "variant", "pattern", "layer")
        return
    samples = Counter((one["arm"], one["example"]) for one in map(json.loads, lines(folder / "samples.jsonl")))
    assert len(samples) == 9 and set(samples.values()) == {1}
    require_once(folder, "fidelity", "arm", "prefill", "example")


@pytest.mark.slow
@pytest.mark.parametrize("torn", [0, 7])
def test_kernels_killed_at_each_write(torn: int, start: Start, tmp_path: Path) -> None:
    """The first attempt is killed at its first write, the second at its second, and so on.

    The rows of a shape are one write. Where a failing disk tears it, the shape is not finished: all of it is measured again.
    """
    folder = tmp_path / "run"
    killed = run_and_kill(folder, (partial(start, KERNELS, at, torn) for at in range(1, 100)))
    assert killed >= 8
    if not torn:
        require_all_once(KERNELS, folder)
    require_audit(folder, killed)
    assert not list(folder.glob(".*"))  # no draft of a killed process stays

    assert run_and_kill(tmp_path / "whole", [partial(start, (*KERNELS[:-1], "whole"))]) == 0
    assert render(read_run(folder)).cells == render(read_run(tmp_path / "whole")).cells


@pytest.mark.slow
def test_e2e_killed_at_writes(start: Start, tmp_path: Path) -> None:
    """Every second time the write is torn as well."""
    folder = tmp_path / "run"
    killed = run_and_kill(folder, (partial(start, E2E, at, 5 * (at % 4 == 0)) for at in range(2, 200, 6)))
    assert killed >= 4
    require_all_once(E2E, folder)
    require_audit(folder, killed)
    assert not any("NOT A COMPLETE RUN" in line for line in render(read_run(folder)).header)


@pytest.mark.slow
@pytest.mark.parametrize("command", [KERNELS, E2E], ids=["kernels", "e2e"])
def test_killed_at_random_moments(command: tuple[str, ...], start: Start, tmp_path: Path) -> None:
    """By another process, as an operator or a machine that runs out of memory does it."""
    folder, chance = tmp_path / "run", random.Random(0)

    def attempt(patience: float) -> multiprocessing.process.BaseProcess:
        process = start(command)
        time.sleep(chance.uniform(0, patience))
        process.kill()
        return process

    killed = run_and_kill(folder, (partial(attempt, 0.2 * 1.4**number) for number in range(40)))
    assert killed >= 3
    require_all_once(command, folder)
    require_audit(folder, killed)
