"""Errors meant for the user: one line that says what is wrong, where, and what to do."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    OK = 0
    ERROR = 1
    USAGE = 2
    CHECK_FAILED = 3
    SLOWER = 4
    NOTHING_SELECTED = 5
    INTERRUPTED = 130


class SdbenchError(Exception):
    """Bad input or a failed run, told in one line; the command line prints it without a traceback.

    Args:
        message: What is wrong, where, and what to do about it.
        exit_code: The process's exit code.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ERROR):
        super().__init__(message)
        self.exit_code = exit_code


class UsageError(SdbenchError):
    """An argument or option that cannot be taken (exit code 2)."""

    def __init__(self, message: str):
        super().__init__(message, ExitCode.USAGE)


class CheckFailed(SdbenchError):
    """A result that failed its check (exit code 3)."""

    def __init__(self, message: str):
        super().__init__(message, ExitCode.CHECK_FAILED)
