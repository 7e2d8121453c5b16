"""In place of sdbench: makes a run directory as ``sdbench e2e`` does, in half a second; ``--task`` says how it ends.

ok; fail (always); once (fails in its first attempt); killed (by itself, as by a machine without memory, in its first attempt); orphaned
(kills what started it, in its first attempt); slow (a minute, unless it is told to go on); memory (of a GPU); wrong (usage).
"""

import os
import signal
import sys
import time
from pathlib import Path

from sdbench.results import RunDirectory

given = dict(part.removeprefix("--").split("=", 1) for part in sys.argv[2:])
output, task = Path(given.pop("output")), given["task"]
ARM = {
    "record": "arm", "arm": "dense", "pattern": None, "method": None, "examples": 2, "answer_match": 1, "eos": 2, "truncated": 0,
    "quality_reason": None, "equal_tokens": 4, "decode_rate": 10.0, "decode_rate_spread": None, "decode_rate_note": None, "speedup": None,
    "speedup_reason": None, "variant": None, "kernel_calls": 0, "expected_kernel_calls": 0, "ceiling": None, "ceiling_reason": None,
    "peak_bytes": None, "peak_bytes_reason": None, "path": None, "path_reason": None,
}  # fmt: skip


def error(text: str, code: int = 1) -> None:
    sys.stderr.write(f"loading\nsdbench: error: {text}\n")
    sys.exit(code)


if task == "wrong":
    error("not so", 2)
with RunDirectory.open(output, "e2e", given, {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}) as directory:
    first = len(directory.record.audit) == 1
    if task == "fail" or (task == "once" and first):
        error("no luck")
    if task == "memory":
        error("unexpected OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.")
    if task == "killed" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "orphaned" and first:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if task == "slow":
        deadline = time.monotonic() + 60
        while not (output.parent / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    directory.add_row(ARM)
