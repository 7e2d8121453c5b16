"""Runs a generated class against its unit tests where it can do no harm: no network, no processes, no files, little time and memory.

It guards the machine against what a model writes by accident; it is no wall against an attacker who knows a hole in the kernel.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sdbench.errors import SdbenchError
from sdbench.suites.tasks import sandboxed

ExecutionOutcome = Literal["passed", "failed", "error", "timeout", "not_run"]


@dataclass(frozen=True)
class Limits:
    """What one reply's code may use.

    Attributes:
        seconds: Of processor time, and of time on the clock from its start to the end of its tests.
        memory: Bytes of address space.
        files: Bytes of all files that it writes; they lie in memory and are gone afterwards.
    """

    seconds: int = 20
    memory: int = 1 << 30
    files: int = 64 << 20


@dataclass(frozen=True)
class Execution:
    """How the tests of one class ended.

    Attributes:
        outcome: ``passed``: every test; ``failed``: a test did not pass; ``error``: the reply cannot be run to the end of its tests;
            ``timeout``; ``not_run``: nothing was tried, or the fault is not the reply's.
        reason: Why, in one line; None when passed.
        tests: Tests that ran.
        tests_passed: Those that passed.
        seconds: Time on the clock.
    """

    outcome: ExecutionOutcome
    reason: str | None
    tests: int = 0
    tests_passed: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything by name."""
        return asdict(self)


def execute(
    code: str, class_name: str, tests: str, test_classes: Sequence[str], imports: str = "", limits: Limits | None = None
) -> Execution:
    """Runs one class against its tests, in a process of its own that is locked away.

    Args:
        code: What the model wrote.
        class_name: The class that it must define.
        tests: Source of the unit tests.
        test_classes: Names of the ``TestCase`` classes in it that count.
        imports: Import statements that stand before the code.
        limits: Time, memory and files.

    Returns:
        The outcome; never raises for what the code does.
    """
    limits = limits or Limits()
    job = {"code": code, "class_name": class_name, "tests": tests, "test_classes": list(test_classes), "imports": imports}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sdbench-") as folder:
        process = subprocess.Popen(
            [sys.executable, *sandboxed.FLAGS, str(Path(sandboxed.__file__).resolve()), "enclose", folder, json.dumps(asdict(limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(json.dumps(job).encode(), timeout=limits.seconds)
            found = _read(out, process.returncode)
        except subprocess.TimeoutExpired:
            found = Execution("timeout", f"more than {limits.seconds} s")
        finally:
            # Its death is that of everything in its namespaces.
            process.kill()
            process.communicate()
    return replace(found, seconds=time.perf_counter() - start)


@cache
def why_not() -> str | None:
    """Why this machine cannot lock code away; None where it can. Tries it once."""
    tests = "import unittest\nclass T(unittest.TestCase):\n    def test(self): pass"
    done = execute("class A: pass", "A", tests, ["T"])
    return None if done.outcome == "passed" else done.reason


def require_sandbox() -> None:
    """Checks that code can be locked away here.

    Raises:
        SdbenchError: It cannot; code is then not run at all.
    """
    if sys.platform != "linux":
        raise SdbenchError("--allow-code-execution needs Linux: generated code runs in namespaces of its own, or not at all")
    if (reason := why_not()) is not None:
        raise SdbenchError(
            f"--allow-code-execution: generated code cannot be locked away here, so that it is not run: {reason}; "
            "allow unprivileged user namespaces, or run on another machine"
        )


def _environment(folder: str) -> dict[str, str]:
    # Nothing of the user's: an environment may hold keys. One thread each, since threads count as memory.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **threads}


def _read(out: bytes, code: int) -> Execution:
    try:
        return Execution(**json.loads(out))
    except (ValueError, TypeError):
        return Execution("error", f"the process ended with exit code {code} and without a result")
