"""The inside of the sandbox: a script of the standard library alone, which runs one generated class against its unit tests.

``sandbox.py`` starts it as ``sandboxed.py enclose FOLDER LIMITS``. That process leaves the machine's network, processes and files for
namespaces of its own, and starts ``sandboxed.py test LIMITS`` there, without privileges. Standard input is the job, standard output the
result; each is one JSON document.
"""

import ctypes
import json
import os
import platform
import random
import resource
import signal
import struct
import sys
import types
import unittest
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x1000, 0x4000, 0x40000, 0x2, 0x4
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 0x1, 0x2, 0x4
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
PLAIN_USER = 1000
"""Who the code is inside: not 0, so that the second start of Python drops every privilege."""

MACHINES = {"x86_64": (0xC000003E, 56, (57, 58)), "aarch64": (0xC00000B7, 220, ())}
"""By machine: its number in seccomp, that of ``clone``, and those of ``fork`` and ``vfork`` where they exist."""
CLONE3, CLONE_THREAD = 435, 0x10000

FLAGS = ("-s", "-P", "-B", "-X", "utf8")
"""Of Python: no packages of the user's home, none from the folder it starts in, no byte code written, UTF-8."""

REASON = 300
"""Characters of a reason that are kept."""

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The machine does not let a process be locked away."""


def enclose(folder: str, limits: dict[str, int]) -> None:
    """Makes the namespaces, runs the tests in them, and says how that ended where the tests could not."""
    try:
        isolate(folder, limits["files"])
    except Refused as refusal:
        write({"outcome": "not_run", "reason": str(refusal)})
        return
    # Not before: new namespaces make the kernel forget it.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    keeper = os.fork()
    if keeper == 0:
        # The first process of the new namespace: when it ends, and it does when its parent is killed, the kernel kills all others there.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        runner = os.fork()
        if runner == 0:
            os.chdir(folder)
            os.execv(sys.executable, [sys.executable, *FLAGS, __file__, "test", json.dumps(limits)])
        os._exit(as_exit_code(os.waitpid(runner, 0)[1]))
    code = as_exit_code(os.waitpid(keeper, 0)[1])
    if code == 128 + signal.SIGXCPU:
        write({"outcome": "timeout", "reason": f"more than {limits['seconds']} s of processor time"})
    elif code:
        what = f"was killed by {signal.Signals(code - 128).name}" if code > 128 else f"ended with exit code {code}"
        write({"outcome": "error", "reason": f"the process {what} before its tests were done"})


def isolate(folder: str, size: int) -> None:
    """No network, no other processes, every file read-only but those of a folder in memory, which is empty."""
    user, group = os.getuid(), os.getgid()
    kinds = CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC
    call("namespaces for users, the network, processes and files", libc.unshare(kinds))
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{PLAIN_USER} {user} 1"), ("gid_map", f"{PLAIN_USER} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - of /proc, written in one go
                file.write(text)
    except OSError as error:
        raise Refused(f"the kernel refuses a user of its own for the code ({error.strerror})") from error
    call("mounts of its own", libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    set_mount(b"/", AT_RECURSIVE, on=ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    call("a device that swallows output", libc.mount(b"/dev/null", b"/dev/null", None, MS_BIND, None))
    set_mount(b"/dev/null", 0, off=ATTR_NODEV)
    options = f"size={size},mode=0700".encode()
    call("a folder in memory", libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options))


def set_mount(path: bytes, flags: int, on: int = 0, off: int = 0) -> None:
    """Changes attributes of a mount, and with ``AT_RECURSIVE`` of those below it."""
    attributes = struct.pack("QQQQ", on, off, 0, 0)
    done = libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, flags, attributes, ctypes.c_size_t(len(attributes)))
    call("read-only files", done)


def call(what: str, result: int) -> None:
    """Raises for a C call that did not return 0."""
    if result:
        raise Refused(f"the kernel refuses {what} ({os.strerror(ctypes.get_errno())})")


def limit(limits: dict[str, int]) -> None:
    """Limits of one process, and a filter that lets it start threads but no process."""
    for kind, most in (
        (resource.RLIMIT_CPU, limits["seconds"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["files"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    call("a process without new privileges", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if platform.machine() not in MACHINES:
        raise Refused(f"no filter of system calls is known for a {platform.machine()}")
    number, clone, forks = MACHINES[platform.machine()]
    # Loads of seccomp_data: 4 the machine, 0 the system call, 16 the low half of its first argument.
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, number), (0x06, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
    # An old ABI of x86_64 numbers the same calls from this bit on.
    steps += [(0x35, 0, 1, 0x40000000), (0x06, 0, 0, 0x50001)] if number == MACHINES["x86_64"][0] else []
    # ENOSYS: the C library then starts a thread through clone, whose flags can be looked at.
    steps += [(0x15, 0, 1, CLONE3), (0x06, 0, 0, 0x50026)]
    for fork in forks:
        steps += [(0x15, 0, 1, fork), (0x06, 0, 0, 0x50001)]
    steps += [(0x15, 0, 3, clone), (0x20, 0, 0, 16), (0x45, 1, 0, CLONE_THREAD), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    call("a filter of system calls", libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def test(limits: dict[str, int]) -> NoReturn:
    """Runs the job and ends the process, whatever threads the code has left behind."""
    job = json.load(sys.stdin)
    result = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    try:
        limit(limits)
        found = run_tests(job)
    except Refused as refusal:
        found = {"outcome": "not_run", "reason": str(refusal)}
    write(found, result)
    os._exit(0)


def run_tests(job: dict[str, Any]) -> dict[str, Any]:
    """The reply's code, then the tests in its namespace: that of one module, as if both stood in one file."""
    module = types.ModuleType("reply")
    module.__file__ = os.path.abspath("reply.py")  # noqa: PTH100 - a text, as Python itself puts it there
    sys.modules["reply"] = module
    try:
        for name, code in (("imports", job["imports"]), ("reply", job["code"])):
            exec(compile(code, f"{name}.py", "exec"), vars(module))
    except BaseException as error:
        return {"outcome": "error", "reason": f"the reply does not run: {describe(error)}"}
    if not isinstance(vars(module).get(job["class_name"]), type):
        return {"outcome": "error", "reason": f"the reply defines no class {job['class_name']}"}
    try:
        exec(compile(job["tests"], "tests.py", "exec"), vars(module))
        suite = unittest.TestSuite(
            unittest.defaultTestLoader.loadTestsFromTestCase(vars(module)[name.strip()]) for name in job["test_classes"]
        )
    except BaseException as error:
        return {"outcome": "not_run", "reason": f"the task's tests do not run: {describe(error)}"}
    random.seed(0)  # a test that draws must draw the same for every model
    outcome = Collected()
    suite.run(outcome)
    counts = {"tests": outcome.testsRun, "tests_passed": outcome.testsRun - len({name for name, _ in outcome.faults})}
    if not outcome.testsRun:
        return {"outcome": "not_run", "reason": "the task has no tests"}
    if outcome.faults:
        name, fault = outcome.faults[0]
        return {"outcome": "failed", "reason": f"{name}: {fault}"[:REASON], **counts}
    return {"outcome": "passed", "reason": None, **counts}


class Collected(unittest.TestResult):
    """What went wrong, as one line a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[tuple[str, str]] = []

    def addFailure(self, test: Any, err: Any) -> None:
        """A false assertion."""
        self.faults.append((short(test), describe(err[1])))

    addError = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        """A part of a test."""
        if err is not None:
            self.faults.append((short(test), describe(err[1])))

    def addUnexpectedSuccess(self, test: Any) -> None:
        """A test that was to fail."""
        self.faults.append((short(test), "passed, and was to fail"))


def short(test: Any) -> str:
    """A test's class and name."""
    return ".".join(str(test.id()).split(".")[-2:]) if hasattr(test, "id") else str(test)


def describe(error: BaseException) -> str:
    """An exception in one line, cut."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # whatever the code's own exceptions do
        text = ""
    return f"{type(error).__name__}: {text}"[:REASON] if text else type(error).__name__


def as_exit_code(status: int) -> int:
    """What a shell would show: 128 and the signal's number for a killed process."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def write(result: dict[str, Any], file: int = 1) -> None:
    """Hands the result over."""
    os.write(file, json.dumps(result).encode())


if __name__ == "__main__":
    if sys.argv[1] == "enclose":
        enclose(sys.argv[2], json.loads(sys.argv[3]))
    else:
        test(json.loads(sys.argv[2]))
