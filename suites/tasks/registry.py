"""The tasks that models are judged on: one folder each, with ``task.yaml`` and a README, read through pydantic and found by name."""

import string
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from sdbench.calibrate.registry import lookup
from sdbench.errors import SdbenchError
from sdbench.results import first_fault
from sdbench.suites.yamls import Strict, read_yaml

TASKS_DIR = Path(__file__).parent
DEFAULT_TASK = "arithmetic"

GraderName = Literal["number", "unit-tests", "judge", "none"]


def template_fields(template: str) -> list[str]:
    """Names that a template's braces hold."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


class UnitTests(BaseModel):
    """Fields of a record that ``unit-tests`` needs: what a reply's class is run against."""

    class_name: str = Field(min_length=1)
    import_statement: list[str]
    test: str = Field(min_length=1)
    test_classes: list[str] = Field(min_length=1)


class Criteria(BaseModel):
    """Fields of a record that ``judge`` needs: what a text is scored by, each with ``name``, ``criteria_description`` and bands."""

    checklist: list[dict[str, Any]] = Field(min_length=1)


GRADING: dict[str, type[BaseModel]] = {"unit-tests": UnitTests, "judge": Criteria}
"""What a grader needs beside the reference; the model never sees it."""


class Hub(Strict):
    """Where the hub has a task's data.

    Attributes:
        id: The dataset.
        revision: The commit, so that everyone reads the same records.
        config: The dataset's configuration, if it has several.
        split: The split that is read; never a test split.
        file: A file of the dataset that is read in place of a split, for data that is published in one part.
    """

    id: str
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    config: str | None = None
    split: str = "train"
    file: str | None = None

    @field_validator("split")
    @classmethod
    def _no_test(cls, split: str) -> str:
        if "test" in split.casefold():
            raise ValueError("a test split is never read")
        return split


class Bundled(Strict):
    """Files in the task's own folder: two parts and the manifest that pins them."""

    train: str
    validation: str
    manifest: str


class Task(Strict):
    """What a task is.

    Attributes:
        schema_: Version of this form.
        name: Its folder's name.
        version: Raised with every change that changes what is asked or how it is judged.
        description: One line.
        prompt: What the model reads: a template over the fields of a record.
        reference: The reference answer, a template too; None where there is none.
        id: Template of an example's id; None takes the record's ``id``, else its line.
        fields: Other names of a template's fields, the first that a record has counts.
        grader: What judges a reply: ``number`` (the answer), ``unit-tests`` (of a generated class), ``judge`` (a model), ``none``.
        holdout: Questions held out to be judged, by count or share; calibration draws from the others.
        max_tokens: Longest reply where none is asked for; None for the command's own.
        file: The data's file name as it is published.
        bundled: Files that come with sdbench, in place of all that.
        licence: Of the data.
        source: Where it comes from.
        hub: Where the hub has it.
    """

    schema_: Literal["sdbench.task/1"] = Field(alias="schema")
    name: str
    version: int = Field(ge=1)
    description: str
    prompt: str
    reference: str | None = None
    id: str | None = None
    fields: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    grader: GraderName
    holdout: int | float = 0.5
    max_tokens: int | None = None
    file: str | None = None
    bundled: Bundled | None = None
    licence: str
    source: str
    hub: Hub | None = None

    @model_validator(mode="after")
    def _whole(self) -> "Task":
        if not template_fields(self.prompt):
            raise ValueError("prompt names no field of a record")
        if self.grader == "number" and self.reference is None:
            raise ValueError("grader number needs a reference")
        return self

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        return TASKS_DIR / self.name


OWN = Task(
    schema="sdbench.task/1",
    name="own",
    version=1,
    description="your own questions with numeric answers",
    prompt="{question}",
    reference="{answer}",
    grader="number",
    holdout=0.5,
    licence="yours",
    source="a file of yours",
)
"""What a file is taken for that no task is named for."""


def grading_of(task: Task, record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the task's grader needs of a record.

    Args:
        task: Which.
        record: Of the task's data.
        where: File and record, for the message.

    Raises:
        SdbenchError: A field is missing, or is something else.
    """
    if task.grader not in GRADING:
        return {}
    try:
        return GRADING[task.grader].model_validate(record).model_dump()
    except ValidationError as error:
        raise SdbenchError(f"{where}: {first_fault(error)}; task {task.name} needs it to judge replies") from error


@cache
def tasks() -> dict[str, Task]:
    """Every task by name.

    Raises:
        SdbenchError: A ``task.yaml`` is damaged (file and fault named).
    """
    return {path.parent.name: read_task(path) for path in sorted(TASKS_DIR.glob("*/task.yaml"))}


def find_task(name: str) -> Task:
    """The task of that name.

    Raises:
        UsageError: There is none; says which are close.
    """
    return lookup("task", name, tasks())


def read_task(path: Path) -> Task:
    """Reads one ``task.yaml``.

    Raises:
        SdbenchError: It cannot be read, is no YAML or no task, or is called otherwise than its folder.
    """
    task = read_yaml(path, Task)
    if task.name != path.parent.name:
        raise SdbenchError(f"{path}: the task is called {task.name!r}, and its folder {path.parent.name!r}; give both one name")
    return task
