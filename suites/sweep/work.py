"""What a worker does, on whichever machine: one run as a process of its own, watched to its end. Imports nothing heavy."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdbench.errors import SdbenchError

SDBENCH = (sys.executable, "-m", "sdbench")
CHECKING = (sys.executable, "-m", "sdbench.cli.checking")
CHILD = Path(__file__).with_name("child.py")

GRACE_SECONDS = 20
"""What a run has to record that it was interrupted, before it is killed."""

ERROR = "sdbench: error: "
TAIL_BYTES = 16_384


@dataclass(frozen=True)
class Job:
    """One attempt at a run.

    Attributes:
        command: The sdbench command line, without ``sdbench``.
        folder: Where the driver was called: relative paths are from there.
        log: File that the run's stderr is appended to.
        environment: Variables beside the worker's own.
        program: What the command line is given to.
    """

    command: Sequence[str]
    folder: str
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = SDBENCH


@dataclass(frozen=True)
class Ended:
    """How an attempt ended.

    Attributes:
        code: The exit code, negative for a signal; None where the worker was lost.
        reason: The last clear line of stderr; None where it ended well.
        seconds: Wall time.
        worker: Who ran it.
        device: ``cpu``, or the GPU as CUDA_VISIBLE_DEVICES named it.
    """

    code: int | None
    reason: str | None
    seconds: float | None
    worker: str | None
    device: str | None


def work(job: Job, worker: str, stopped: Callable[[], bool] = lambda: False) -> Ended:
    """Runs a job to its end; ends it with Ctrl-C's signal when ``stopped``, or on KeyboardInterrupt in this process.

    Raises:
        SdbenchError: The log cannot be written, or the folder is not there.
    """
    started = time.monotonic()
    environment = {**os.environ, **job.environment}
    try:
        Path(job.log).parent.mkdir(parents=True, exist_ok=True)
        with Path(job.log).open("ab") as log:
            begin = log.tell()
            process = subprocess.Popen(
                [sys.executable, str(CHILD), str(os.getpid()), *job.program, *job.command],
                cwd=job.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                # A Ctrl-C at the terminal is the driver's, which tells every run and waits for it.
                start_new_session=True,
            )
    except OSError as error:
        raise SdbenchError(f"cannot start a run in {job.folder} with its log {job.log}: {error.strerror}") from error
    try:
        while process.poll() is None:
            if stopped():
                _end(process)
            time.sleep(0.1)
    except BaseException:
        _end(process)
        raise
    device = environment.get("CUDA_VISIBLE_DEVICES") or "cpu"
    return Ended(process.returncode, reason(process.returncode, _tail(job.log, begin)), time.monotonic() - started, worker, device)


def reason(code: int, stderr: str) -> str | None:
    """Why a process ended, in one line; None where it ended well.

    Args:
        code: Its exit code, negative for a signal.
        stderr: What it said.
    """
    if code == 0:
        return None
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    told = next((line.removeprefix(ERROR) for line in reversed(lines) if line.startswith(ERROR)), lines[-1] if lines else None)
    if code > 0:
        return told or f"exit code {code} without a word"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    why = " (by a person, or by a machine that ran out of memory)" if name == "SIGKILL" else ""
    return f"ended by {name}{why}" + (f"; its last line: {told}" if told else "")


def check(runs: Sequence[Mapping[str, Sequence[str]]], folder: str) -> dict[str, Any]:
    """Has every run's command line checked by its command's own code, in a process that leaves no CUDA context behind.

    Args:
        runs: Option -> its part of the command line.
        folder: Where relative paths are from.

    Returns:
        ``gpus``, how many there are; ``arguments``, a run's as its ``run.json`` will have them, up to the first that is wrong; and
        ``error``, ``code`` and ``keys`` (the options without which it is another error, or none) of that one.

    Raises:
        SdbenchError: The check itself fails.
    """
    try:
        done = subprocess.run(CHECKING, cwd=folder, input=json.dumps(list(runs)), capture_output=True, text=True, check=False)
    except OSError as error:
        raise SdbenchError(f"cannot check the runs in {folder}: {error.strerror}") from error
    if done.returncode:
        raise SdbenchError(f"cannot check the runs: {reason(done.returncode, done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(file: str, begin: int) -> str:
    """What an attempt added to the log, or the end of it."""
    with Path(file).open("rb") as log:
        log.seek(max(begin, log.seek(0, os.SEEK_END) - TAIL_BYTES))
        return log.read().decode(errors="replace")
