"""``python child.py PARENT COMMAND...``: becomes COMMAND, which the kernel ends when PARENT dies, so that no run outlives its worker.

A run whose worker was killed would hold its GPU's memory and its directory's lock against the next attempt.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    # Ray blocks Ctrl-C's signal in what it starts, and a shell ignores it in what it starts in the background.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(sys.argv[1]):
            sys.exit(1)  # it died before it could be asked for
    os.execv(sys.argv[2], sys.argv[2:])
