"""The command line in a process that kills itself at a point of its own choice; forked from a server that has imported everything."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def call(arguments: Sequence[str], folder: str, at: int | None, torn: int) -> None:
    """Calls ``sdbench``.

    Args:
        arguments: Of the command line.
        folder: Where.
        at: The write, counted from 1, that SIGKILL ends: once its bytes are in the file, before anything else happens. None for none.
        torn: Bytes that this write leaves out at its end.
    """
    import torch

    from sdbench.cli import main

    torch.set_num_threads(1)
    os.chdir(folder)
    sys.stdout = sys.stderr = Path("log").open("a", buffering=1)  # noqa: SIM115 - the process ends with it
    fsync, count = os.fsync, 0

    def synced(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == at:
            if torn:
                os.ftruncate(descriptor, max(0, os.fstat(descriptor).st_size - torn))
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    patched: Any = synced
    os.fsync = patched
    sys.argv = ["sdbench", *arguments]
    main()
