"""Tasks as they are found and read."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sdbench.cli.tasks import NAMES
from sdbench.errors import SdbenchError, UsageError
from sdbench.suites.tasks.registry import OWN, TASKS_DIR, find_task, read_task, tasks

GOOD: dict[str, Any] = {
    "schema": "sdbench.task/1",
    "name": "plums",
    "version": 1,
    "description": "about plums",
    "prompt": "{question}",
    "reference": "{answer}",
    "grader": "number",
    "licence": "MIT",
    "source": "here",
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "plums" / "task.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({name: value for name, value in (GOOD | changes).items() if value is not ...}))
    return path


def test_every_task_has_a_version_a_licence_and_a_readme() -> None:
    assert list(tasks()) == ["arithmetic", "classeval", "fidelity", "gsm8k", "writingbench"]
    for name, task in tasks().items():
        assert (task.name, task.folder) == (name, TASKS_DIR / name)
        readme = (task.folder / "README.md").read_text()
        assert readme.startswith(f"# {name}\n") and task.licence and task.version >= 1
        assert task.bundled or f"--task {name}" in readme


def test_the_help_names_every_task() -> None:
    assert all(name in NAMES for name in tasks())


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown task 'gsm8'; did you mean gsm8k"):
        find_task("gsm8")


def test_a_task_is_read(tmp_path: Path) -> None:
    task = read_task(write(tmp_path, hub={"id": "a/b", "revision": "0" * 40}, holdout=7))
    assert (task.name, task.grader, task.holdout, task.bundled) == ("plums", "number", 7, None)
    assert task.hub and (task.hub.id, task.hub.split, task.hub.revision) == ("a/b", "train", "0" * 40)
    assert OWN.prompt == task.prompt


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grader": "guess"}, "grader: Input should be 'number'"),
        ({"version": 0}, "version: Input should be greater than"),
        ({"licence": ...}, "licence: Field required"),
        ({"licens": "MIT"}, "licens: Extra inputs are not permitted"),
        ({"schema": "sdbench.task/2"}, "schema: Input should be"),
        ({"prompt": "What is it?"}, "prompt names no field"),
        ({"reference": None}, "grader number needs a reference"),
        ({"hub": {"id": "a/b", "revision": "0" * 40, "split": "test"}}, "hub.split: Value error, a test split is never read"),
        ({"hub": {"id": "a/b", "revision": "main"}}, "hub.revision: String should match"),
        ({"name": "pears"}, "the task is called 'pears', and its folder 'plums'"),
    ],
)
def test_a_damaged_task_names_its_file_and_fault(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(SdbenchError) as caught:
        read_task(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_no_yaml(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text("a: [")
    with pytest.raises(SdbenchError, match="is no YAML"):
        read_task(path)
    with pytest.raises(SdbenchError, match="cannot read"):
        read_task(tmp_path / "none.yaml")
