"""Generated code under lock: what it may do, what it may not, and what is said of it."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from sdbench.errors import SdbenchError
from sdbench.suites.tasks import sandbox
from sdbench.suites.tasks.sandbox import Execution, Limits, execute, require_sandbox, why_not

TESTS = """
import unittest

class AddTest(unittest.TestCase):
    def test_three(self):
        self.assertEqual(Adder().add(1, 2), 3)

    def test_five(self):
        self.assertEqual(Adder().add(2, 3), 5)

class Other(unittest.TestCase):
    def test_never(self):
        self.fail()
"""
QUICK = Limits(seconds=30, memory=256 << 20, files=1 << 20)

if (reason := why_not()) is not None:
    pytest.skip(f"no code can be locked away here: {reason}", allow_module_level=True)


def adder(body: str, imports: str = "", limits: Limits = QUICK) -> Execution:
    """Runs a class whose one method has that body."""
    code = "class Adder:\n    def add(self, a, b):\n" + textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    return execute(code, "Adder", TESTS, ["AddTest"], imports, limits)


class TestOutcomes:
    def test_passed(self) -> None:
        done = adder("return a + b")
        assert (done.outcome, done.reason, done.tests, done.tests_passed) == ("passed", None, 2, 2)
        assert done.seconds > 0

    def test_failed_names_the_first_test(self) -> None:
        done = adder("return 3")
        assert (done.outcome, done.tests, done.tests_passed) == ("failed", 2, 1)
        assert done.reason == "AddTest.test_five: AssertionError: 3 != 5"

    def test_an_exception_in_the_class_fails_its_test(self) -> None:
        done = adder("raise ValueError('what\\never')")
        assert (done.outcome, done.reason) == ("failed", "AddTest.test_five: ValueError: what ever")

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            ("class Adder:\n    def add(", "the reply does not run: SyntaxError"),
            ("1 / 0", "the reply does not run: ZeroDivisionError: division by zero"),
            ("import nothing_of_that_name", "the reply does not run: ModuleNotFoundError"),
            ("import sys\nsys.exit(0)", "the reply does not run: SystemExit: 0"),
            ("class Subtractor: ...", "the reply defines no class Adder"),
            ("Adder = 3", "the reply defines no class Adder"),
        ],
    )
    def test_error(self, code: str, reason: str) -> None:
        done = execute(code, "Adder", TESTS, ["AddTest"], limits=QUICK)
        assert done.outcome == "error" and done.reason and done.reason.startswith(reason)

    def test_imports_stand_before_the_code(self) -> None:
        assert adder("return math.floor(a + b)").outcome == "failed"
        assert adder("return math.floor(a + b)", "import math").outcome == "passed"

    def test_tests_that_cannot_run_are_not_the_replys_fault(self) -> None:
        done = execute("class Adder: ...", "Adder", "import nothing_of_that_name", ["AddTest"], limits=QUICK)
        assert done.outcome == "not_run" and done.reason and "the task's tests do not run" in done.reason
        assert execute("class Adder: ...", "Adder", TESTS, [], limits=QUICK).reason == "the task has no tests"

    def test_leaving_early_is_no_way_to_pass(self) -> None:
        done = adder("import os; os._exit(0)")
        assert (done.outcome, done.reason) == ("error", "the process ended with exit code 0 and without a result")
        assert adder("raise SystemExit(0)").outcome == "failed"

    def test_a_crash(self) -> None:
        done = adder("import ctypes; ctypes.string_at(0)")
        assert (done.outcome, done.reason) == ("error", "the process was killed by SIGSEGV before its tests were done")

    def test_chatter_is_no_result(self) -> None:
        assert adder("""print('{"outcome": "passed"}' * 10**6); return 0""").outcome == "failed"


class TestLimits:
    def test_an_endless_loop(self) -> None:
        done = adder("while True: pass", limits=Limits(seconds=1))
        assert done.outcome == "timeout" and done.seconds < 15

    def test_an_endless_sleep(self) -> None:
        done = adder("import time; time.sleep(60)", limits=Limits(seconds=1))
        assert (done.outcome, done.reason) == ("timeout", "more than 1 s") and done.seconds < 15

    def test_a_loop_that_catches_everything(self) -> None:
        body = """
            while True:
                try:
                    while True: pass
                except BaseException: pass
        """
        assert adder(body, limits=Limits(seconds=1)).outcome == "timeout"

    def test_memory(self) -> None:
        done = adder("hog = [bytearray(10**7) for _ in range(10**6)]; return a + b")
        assert (done.outcome, done.reason) == ("failed", "AddTest.test_five: MemoryError")

    @pytest.mark.parametrize(
        "start",
        [
            "import os\nwhile True: os.fork()",
            "import subprocess\nsubprocess.run(['true'])",
            "import os\nos.posix_spawn('/bin/true', ['true'], {})",
            "import multiprocessing\np = multiprocessing.Process(target=print)\np.start()",
        ],
    )
    def test_no_process(self, start: str) -> None:
        done = adder(f"{start}\nreturn a + b")
        assert done.outcome == "failed" and done.reason and "PermissionError" in done.reason

    def test_threads_are_few_and_do_not_hold_up_the_end(self) -> None:
        body = """
            import threading, time
            threading.Thread(target=time.sleep, args=(60,)).start()
            return a + b
        """
        done = adder(body)
        assert done.outcome == "passed" and done.seconds < QUICK.seconds
        done = adder("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()")
        assert done.outcome == "failed" and done.reason and "can't start new thread" in done.reason


class TestWalls:
    @pytest.mark.parametrize("address", ["('192.0.2.1', 80)", "('127.0.0.1', 80)"])
    def test_no_network(self, address: str) -> None:
        done = adder(f"import socket\nsocket.create_connection({address}, 2)")
        assert done.outcome == "failed" and done.reason and "Network is unreachable" in done.reason

    def test_no_file_outside(self, tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        kept.write_text("as it was")
        for deed in (f"open({str(tmp_path / 'new')!r}, 'w')", f"open({str(kept)!r}, 'a')", f"os.remove({str(kept)!r})"):
            done = adder(f"import os\n{deed}\nreturn a + b")
            assert done.outcome == "failed" and done.reason and "Read-only file system" in done.reason
        assert [path.name for path in tmp_path.iterdir()] == ["kept"] and kept.read_text() == "as it was"

    def test_files_inside_are_few_and_gone_afterwards(self) -> None:
        body = """
            import os, pathlib, tempfile
            pathlib.Path("here").write_text("x")
            assert os.path.dirname(tempfile.mkstemp()[1]) == os.getcwd()
            open(os.devnull, "w").write("x")
            return a + b if len(os.listdir()) >= 2 else os.getcwd()
        """
        assert adder(body).outcome == "passed"
        done = adder("open('here', 'wb').write(bytes(2 << 20))")
        assert done.outcome == "failed" and done.reason and ("File too large" in done.reason or "No space left" in done.reason)
        place = adder("import os\nraise ValueError(os.getcwd())").reason
        assert place and not Path(place.rpartition(" ")[2]).exists()

    def test_what_is_locked_cannot_be_unlocked(self, tmp_path: Path) -> None:
        body = f"""
            import ctypes, os
            libc = ctypes.CDLL(None)
            libc.unshare(0x10000000 | 0x20000)
            libc.mount(b"none", b"/", None, 32 | 4096, None)
            open({str(tmp_path / "new")!r}, "w")
        """
        done = adder(body)
        assert done.outcome == "failed" and done.reason and "Read-only file system" in done.reason

    def test_no_other_process_is_in_reach(self) -> None:
        done = adder("import os, signal\nos.kill(-1, signal.SIGKILL)")
        assert done.outcome == "failed" and done.reason and "ProcessLookupError" in done.reason

    def test_nothing_of_the_users_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SDBENCH_JUDGE_KEY", "secret")
        assert adder("import os\nassert 'secret' not in str(os.environ)\nreturn a + b").outcome == "passed"


def test_a_machine_that_cannot_lock_code_away_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "why_not", lambda: "the kernel refuses")
    with pytest.raises(SdbenchError, match="so that it is not run: the kernel refuses"):
        require_sandbox()


def running(limits: Limits) -> list[int]:
    """Processes of a job with an odd number of bytes as its limit, which stands among their arguments."""
    return [process.pid for process in psutil.process_iter(["cmdline"]) if str(limits.memory) in str(process.info["cmdline"])]


def test_after_a_timeout_nothing_is_left_running() -> None:
    limits = Limits(seconds=1, memory=(256 << 20) + os.getpid())
    assert adder("import time; time.sleep(60)", limits=limits).outcome == "timeout"
    assert running(limits) == []


def test_after_a_kill_nothing_is_left_running() -> None:
    limits = Limits(seconds=300, memory=(512 << 20) + os.getpid())
    code = "class Adder:\n    def add(self, a, b):\n        import time; time.sleep(300)"
    job = f"from sdbench.suites.tasks.sandbox import *; execute({code!r}, 'Adder', {TESTS!r}, ['AddTest'], limits={limits!r})"
    with subprocess.Popen([sys.executable, "-c", job]) as process:
        deadline = time.monotonic() + 60
        # Outside, its first process, then the one that keeps the namespaces and the one that runs the tests.
        while len(running(limits)) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        found = running(limits)
        process.kill()
    assert len(found) == 4
    while (left := running(limits)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
