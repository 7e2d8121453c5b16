"""Progress on stderr: bars on a terminal, a line now and then in a log. Results never go through here."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

LINE_SECONDS = 15
"""Least time between two progress lines of one task, and from any line to the first of a new task, where there is no terminal."""


class Progress:
    """Reports long work; use as a context manager.

    Args:
        console: Where to write; stderr when None.
    """

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = RichProgress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        """Prints one line, verbatim."""
        self.console.print(text, markup=False, emoji=False, soft_wrap=True)
        self._last_line = time.monotonic()

    @contextmanager
    def task(self, label: str, total: int) -> Iterator["Task"]:
        """Opens a task of ``total`` steps."""
        bar = self._bars.add_task(escape(label), total=total)
        try:
            yield Task(self, bar, label, total)
        finally:
            self._bars.remove_task(bar)


def silent() -> Progress:
    """Reports nothing: for callers that do not ask."""
    return Progress(Console(quiet=True))


class Task:
    """One piece of long work; made by :meth:`Progress.task`."""

    def __init__(self, progress: Progress, bar: TaskID, label: str, total: int):
        self._progress, self._bar, self._label, self._total = progress, bar, label, total
        self._done = 0
        # Many short tasks may not be silent for longer than one.
        self._last_line = progress._last_line

    def advance(self, steps: int = 1) -> None:
        """Counts finished steps."""
        self._done += steps
        self._progress._bars.advance(self._bar, steps)
        if not self._progress.console.is_terminal and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._progress.note(f"{self._label}: {self._done}/{self._total}")
            self._last_line = time.monotonic()
