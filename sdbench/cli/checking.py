"""``python -m sdbench.cli.checking``: checks command lines by their command's own code, up to where a run directory would be opened.

Reads a JSON list of e2e command lines from stdin, each as option -> its part, and writes what :func:`sdbench.suites.sweep.work.check`
promises to stdout.
"""

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from click.exceptions import ClickException

from sdbench.cli.e2e import command
from sdbench.cli.options import Checked, checking
from sdbench.errors import ExitCode, SdbenchError

Typed = Mapping[str, Sequence[str]]


def main() -> None:
    """Entry point."""
    import torch

    from sdbench.results import strict_json

    arguments, fault = [], {}
    # A library that prints while it is imported must not spoil the document.
    with contextlib.redirect_stdout(sys.stderr):
        for typed in json.load(sys.stdin):
            try:
                arguments.append(_arguments(typed))
            except SdbenchError as error:
                keys = [key for key in typed if _message(typed, key) != str(error)]
                fault = {"error": str(error), "code": int(error.exit_code), "keys": keys}
                break
    sys.stdout.write(strict_json({"gpus": torch.cuda.device_count(), "arguments": arguments, **fault}))


def _arguments(typed: Typed) -> dict[str, Any]:
    """All options of a run, as its run directory would hold them.

    Raises:
        SdbenchError: As the command would.
    """
    try:
        with checking():
            command.main([part for parts in typed.values() for part in parts], prog_name="e2e", standalone_mode=False)
    except Checked as done:
        return done.arguments
    except ClickException as error:
        raise SdbenchError(" ".join(error.format_message().split()), ExitCode.USAGE) from error
    raise SdbenchError("the command opened no run directory")


def _message(typed: Typed, without: str) -> str | None:
    """What the command says without one of its options."""
    try:
        _arguments({key: parts for key, parts in typed.items() if key != without})
    except SdbenchError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main()
