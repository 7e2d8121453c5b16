"""The process that configs run in: one that hangs or dies costs its own outcome and no more, and nothing outlives the run."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import triton

from sdbench.kernels import registry
from sdbench.pattern import Pattern
from sdbench.suites.kernels.runner import Case, Local
from sdbench.suites.kernels.search import SHORT
from sdbench.suites.kernels.worker import Worker

FAKES = Path(__file__).parent / "fakes"


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Any:
    # A process that is spawned gets this one's sys.path.
    monkeypatch.syspath_prepend(FAKES)
    module = importlib.import_module("faulty_variant")
    module.LAUNCHED.clear()
    return module


def case_of(faulty: Any, shape: tuple[int, int] = (8, 32)) -> Case:
    return Case.of(faulty.VARIANT, shape, torch.float32, None, torch.device("cpu"), 0)


def configs_of(faulty: Any, *kinds: int) -> list[dict[str, int]]:
    return [{"kind": kind, "us": 10 + number} for number, kind in enumerate(kinds)]


@pytest.mark.slow
def test_every_config_has_an_outcome_whatever_the_others_do(faulty: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """CASES 5, 10: in a process of its own, on the CPU."""
    kinds = [
        faulty.RIGHT,
        faulty.HANGS,
        faulty.WRONG,
        faulty.NAN,
        faulty.DIES,
        faulty.NO_COMPILE,
        faulty.NO_MEMORY,
        faulty.RAISES,
        faulty.RIGHT,
    ]
    configs = configs_of(faulty, *kinds)
    with Worker(timeout=1.5, timer=faulty.times) as worker:
        trials = {trial.config["us"]: trial for trial in worker.run(case_of(faulty), configs, SHORT)}
        process = worker._process
        assert process is not None and process.pid is not None
        pid = process.pid
        # The same process serves the next request.
        (again,) = worker.run(case_of(faulty, (4, 32)), configs[:1], SHORT)
        assert again.outcome == "correct" and worker._process is process
    assert not psutil.pid_exists(pid)
    assert [trials[config["us"]].outcome for config in configs] == [
        "correct", "timeout", "incorrect", "incorrect", "crash", "compile_error", "out_of_resources", "crash", "correct",
    ]  # fmt: skip
    messages = {us: trial.message for us, trial in trials.items()}
    assert messages[10] is None and messages[11] == "no answer within 1.5 s" and messages[14] == "its process ended with exit code 7"
    assert "illegal memory access" in (messages[17] or "")
    times = {us: trial.times and trial.times.p50 for us, trial in trials.items()}
    assert times == dict.fromkeys(times) | {10: pytest.approx(10.1), 18: pytest.approx(18.18)}
    assert {trial.nbytes for trial in trials.values()} == {8 * 32 * 4}
    assert faulty.LAUNCHED == []  # nothing ran in this process
    out, err = capfd.readouterr()
    assert out == ""  # stdout is for one JSON document
    assert "noise on stdout" in err and "Traceback" not in err


def test_in_this_process_every_config_has_an_outcome_too(faulty: Any) -> None:
    configs = configs_of(faulty, faulty.RAISES, faulty.RIGHT, faulty.NO_COMPILE, faulty.NAN)
    trials = list(Local(faulty.times).run(case_of(faulty), configs, SHORT))
    assert [trial.outcome for trial in trials] == ["crash", "correct", "compile_error", "incorrect"]
    assert [trial.config for trial in trials] == configs


def test_a_weight_that_cannot_be_made_is_every_configs_outcome(faulty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("sdbench.suites.kernels.runner.make_operand", no_memory)
    trials = list(Local(faulty.times).run(case_of(faulty), configs_of(faulty, faulty.RIGHT, faulty.RIGHT), SHORT))
    assert [(trial.outcome, trial.nbytes) for trial in trials] == [("out_of_resources", None)] * 2


@pytest.mark.slow
def test_a_caller_that_stops_early_does_not_get_old_answers_later(faulty: Any) -> None:
    with Worker(timeout=30, timer=faulty.times) as worker:
        first = worker.run(case_of(faulty), configs_of(faulty, *[faulty.RIGHT] * 3), SHORT)
        assert next(first).config["us"] == 10
        first.close()
        (trial,) = worker.run(case_of(faulty), [{"kind": faulty.RIGHT, "us": 77}], SHORT)
        assert trial.config["us"] == 77
        if triton.knobs.runtime.interpret:
            # A variant of the package in Triton's interpreter, which the new process is in as this one is.
            portable = registry.find("spmv", "portable")
            case = Case.of(portable, (8, 32), torch.float32, Pattern(2, 4), torch.device("cpu"), 0)
            (trial,) = worker.run(case, [portable.default(case.problem)], SHORT)
            assert trial.outcome == "correct" and trial.nbytes == 8 * (16 * 4 + 4)


HANGING = """
import sys
sys.path.insert(0, {fakes!r})
import faulty_variant as faulty
import torch
from sdbench.suites.kernels.runner import Case
from sdbench.suites.kernels.worker import Worker

if __name__ == "__main__":
    case = Case.of(faulty.VARIANT, (8, 32), torch.float32, None, torch.device("cpu"), 0)
    configs = [{{"kind": faulty.RIGHT, "us": 1}}, {{"kind": faulty.HANGS, "us": 2}}]
    try:
        with Worker(timeout=300, timer=faulty.times) as worker:
            for trial in worker.run(case, configs, 3):
                print(worker._process.pid, flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["ctrl-c", "kill"])
def test_no_process_outlives_the_run(ending: str, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole foreground group, as a terminal sends it; a kill to the parent alone."""
    script = tmp_path / "hanging.py"
    script.write_text(HANGING.format(fakes=str(FAKES)))
    # A shell starts background jobs with SIGINT ignored, and so the tests of a job in the background: a terminal does not.
    script.write_text("import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + script.read_text())
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None and parent.stderr is not None
    worker = int(parent.stdout.readline())
    assert psutil.pid_exists(worker)
    time.sleep(0.5)
    if ending == "ctrl-c":
        # The worker never hears it: its parent is what ends it.
        os.kill(worker, signal.SIGINT)
        time.sleep(0.5)
        assert parent.poll() is None and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
        os.killpg(parent.pid, signal.SIGINT)
    else:
        parent.kill()
    code = parent.wait(timeout=30)
    assert code == (130 if ending == "ctrl-c" else -signal.SIGKILL)
    assert "Traceback" not in parent.stderr.read()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
