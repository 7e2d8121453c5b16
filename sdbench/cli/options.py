"""Options and steps that several commands share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from sdbench.errors import ExitCode, SdbenchError

if TYPE_CHECKING:
    from sdbench.results import RunDirectory

OUTPUT_HELP = "Run directory for run.json, rows.jsonl and samples.jsonl; the same command with the same folder resumes."
NOTHING_KEPT = "without --output nothing is kept"


def output_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--output DIR``."""
    return click.option("--output", type=click.Path(path_type=Path), help=OUTPUT_HELP)(function)


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")(function)


def device_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--device``."""
    return click.option("--device", default="auto", show_default=True, help="auto, cuda, cuda:N or cpu.")(function)


@contextmanager
def run_directory(
    output: Path | None, command: str, arguments: dict[str, Any], environment: dict[str, Any]
) -> Iterator["RunDirectory | None"]:
    """Opens ``--output`` as a run directory, or yields None without one.

    Args:
        output: The folder.
        command: The command's name.
        arguments: Every option that changes a result.
        environment: The machine.

    Raises:
        SdbenchError: Ctrl-C, once the run directory has recorded it; says where the finished rows are.
    """
    from sdbench.results import RunDirectory

    try:
        with RunDirectory.open(output, command, arguments, environment) if output else nullcontext() as directory:
            yield directory
    except KeyboardInterrupt as error:
        kept = f"what is finished is in {output}, and the same command with --output {output} goes on" if output else NOTHING_KEPT
        raise SdbenchError(f"interrupted; {kept}", ExitCode.INTERRUPTED) from error
