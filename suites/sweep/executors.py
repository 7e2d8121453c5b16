"""Where runs are executed: processes of this machine, or tasks of a Ray cluster. One GPU a run, or one run at once without a GPU."""

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from sdbench.errors import SdbenchError, UsageError
from sdbench.suites.e2e.arms import is_timed
from sdbench.suites.sweep.work import GRACE_SECONDS, Ended, Job, check, work
from sdbench.words import counted

Runs = Sequence[Mapping[str, Sequence[str]]]

CONNECT_SECONDS, STATUS_SECONDS = 5, 30
"""What a cluster has to open its port, and to answer."""


class Executor(Protocol):
    """What a sweep needs of the place where its runs are executed.

    Attributes:
        name: As ``--executor`` has it.
    """

    name: str

    @property
    def slots(self) -> int:
        """Runs at once; known after ``check``."""

    def check(self, runs: Runs, folder: str) -> dict[str, Any]:
        """:func:`sdbench.suites.sweep.work.check`, where the runs would be executed."""

    def submit(self, job: Job) -> "Future[Ended]":
        """Starts a job; the future's exception says how its worker was lost."""

    def stop(self) -> None:
        """Interrupts what is still going on and waits until it has ended."""


def on_gpus(found: Mapping[str, Any]) -> int:
    """GPUs that runs are spread over: none where none of them wants one."""
    return int(found["gpus"]) if any(one.get("device") != "cpu" for one in found["arguments"]) else 0


class LocalExecutor:
    """Processes of this machine, each with one of its GPUs, which runs that time nothing may share.

    Args:
        jobs: Runs at once; None for one a GPU, or one.
    """

    name = "local"

    def __init__(self, jobs: int | None = None):
        self._jobs = jobs
        self._stopped = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._share(jobs or 1, [])

    def check(self, runs: Runs, folder: str) -> dict[str, Any]:
        """Checks the runs and counts the GPUs.

        Raises:
            UsageError: More jobs than GPUs: two runs on one GPU would time each other.
            SdbenchError: The check itself fails.
        """
        found = check(runs, folder)
        gpus = on_gpus(found)
        if (
            self._jobs
            and gpus
            and self._jobs > gpus
            and any(is_timed(one.get("fidelity"), one.get("rate_repeats")) for one in found["arguments"])
        ):
            shared = f"--jobs {self._jobs} with {counted(gpus, 'GPU')}: runs that share one would time each other"
            raise UsageError(f"{shared}; ask for one a GPU, or for no times (rate-repeats: 0, or fidelity-only)")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._share(self._jobs or gpus or 1, visible.split(",") if visible and gpus else [str(index) for index in range(gpus)])
        return found

    def _share(self, slots: int, gpus: Sequence[str]) -> None:
        self.slots = slots
        self._free: queue.Queue[tuple[int, str | None]] = queue.Queue()
        for slot in range(slots):
            self._free.put((slot, gpus[slot % len(gpus)] if gpus else None))

    def submit(self, job: Job) -> "Future[Ended]":
        """Starts a process on a free GPU."""
        self._pool = self._pool or ThreadPoolExecutor(self.slots)
        return self._pool.submit(self._work, job)

    def _work(self, job: Job) -> Ended:
        slot, gpu = self._free.get()
        try:
            extra = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
            job = Job(job.command, job.folder, job.log, {**job.environment, **extra}, job.program)
            return work(job, f"process {slot + 1}", self._stopped.is_set)
        finally:
            self._free.put((slot, gpu))

    def stop(self) -> None:
        """Interrupts the processes and waits for them."""
        self._stopped.set()
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


class RayExecutor:
    """Tasks of a Ray cluster, one GPU each.

    Args:
        address: Of the cluster, ``HOST:PORT`` or ``auto``; None starts one of this machine alone.
        jobs: The most runs at once; None for one a GPU, or one.

    Raises:
        SdbenchError: Ray is not installed, or the cluster cannot be reached.
    """

    name = "ray"

    def __init__(self, address: str | None = None, jobs: int | None = None):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # What Ray is going to do for tasks without a GPU, and warns of where it is not set.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError as error:
            raise SdbenchError("--executor ray needs Ray, which is not installed: pip install 'sdbench[ray]'") from error
        self._ray, self._jobs = ray, jobs
        self._refs: dict[Future[Ended], Any] = {}
        self._gpu = 0
        if address:
            _require_reachable(address)
        where = {"address": address} if address else {"address": "local", "num_cpus": jobs or None, "include_dashboard": False}
        try:
            # Its workers say nothing that is not in the runs' logs.
            ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            named = f"the Ray cluster at {address} cannot be reached" if address else "Ray cannot start"
            raise SdbenchError(f"{named}: {_first_line(error)}") from error
        self._gpu = 1 if ray.cluster_resources().get("GPU") else 0

    @property
    def slots(self) -> int:
        """``jobs``, or the GPUs that the cluster has now where those are fewer or no ``jobs`` were asked for."""
        gpus = int(self._ray.cluster_resources().get("GPU", 0)) if self._gpu else 0
        return min(self._jobs or gpus, gpus) or self._jobs or 1

    def check(self, runs: Runs, folder: str) -> dict[str, Any]:
        """Checks the runs on a worker, whose machine decides what their defaults are.

        Raises:
            SdbenchError: The check itself fails.
        """
        reference = self._remote(check).remote(runs, folder)
        try:
            found: dict[str, Any] = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise SdbenchError(self._explain(error)) from error
        self._gpu = min(self._gpu, on_gpus(found))
        return found

    def submit(self, job: Job) -> "Future[Ended]":
        """Starts a task; Ray itself never repeats it, so that every attempt is recorded."""
        reference = self._remote(_on_ray).remote(job)
        told: Future[Ended] = Future()
        self._refs[told] = reference

        def pass_on(done: "Future[Ended]") -> None:
            error = done.exception()
            if error:
                told.set_exception(SdbenchError(self._explain(error)))
            else:
                told.set_result(done.result())

        reference.future().add_done_callback(pass_on)
        return told

    def _remote(self, function: Any) -> Any:
        return self._ray.remote(function).options(num_cpus=1, num_gpus=self._gpu, max_retries=0)

    def _explain(self, error: BaseException) -> str:
        cause = getattr(error, "cause", None)
        if isinstance(cause, SdbenchError):
            return str(cause)
        return f"lost its worker or node ({type(error).__name__}: {_first_line(cause or error)})"

    def stop(self) -> None:
        """Interrupts the tasks, waits for them, and leaves the cluster."""
        if not self._ray.is_initialized():
            return
        going = [reference for future, reference in self._refs.items() if not future.done()]
        for reference in going:
            self._ray.cancel(reference)
        if going:
            self._ray.wait(going, num_returns=len(going), timeout=GRACE_SECONDS + 5)
        self._ray.shutdown()


def _on_ray(job: Job) -> Ended:
    import ray

    return work(job, f"node {ray.get_runtime_context().get_node_id()[:8]}, process {os.getpid()}")


def _require_reachable(address: str) -> None:
    """Asks the port, then Ray's own status command: ``ray.init`` tries for minutes, and may end the process rather than raise."""
    if address in ("auto", "local"):
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError(f"--ray-address {address}: it is HOST:PORT, or auto")
    try:
        with contextlib.closing(socket.create_connection((host, int(port)), CONNECT_SECONDS)):
            pass
        status = [sys.executable, "-m", "ray.scripts.scripts", "status", f"--address={address}"]
        done = subprocess.run(status, capture_output=True, timeout=STATUS_SECONDS, check=False)
        fault = f"'ray status --address {address}' fails" if done.returncode else None
    except subprocess.TimeoutExpired:
        fault = f"the port is open, and no Ray answers there within {STATUS_SECONDS} seconds"
    except (OSError, OverflowError) as error:
        fault = str(error)
    if fault:
        raise SdbenchError(f"the Ray cluster at {address} cannot be reached: {fault}; 'ray status' on its head node tells whether it runs")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
