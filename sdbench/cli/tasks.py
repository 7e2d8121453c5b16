"""Options that name a task and its data."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

if TYPE_CHECKING:
    from sdbench.suites.tasks.registry import Task

NAMES = "arithmetic (bundled), gsm8k, classeval, writingbench or fidelity"


def task_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--task`` and ``--data``."""
    for option in (
        click.option(
            "--data",
            type=click.Path(path_type=Path),
            help="The task's file; a part of it is held out and judged. Without --task, JSONL with question and numeric answer.  "
            "[default: $SDBENCH_DATA/TASK/..., else the hub]",
        ),
        click.option("--task", help=f"What is asked: {NAMES}.  [default: arithmetic, or your own questions in --data or --train]"),
    ):
        function = option(function)
    return function


def find_data(name: str | None, data: Path | None, split: bool = False) -> tuple["Task | None", Path | None]:
    """The task that was named, and the file of its data.

    Args:
        name: Of the task; None for none.
        data: A file that was named, or None.
        split: Whether the data is given in parts, so that no file is looked for.

    Raises:
        UsageError: An unknown name, or no way to find its data.
        SdbenchError: The data cannot be fetched.
    """
    from sdbench.suites.tasks.records import locate
    from sdbench.suites.tasks.registry import find_task

    if name is None:
        return None, data
    task = find_task(name)
    return task, data if split else locate(task, data, lambda line: print(line, file=sys.stderr))
