"""``run.json``: what a run was asked, where each attempt at it ran, and how it ended."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

RUN_SCHEMA: Literal["sdbench.run/1"] = "sdbench.run/1"

Outcome = Literal["running", "complete", "failed", "interrupted"]


class Attempt(BaseModel):
    """One start of the command in a run directory; ``changed`` holds what differs from the first: environment, versions, git."""

    attempt: int
    started: str
    ended: str | None = None
    outcome: Outcome = "running"
    reason: str | None = None
    resumed_rows: int = 0
    changed: dict[str, Any] = {}


class RunRecord(BaseModel):
    """The contents of ``run.json``.

    ``rows`` and ``samples`` are how many lines ``rows.jsonl`` and ``samples.jsonl`` held when the last complete attempt ended, None if not
    recorded; ``samples`` is also None where the file is left out on purpose, as of runs that are kept without their replies.
    """

    schema_: Literal["sdbench.run/1"] = Field(alias="schema")
    command: str
    arguments: dict[str, Any]
    environment: dict[str, Any]
    versions: dict[str, str | None]
    git: dict[str, Any] | None
    git_reason: str | None = None
    created: str
    outcome: Outcome = "running"
    outcome_reason: str | None = None
    rows: int | None = None
    samples: int | None = None
    audit: list[Attempt] = []

    def found(self, attempt: int) -> dict[str, Any]:
        """``environment``, ``versions`` and ``git`` as an attempt found them; those of the first where there is no such attempt."""
        changed = next((one.changed for one in self.audit if one.attempt == attempt), {})
        return {name: changed.get(name, getattr(self, name)) for name in ("environment", "versions", "git")}

    def facts(self, attempt: int) -> dict[str, Any]:
        """All of that on one level, each thing once."""
        found = self.found(attempt)
        return flatten({**found["versions"], **found["environment"], "git": found["git"]})


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one level, with dots between the names."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def differences(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Name -> its values, each once and in their order, where they are not all the same; None for a name that is missing."""
    names = dict.fromkeys(name for one in facts for name in one)
    values = {name: list({str(one.get(name)): one.get(name) for one in facts}.values()) for name in names}
    return {name: given for name, given in values.items() if len(given) > 1}
