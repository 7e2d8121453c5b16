"""Sweeps with real processes: what fails, is killed or finished before costs itself alone, and all of it is recorded."""

import errno
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdbench.errors import ExitCode, SdbenchError, UsageError
from sdbench.suites.sweep import record as record_module
from sdbench.suites.sweep.executors import LocalExecutor, RayExecutor
from sdbench.suites.sweep.work import reason

HERE = Path(__file__).parent


def outcomes(record):
    return [(entry.run, entry.outcome, len(entry.attempts)) for entry in record.runs]


def test_a_failure_costs_its_run_alone_and_is_tried_again(plan, run):
    asked = plan("ok", "fail", "once", "killed", "memory", "wrong")
    record, lines = run(asked, LocalExecutor(2))
    assert outcomes(record) == [
        ("ok_seed0", "complete", 1),
        ("fail_seed0", "failed", 2),
        ("once_seed0", "complete", 2),
        ("killed_seed0", "complete", 2),
        ("memory_seed0", "failed", 2),
        ("wrong_seed0", "failed", 1),  # what was typed is as wrong the next time
    ]
    ok, fail, _, killed, memory, _ = record.runs
    assert (ok.reason, fail.reason, fail.attempts[0].code) == (None, "no luck", 1)
    assert killed.attempts[0].code == -signal.SIGKILL and killed.attempts[0].reason.startswith("ended by SIGKILL")
    assert memory.reason == "unexpected OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
    assert ok.seconds > 0 and ok.worker.startswith("process ") and ok.device == "cpu"
    assert any(line.startswith("fail_seed0: failed in ") and line.endswith(": no luck; it is tried again") for line in lines)
    assert json.loads((asked.folder / "sweep.json").read_text())["runs"][1]["attempts"][1]["reason"] == "no luck"


def test_finished_runs_are_kept_and_a_grid_may_grow(plan, run):
    first, _ = run(plan("ok", "fail", retries=0))
    before = (plan("ok").folder / "ok_seed0" / "run.json").read_bytes()
    again, lines = run(plan("ok", "fail", retries=0, seeds=(0, 1)))
    assert lines[0] == "1 of 4 runs finished already and kept"
    assert outcomes(again) == [
        ("ok_seed0", "complete", 1),
        ("ok_seed1", "complete", 1),
        ("fail_seed0", "failed", 2),
        ("fail_seed1", "failed", 1),
    ]
    assert [entry.kept for entry in again.runs] == [True, False, False, False]
    assert (plan("ok").folder / "ok_seed0" / "run.json").read_bytes() == before
    assert first.runs[0].attempts == again.runs[0].attempts
    assert [(call.jobs, call.attempts) for call in again.calls] == [(1, 2), (1, 3)]


def test_finished_runs_are_found_without_the_record_and_under_another_name(plan, run):
    asked = plan("ok")
    run(asked)
    (asked.folder / "sweep.json").unlink()
    (asked.folder / "ok_seed0").rename(asked.folder / "older-name")
    record, _ = run(asked)
    assert [(entry.run, entry.outcome, entry.kept) for entry in record.runs] == [("older-name", "complete", True)]


def test_a_directory_of_another_run_is_refused_before_anything_starts(plan, run):
    asked = plan("ok")
    run(asked)
    asked.arguments[0]["max_tokens"] = 7
    with pytest.raises(UsageError, match=r"ok_seed0 holds another run .max_tokens null there, 7 now"):
        run(asked)


def test_a_full_disk_is_one_line_and_finished_runs_are_kept(plan, run, monkeypatch):
    run(plan("ok"))
    calls = []

    def full(path: Path, text: str) -> None:
        calls.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record_module, "write_atomic", full)
    with pytest.raises(SdbenchError, match=r"cannot write .*sweep\.json: No space left on device; finished runs are kept"):
        run(plan("ok", "once"))
    assert calls and (plan("ok").folder / "ok_seed0" / "run.json").exists()


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import KNOWN, PROGRAM
from sdbench.progress import Progress
from sdbench.suites.sweep.driver import Plan, sweep
from sdbench.suites.sweep.executors import LocalExecutor, RayExecutor
from sdbench.suites.sweep.grid import Grid, expand
runs = expand(Path("grid.yaml"), Grid.model_validate({"axes": {"task": ["ok", "slow"]}}), KNOWN)
executor = (RayExecutor if sys.argv[3] == "ray" else LocalExecutor)(jobs=1)
try:
    with Progress() as progress:
        sweep(Plan(Path("grid.yaml"), runs, [dict(run.values) for run in runs], Path(sys.argv[2]), 1), executor, progress, PROGRAM)
except Exception as error:
    sys.exit(f"{error}")
"""


HEARS_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""A shell starts background jobs with SIGINT ignored, and so the tests of a job in the background: a terminal does not."""


def start_driver(folder, executor="local"):
    """A driver in a process of its own, whose second run goes on until it is told."""
    process = subprocess.Popen([sys.executable, "-c", HEARS_CTRL_C + DRIVER, HERE, folder, executor], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (folder / "slow" / "run.json").exists() and process.poll() is None)
    return process


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def state(folder):
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    return [(entry["run"], entry["outcome"]) for entry in runs], json.loads((folder / "slow" / "run.json").read_text())["outcome"]


def calls(folder):
    """How each call ended, and how many attempts it began."""
    return [(call["outcome"], call["reason"], call["attempts"]) for call in json.loads((folder / "sweep.json").read_text())["calls"]]


def finish(folder, executor="local"):
    """The same command again, which is told to go on."""
    (folder / "go").touch()
    process = subprocess.run([sys.executable, "-c", DRIVER, HERE, folder, executor], capture_output=True, text=True, check=True)
    assert "1 of 2 runs finished already and kept" in process.stderr
    assert state(folder) == ([("ok", "complete"), ("slow", "complete")], "complete")
    assert [len(json.loads((folder / name / "run.json").read_text())["audit"]) for name in ("ok", "slow")] == [1, 2]


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_ctrl_c_ends_the_runs_and_leaves_all_of_it_to_go_on(executor, tmp_path):
    if executor == "ray":
        pytest.importorskip("ray")
    process = start_driver(tmp_path, executor)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.splitlines()[-1] == "interrupted; 1 of 2 runs finished, and the same command goes on"
    assert state(tmp_path) == ([("ok", "complete"), ("slow", "interrupted")], "interrupted")
    assert calls(tmp_path) == [("interrupted", "Ctrl-C", 2)]
    finish(tmp_path, executor)


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_driver_that_is_killed_leaves_no_run_behind_and_goes_on(executor, tmp_path):
    if executor == "ray":
        pytest.importorskip("ray")
    process = start_driver(tmp_path, executor)
    process.kill()
    process.wait()
    assert state(tmp_path) == ([("ok", "complete"), ("slow", "running")], "running")
    assert calls(tmp_path) == [("running", None, 2)]
    if executor == "ray":
        time.sleep(5)  # its cluster notices and ends its workers
    finish(tmp_path, executor)
    attempts = json.loads((tmp_path / "sweep.json").read_text())["runs"][1]["attempts"]
    assert [(one["outcome"], one["reason"]) for one in attempts] == [("interrupted", "killed"), ("complete", None)]
    assert calls(tmp_path) == [("interrupted", "killed", 2), ("complete", None, 1)]


def test_two_sweeps_never_share_a_folder(plan, run, tmp_path):
    process = start_driver(tmp_path / "sweep")
    try:
        with pytest.raises(SdbenchError, match="is in use by another sdbench process"):
            run(plan("ok"))
    finally:
        process.kill()
        process.wait()


def test_a_run_directory_is_no_folder_for_runs(plan, run):
    wanted = plan("ok")
    wanted.folder.mkdir(parents=True)
    (wanted.folder / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="is a run directory, and a sweep's runs have a folder of their own"):
        run(wanted)
    assert [one.name for one in wanted.folder.iterdir()] == ["run.json"]


class TestGpus:
    """As the check finds them; the runs say which one they were given."""

    def executor(self, monkeypatch, gpus, jobs=None, device="cuda", **changes):
        found = {"gpus": gpus, "arguments": [{"device": device, "rate_repeats": 3, "fidelity": "also", **changes}]}
        monkeypatch.setattr("sdbench.suites.sweep.executors.check", lambda runs, folder: found)
        executor = LocalExecutor(jobs)
        executor.check([], ".")
        return executor

    def test_each_run_has_one_of_its_own(self, plan, run, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
        record, _ = run(plan("ok", seeds=range(3)), self.executor(monkeypatch, 2))
        assert {entry.device for entry in record.runs} == {"3", "5"}
        for entry in record.runs:
            found = json.loads((plan("ok").folder / entry.run / "run.json").read_text())["environment"]["gpu"]
            assert found == entry.device

    def test_no_two_share_one(self, monkeypatch):
        with pytest.raises(UsageError, match="--jobs 3 with 2 GPUs: runs that share one would time each other"):
            self.executor(monkeypatch, 2, jobs=3)

    @pytest.mark.parametrize("untimed", [{"rate_repeats": 0}, {"fidelity": "only"}])
    def test_runs_that_time_nothing_may_share(self, plan, run, monkeypatch, untimed):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
        executor = self.executor(monkeypatch, 2, jobs=4, **untimed)
        assert executor.slots == 4
        record, _ = run(plan("ok", seeds=range(8)), executor)
        assert {entry.device for entry in record.runs} == {"3", "5"}

    def test_runs_on_the_cpu_need_none(self, monkeypatch):
        assert self.executor(monkeypatch, 2, jobs=3, device="cpu").slots == 3


@pytest.mark.parametrize(
    ("code", "stderr", "expected"),
    [
        (0, "sdbench: error: old", None),
        (1, "loading\nsdbench: error: first\nsdbench: error: last\nException ignored in: <x>\n", "last"),
        (1, "Traceback\nValueError: x\n\n", "ValueError: x"),
        (1, "", "exit code 1 without a word"),
        (-9, "loading\n", "ended by SIGKILL (by a person, or by a machine that ran out of memory); its last line: loading"),
        (-11, "", "ended by SIGSEGV"),
    ],
)
def test_the_reason_is_the_last_clear_line(code, stderr, expected):
    assert reason(code, stderr) == expected


class TestRay:
    def test_a_missing_ray_is_one_line(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(SdbenchError, match=r"not installed: pip install 'sdbench\[ray\]'"):
            RayExecutor()

    @pytest.mark.parametrize(
        ("address", "code", "message"),
        [
            ("127.0.0.1:1", ExitCode.ERROR, "the Ray cluster at 127.0.0.1:1 cannot be reached: .*Connection refused"),
            ("nowhere", ExitCode.USAGE, "--ray-address nowhere: it is HOST:PORT, or auto"),
        ],
    )
    def test_a_cluster_that_cannot_be_reached_is_one_line(self, address, code, message):
        pytest.importorskip("ray")
        with pytest.raises(SdbenchError, match=message) as error:
            RayExecutor(address)
        assert error.value.exit_code == code

    def test_a_port_of_something_else_is_one_line(self, monkeypatch):
        """Ray itself would try for minutes."""
        pytest.importorskip("ray")
        monkeypatch.setattr("sdbench.suites.sweep.executors.STATUS_SECONDS", 3)
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            with pytest.raises(SdbenchError, match=f"at {address} cannot be reached: the port is open, and no Ray answers"):
                RayExecutor(address)

    @pytest.mark.slow
    def test_a_killed_worker_costs_its_run_alone(self, plan, run):
        pytest.importorskip("ray")
        record, _ = run(plan("ok", "orphaned", "fail"), RayExecutor(jobs=2))
        assert outcomes(record) == [("ok_seed0", "complete", 1), ("orphaned_seed0", "complete", 2), ("fail_seed0", "failed", 2)]
        lost = record.runs[1].attempts[0]
        assert lost.code is None and lost.outcome == "failed" and lost.reason.startswith("lost its worker or node (WorkerCrashedError")
        assert record.runs[0].worker.startswith("node ")

    @pytest.mark.slow
    @pytest.mark.parametrize(("jobs", "slots"), [(None, 2), (1, 1), (6, 2)])
    def test_one_run_a_gpu_however_many_are_asked_for(self, monkeypatch, jobs, slots):
        ray = pytest.importorskip("ray", reason="Ray is an extra")
        ray.init(address="local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False)
        monkeypatch.setattr(ray, "init", lambda **where: None)
        executor = RayExecutor(jobs=jobs)
        try:
            assert executor.slots == slots
        finally:
            executor.stop()

    @pytest.mark.slow
    def test_a_lost_node_costs_its_runs_alone(self, plan, run):
        pytest.importorskip("ray")
        import threading

        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        node = cluster.add_node(num_cpus=1)
        asked = plan("slow", seeds=(0, 1, 2))

        def lose_the_node():
            wait_for(lambda: all((asked.folder / f"slow_seed{seed}" / "run.json").exists() for seed in (0, 1)))
            cluster.remove_node(node, allow_graceful=False)
            wait_for(lambda: '"lost its worker or node' in (asked.folder / "sweep.json").read_text())
            (asked.folder / "go").touch()

        thread = threading.Thread(target=lose_the_node)
        try:
            executor = RayExecutor(cluster.address, jobs=2)
            thread.start()
            record, _ = run(asked, executor)
        finally:
            thread.join()
            cluster.shutdown()
        assert [entry.outcome for entry in record.runs] == ["complete"] * 3
        (again,) = (entry for entry in record.runs if len(entry.attempts) > 1)
        assert len(again.attempts) == 2 and again.attempts[0].reason.startswith("lost its worker or node")
