"""Runs a grid: keeps what is finished, starts the rest as processes of their own, tries failed ones again, and records all of it."""

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sdbench.errors import ExitCode, SdbenchError, UsageError
from sdbench.progress import Progress, Task
from sdbench.records import RunRecord
from sdbench.results import lock_directory, strict_json
from sdbench.suites.runs import read_run
from sdbench.suites.sweep.executors import Executor
from sdbench.suites.sweep.grid import Run, require_distinct, shown, used, varying
from sdbench.suites.sweep.record import SCHEMA, Attempt, Call, Entry, SweepRecord, read_record
from sdbench.suites.sweep.work import SDBENCH, Ended, Job
from sdbench.words import counted

Arguments = Mapping[str, Any]

LOGS = ".logs"
"""Where runs' stderr goes: hidden, so that ``FOLDER/*`` names run directories and nothing else."""


@dataclass(frozen=True)
class Plan:
    """What is to be run, all of it checked.

    Attributes:
        file: The grid.
        runs: Its runs.
        arguments: Of each run, as its ``run.json`` has them.
        folder: Where the run directories are.
        retries: Further attempts at a run that failed.
        checking_seconds: What it took to check it.
    """

    file: Path
    runs: Sequence[Run]
    arguments: Sequence[Arguments]
    folder: Path
    retries: int
    checking_seconds: float = 0.0


def check_runs(file: Path, runs: Sequence[Run], executor: Executor) -> list[Arguments]:
    """Every run's arguments, by the code of the command that the runs call.

    Raises:
        UsageError: A value that it refuses, or two runs that are one.
        SdbenchError: What cannot be had: data, a GPU.
    """
    for run in runs:
        if shown(run.values.get("device")).startswith("cuda:"):
            raise UsageError(f"{file}: device: {shown(run.values['device'])}: each run is given a GPU of its own; use cuda, cpu or auto")
    found = executor.check([run.typed for run in runs], str(Path.cwd()))
    if "error" in found:
        wrong = runs[len(found["arguments"])]
        named = ", ".join(f"{key}: {shown(wrong.values[key])}" for key in found["keys"] or wrong.values)
        raise SdbenchError(f"{file}: {named}: {found['error']}", ExitCode(found["code"]))
    require_distinct(file, runs, [_key(one) for one in found["arguments"]])
    return list(found["arguments"])


def sweep(plan: Plan, executor: Executor, progress: Progress, program: Sequence[str] = SDBENCH) -> SweepRecord:
    """Runs what is not finished; a failed run is an entry, never an exception.

    Args:
        plan: The runs.
        executor: Where they are executed; stopped when this returns or raises.
        progress: Gets a line for every run that ends.
        program: What a run's command line is given to.

    Raises:
        UsageError: A directory is taken by a run with other arguments.
        SdbenchError: The folder cannot be written, or another sweep is in it; Ctrl-C, once every run has recorded it.
    """
    lock = None
    if (plan.folder / "run.json").exists():
        raise UsageError(f"{plan.folder} is a run directory, and a sweep's runs have a folder of their own; choose another --output")
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        lock = lock_directory(plan.folder)
        return _Sweep(plan, executor, progress, program).run()
    except OSError as error:
        raise SdbenchError(f"cannot write {plan.folder}: {error.strerror}; choose another --output") from error
    finally:
        executor.stop()
        if lock is not None:
            os.close(lock)


class _Sweep:
    def __init__(self, plan: Plan, executor: Executor, progress: Progress, program: Sequence[str]):
        self.plan, self.executor, self.progress, self.program = plan, executor, progress, program
        found = _finished_and_begun(plan.folder)
        last = read_record(plan.folder)
        earlier = {entry.run: entry for entry in last.runs} if last else {}
        names = varying(plan.runs)
        self.entries = [
            _entry(run, arguments, plan.folder, found, earlier, names) for run, arguments in zip(plan.runs, plan.arguments, strict=True)
        ]
        calls = last.calls if last else []
        for call in calls:
            _if_running_killed(call)
        self.began = time.monotonic() - plan.checking_seconds
        checked = plan.checking_seconds
        self.call = Call(started=_now(), jobs=executor.slots, checking_seconds=checked, seconds=checked, outcome="running")
        self.record = SweepRecord(
            schema=SCHEMA,
            grid=plan.file.name,
            executor=executor.name,
            varying=names,
            runs=self.entries,
            calls=[*calls, self.call],
        )
        self.going: dict[Future[Ended], int] = {}

    def run(self) -> SweepRecord:
        self._save()
        kept = self.record.count("complete")
        if kept:
            self.progress.note(f"{kept} of {counted(len(self.entries), 'run')} finished already and kept")
        waiting = deque(index for index, entry in enumerate(self.entries) if entry.outcome != "complete")
        tries = [0] * len(self.entries)
        try:
            with self.progress.task("runs", len(self.entries)) as task:
                task.advance(kept)
                while waiting or self.going:
                    while waiting and len(self.going) < self.executor.slots:
                        self._start(waiting.popleft())
                    done, _ = wait(self.going, timeout=1, return_when=FIRST_COMPLETED)
                    for future in done:
                        index = self.going.pop(future)
                        tries[index] += 1
                        ended = _result(future)
                        again = self._end(index, ended) and tries[index] <= self.plan.retries
                        self._tell(index, again, task)
                        if again:
                            waiting.append(index)
        except KeyboardInterrupt as error:
            self._interrupted()
            finished = f"{self.record.count('complete')} of {counted(len(self.entries), 'run')} finished"
            raise SdbenchError(
                f"interrupted; {finished}, and the same command goes on",
                ExitCode.INTERRUPTED,
            ) from error
        self.call.outcome = "complete"
        self._save()
        return self.record

    def _save(self) -> None:
        self.call.seconds = time.monotonic() - self.began
        self.record.save(self.plan.folder)

    def _start(self, index: int) -> None:
        run, entry = self.plan.runs[index], self.entries[index]
        entry.outcome, entry.reason = "running", None
        entry.attempts.append(Attempt(started=_now()))
        self.call.attempts += 1
        self._save()
        command = ["e2e", *run.arguments, f"--output={self.plan.folder / entry.run}"]
        log = (self.plan.folder / LOGS / f"{entry.run}.log").absolute()
        self.going[self.executor.submit(Job(command, str(Path.cwd()), str(log), program=self.program))] = index

    def _end(self, index: int, ended: Ended) -> bool:
        """Records the end of an attempt; whether another one may end better."""
        entry = self.entries[index]
        last = entry.attempts[-1]
        last.code, last.seconds, last.worker, last.device = ended.code, ended.seconds, ended.worker, ended.device
        path = self.plan.folder / entry.run
        if _is_complete(path, self.plan.arguments[index]):
            entry.end("complete")
        else:
            nothing = f"it ended well, but {path} holds no complete run; on a cluster, --output must be on a file system of all nodes"
            entry.end("failed", ended.reason or nothing)
        self._save()
        return entry.outcome != "complete" and ended.code != ExitCode.USAGE

    def _tell(self, index: int, again: bool, task: Task) -> None:
        entry = self.entries[index]
        if not again:
            task.advance()
        took = f" in {entry.seconds:.0f} s" if entry.seconds is not None else ""
        why = f": {entry.reason}" if entry.reason else ""
        self.progress.note(f"{entry.run}: {entry.outcome}{took}{why}{'; it is tried again' if again else ''}")

    def _interrupted(self) -> None:
        self.progress.note("interrupting the runs that are going on")
        self.executor.stop()
        for index in self.going.values():
            # One that ended in the meantime is as good as any.
            complete = _is_complete(self.plan.folder / self.entries[index].run, self.plan.arguments[index])
            self.entries[index].end("complete" if complete else "interrupted", None if complete else "Ctrl-C")
        self.call.outcome, self.call.reason = "interrupted", "Ctrl-C"
        self._save()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _result(future: "Future[Ended]") -> Ended:
    try:
        return future.result()
    except Exception as error:
        return Ended(None, " ".join(str(error).split()), None, None, None)


def _entry(
    run: Run, arguments: Arguments, folder: Path, found: Mapping[str, str], earlier: Mapping[str, Entry], names: Sequence[str]
) -> Entry:
    """A run as its directory leaves it: finished, begun or new."""
    # A grid that grew has given the run another name.
    name = found.get(_key(arguments), run.name)
    entry = earlier.get(name) or Entry(run=name, arguments={})
    defaults = {key: used(key, arguments) for key in names if key not in run.values}
    new = {"arguments": dict(run.values), "defaults": defaults, "outcome": "waiting", "kept": False, "reason": None}
    entry = entry.model_copy(update=new)
    for attempt in entry.attempts:
        _if_running_killed(attempt)
    if _is_complete(folder / name, arguments):
        entry.outcome, entry.kept = "complete", True
    elif _key(arguments) not in found:
        _require_free(folder / name, arguments)
    return entry


def _if_running_killed(one: Attempt | Call) -> None:
    """What an earlier call left as running was killed with it: no other call is in this folder."""
    if one.outcome == "running":
        one.outcome, one.reason = "interrupted", "killed"


def _finished_and_begun(folder: Path) -> dict[str, str]:
    """Arguments of the run directories in a folder, as text -> name."""
    found = {}
    for file in sorted(folder.glob("*/run.json")):
        record = _read(file)
        if record and record.command == "e2e":
            found[_key(record.arguments)] = file.parent.name
    return found


def _key(arguments: Arguments) -> str:
    return strict_json(dict(sorted(arguments.items())))


def _is_complete(path: Path, arguments: Arguments) -> bool:
    try:
        record = read_run(path).record
    except SdbenchError:
        return False
    return record.outcome == "complete" and record.arguments == dict(arguments)


def _require_free(path: Path, arguments: Arguments) -> None:
    """Refuses a directory of another run, of which something was measured: the run would, once it had loaded everything."""
    record = _read(path / "run.json")
    if record is None or not any((path / name).exists() and (path / name).stat().st_size for name in ("rows.jsonl", "samples.jsonl")):
        return
    names = sorted(record.arguments.keys() | arguments.keys())
    other = [name for name in names if record.arguments.get(name) != arguments.get(name)]
    told = ", ".join(
        f"{name} {strict_json(record.arguments.get(name))} there, {strict_json(arguments.get(name))} now" for name in other[:3]
    )
    raise UsageError(f"{path} holds another run ({told or f'of sdbench {record.command}'}); choose another --output")


def _read(file: Path) -> RunRecord | None:
    try:
        return RunRecord.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
