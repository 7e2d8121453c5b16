"""Errors meant for the user: one line that says what is wrong, where, and what to do."""

from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of the command line.

    USAGE: what was typed is wrong, and another command is the way out: an option or a name that does not exist, a number out of range,
    options that exclude each other, a file, folder or hub id that is not there or is not of the kind that the option takes.
    ERROR: the command may be right and the world is not: no GPU, no network, no room, no permission, a damaged file, a broken model.
    """

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
    """What was typed cannot be taken (exit code 2); :class:`ExitCode` says where that ends."""

    def __init__(self, message: str):
        super().__init__(message, ExitCode.USAGE)


def cannot_read(path: Path, error: OSError) -> SdbenchError:
    """The error for a file that the command line names: of usage where the name is wrong, else of the world."""
    message = f"cannot read {path}: {error.strerror}"
    wrong_name = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return UsageError(message) if wrong_name else SdbenchError(message)


def one_line(error: BaseException, most: int = 300) -> str:
    """An exception's text without its line breaks, or its kind where it has none."""
    return " ".join(str(error).split())[:most] or type(error).__name__


class CheckFailed(SdbenchError):
    """A result that failed its check (exit code 3)."""

    def __init__(self, message: str):
        super().__init__(message, ExitCode.CHECK_FAILED)
