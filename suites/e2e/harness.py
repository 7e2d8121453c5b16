"""lm-evaluation-harness on a live model: its tasks for every arm, as an optional extra."""

import contextlib
import io
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdbench.calibrate.registry import did_you_mean
from sdbench.errors import SdbenchError, UsageError
from sdbench.models import LoadedModel


@dataclass(frozen=True)
class HarnessTasks:
    """What is asked of the harness.

    Attributes:
        names: Its tasks, groups or tags.
        folder: A folder of task files of one's own, or None.
        limit: Examples a task at most; None for all.
    """

    names: tuple[str, ...]
    folder: Path | None = None
    limit: int | None = None

    def check(self) -> None:
        """Refuses, before anything is loaded, what could not be run after it.

        Raises:
            UsageError: The extra is not installed, or a task is unknown.
        """
        if self.folder and not self.folder.is_dir():
            raise UsageError(f"--lm-eval-path {self.folder}: no such folder")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--lm-eval-limit is {self.limit}; it must be at least 1")
        known = _manager(self.folder).all_tasks
        for name in self.names:
            if name not in known:
                raise UsageError(f"--lm-eval {name}: lm-evaluation-harness has no such task; {_near(name, known)}")

    def run(self, loaded: LoadedModel, batch_size: int) -> list[dict[str, Any]]:
        """Every task on the model as it is now, prompts and replies on the same weights.

        Args:
            loaded: The model, in eval mode.
            batch_size: Requests at once.

        Returns:
            A figure each: task, metric, filter, value, stderr (None where the harness has none), samples, and whether higher is better.

        Raises:
            SdbenchError: The harness gives up: no data, or a task that takes more than this; says what it said.
        """
        manager = _manager(self.folder)
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        try:
            with _quiet():
                model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size)
                found: Any = simple_evaluate(
                    model=model, tasks=list(self.names), task_manager=manager, limit=self.limit, log_samples=False, verbosity="ERROR"
                )
        except Exception as error:  # tasks and their data sets raise whatever they like
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise SdbenchError(f"lm-evaluation-harness, {', '.join(self.names)}: {said}") from error
        return [figure for task, results in found["results"].items() for figure in _figures(task, results, found)]


def _figures(task: str, results: dict[str, Any], found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key, value in results.items():
        metric, comma, kept = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = results.get(f"{metric}_stderr,{kept}")
        yield {
            "task": task,
            "version": found["versions"].get(task),
            "metric": metric,
            "filter": kept,
            "value": float(value),
            "stderr": float(stderr) if isinstance(stderr, int | float) else None,
            "samples": found["n-samples"].get(task, {}).get("effective"),
            "higher_is_better": found["higher_is_better"].get(task, {}).get(metric),
        }


def _manager(folder: Path | None) -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UsageError(f"--lm-eval needs lm-evaluation-harness ({error}): pip install 'sdbench[lm-eval]'") from error
    with _quiet():
        return TaskManager(include_path=str(folder) if folder else None)


def _near(name: str, known: Sequence[str]) -> str:
    told = did_you_mean(name, known)
    # The harness has thousands.
    return told if told.startswith("did you mean") else "'lm-eval ls tasks' lists them"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, neither the harness's bars and logs nor those of what it starts reach the terminal, which belongs to the command line."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
