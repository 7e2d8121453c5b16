"""A process of its own for what may hang a GPU or poison its context: it is ended and replaced, and the run goes on."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from sdbench.errors import SdbenchError
from sdbench.suites.kernels.runner import Bench, Lost, Message, Request, Runner, Timer
from sdbench.timing import graph_times

END_SECONDS = 60.0
"""How long a killed process may take to give its device back."""


class Worker(Runner):
    """Runs configs in one process after another, each kept until a config hangs or ends it.

    Args:
        timeout: Seconds that a compiled config's check and timing may take.
        timer: Times the right ones.
    """

    timed = True

    def __init__(self, timeout: float, timer: Timer = graph_times):
        super().__init__()
        self._timeout = timeout
        self._timer = timer
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def close(self) -> None:
        """Ends the process, whatever it is doing.

        Raises:
            SdbenchError: It does not end: the device is stuck.
        """
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is None or connection is None:
            return
        process.kill()
        connection.close()
        process.join(END_SECONDS)
        if process.is_alive():
            raise SdbenchError(f"the process that ran the last config does not end (process {process.pid}); the GPU may need a reset")
        process.close()

    def _ask(self, request: Request) -> None:
        if self._process is None:
            self._start()
        assert self._connection is not None
        # A process that died since its last answer is noticed when its next one is due.
        with contextlib.suppress(OSError):
            self._connection.send(request)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(other_end, self._timer), name="sdbench-worker", daemon=True)
        with _without_ctrl_c():
            self._process.start()
        other_end.close()

    def _receive(self, seconds: float) -> Message:
        assert self._connection is not None and self._process is not None
        try:
            if not self._connection.poll(min(seconds, threading.TIMEOUT_MAX)):
                lost = Lost("timeout", f"no answer within {seconds:g} s")
            else:
                message = self._connection.recv()
                if not isinstance(message, Lost):
                    return message
                lost = message
        except (EOFError, OSError):
            self._process.join(END_SECONDS)
            lost = Lost("crash", f"its process ended with exit code {self._process.exitcode}")
        self.close()
        raise lost


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """A process started inside never sees Ctrl-C, which a terminal sends to all: its parent ends it. The parent's own is only put off."""
    # The first process of a program starts this one too, and that lets the signal through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, timer: Timer) -> None:
    """The process: answers requests until its parent is gone, or until a config raises what may have spoilt the device."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Compilers and devices print as they like; the parent's stdout is for results.
    os.dup2(2, 1)
    bench = Bench(timer)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            importlib.import_module(request.case.module)
            for message in bench.answer(request):
                connection.send(message)
        except Exception as error:
            connection.send(Lost.by(error))
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
