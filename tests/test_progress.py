"""Progress in a log: a line now and then, whatever the work is divided into."""

import io

import pytest
from rich.console import Console

from sdbench.progress import LINE_SECONDS, Progress, silent


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("sdbench.progress.time.monotonic", clock)
    return clock


def log() -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(Console(file=out, force_terminal=False)), out


def test_tasks_that_are_each_too_short_for_a_line(clock: Clock) -> None:
    """One after the other they are silent for no longer than one task is."""
    progress, out = log()
    for name in "abcdef":
        with progress.task(name, 2) as task:
            for _ in range(2):
                clock.now += LINE_SECONDS / 4
                task.advance()
    # Four quarters: at the end of every second task.
    assert out.getvalue().splitlines() == ["b: 2/2", "d: 2/2", "f: 2/2"]


def test_what_was_said_otherwise_counts(clock: Clock) -> None:
    progress, out = log()
    clock.now += LINE_SECONDS
    progress.note("half done")
    with progress.task("a", 2) as task:
        task.advance()
        assert out.getvalue() == "half done\n"
        clock.now += LINE_SECONDS
        task.advance()
    assert out.getvalue() == "half done\na: 2/2\n"


def test_a_task_around_others_has_lines_of_its_own(clock: Clock) -> None:
    progress, out = log()
    with progress.task("outer", 4) as outer:
        for number in range(4):
            with progress.task(f"inner {number}", 1) as inner:
                clock.now += 0.6 * LINE_SECONDS
                inner.advance()
            outer.advance()
    # The second inner line is due as the first outer one is; the outer task's own 15 s run on.
    assert out.getvalue().splitlines() == ["inner 1: 1/1", "outer: 2/4", "inner 3: 1/1", "outer: 4/4"]


def test_silent(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with silent().task("a", 1) as task:
        clock.now += LINE_SECONDS
        task.advance()
    assert capsys.readouterr() == ("", "")
