"""The grid file: axes, fixed options, and the runs that they make, named so that a person finds them."""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from sdbench.calibrate.registry import did_you_mean
from sdbench.errors import UsageError, cannot_read
from sdbench.results import first_fault

SPEAKS_FOR_ITSELF = ("model", "pattern", "calib", "method", "task")
"""Options whose value alone, without the option's name, tells in a run's name what it is."""

LONGEST_NAME = 120
SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
FIDELITY = {"fidelity": "also", "fidelity-only": "only"}
"""Switches that are one argument of a run, and its value where they are on."""

Value = str | tuple[str, ...]
"""An option's value as it would be typed; several for an option that may be repeated."""


def _value(value: Any) -> Value:
    """Everything is a text here, or holds others."""
    if isinstance(value, list):
        return tuple(_scalar(part) for part in value)
    return _scalar(value)


def _scalar(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise PydanticCustomError("value", "{value} is no value; a text or a number must stand here", {"value": str(value or "nothing")})
    return value


def _values(values: Any) -> list[Value]:
    if not isinstance(values, list) or not values:
        raise PydanticCustomError("axis", "{value} is no list of values; write [A, B]", {"value": str(values or "nothing")})
    return [_value(value) for value in values]


GridValue = Annotated[Any, BeforeValidator(_value)]
Axis = Annotated[Any, BeforeValidator(_values)]


class Grid(BaseModel):
    """The file's contents; an option is named as on the command line, without the two dashes.

    Attributes:
        axes: Option -> the values it takes; every combination is a run.
        options: Option -> its value in all runs.
        exclude: Combinations of axis values that are left out.
        include: Further runs, each by its own values beside ``options``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    axes: dict[str, Axis] = Field(min_length=1)
    options: dict[str, GridValue] = {}
    exclude: list[dict[str, GridValue]] = []
    include: list[dict[str, GridValue]] = []


@dataclass(frozen=True)
class Option:
    """An option of the command that the runs call.

    Attributes:
        on: How it is typed, ``--seed``.
        off: How a switch is typed that is off; None to leave it out.
        switch: It takes no value.
        multiple: It may be repeated.
    """

    on: str
    off: str | None = None
    switch: bool = False
    multiple: bool = False


@dataclass(frozen=True)
class Run:
    """One run of the grid.

    Attributes:
        name: Of its directory.
        values: Option -> its value, axes and fixed options.
        typed: Option -> its part of the command line.
    """

    name: str
    values: Mapping[str, Value]
    typed: Mapping[str, Sequence[str]]

    @property
    def arguments(self) -> list[str]:
        """The command line, without the command and ``--output``."""
        return [part for parts in self.typed.values() for part in parts]


class _Loader(yaml.BaseLoader):
    """Every scalar is the text that stands there (YAML 1.1 makes 124 of 2:4), and a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := [key for key, count in Counter(map(str, keys)).items() if count > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_grid(file: Path) -> Grid:
    """Reads a grid file.

    Raises:
        UsageError: It is not there, no YAML, or holds a key that is none or a value of the wrong kind.
        SdbenchError: It cannot be read.
    """
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise cannot_read(file, error) from error
    except yaml.MarkedYAMLError as error:
        place = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{file}{place}: {error.problem or 'it is no YAML'}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} is no grid: it needs a key 'axes' with options and the values they take")
    for key in content:
        if key not in Grid.model_fields:
            raise UsageError(f"{file}: unknown key {key!r}; {did_you_mean(key, Grid.model_fields)}")
    try:
        return Grid.model_validate(content)
    except ValidationError as error:
        raise UsageError(f"{file}: {first_fault(error)}") from error


def expand(file: Path, grid: Grid, known: Mapping[str, Option], refused: Mapping[str, str] = MappingProxyType({})) -> list[Run]:
    """The grid's runs, in the order of its axes, the last one fastest.

    Args:
        file: Where it stands, for messages.
        grid: Its contents.
        known: The command's options by name.
        refused: Others that it has and a grid cannot set -> why not.

    Raises:
        UsageError: An unknown or refused option; one that is an axis and fixed; several values where there is one; nothing left to run.
    """
    for where, keys in [("axes", grid.axes), ("options", grid.options), *(("include", entry) for entry in grid.include)]:
        for name in (key.replace("_", "-") for key in keys):
            if name in refused:
                raise UsageError(f"{file}: {name} in {where}: {refused[name]}")
    axes = {_known(file, "axes", key, known): values for key, values in grid.axes.items()}
    fixed = {_known(file, "options", key, known): value for key, value in grid.options.items()}
    if both := [key for key in axes if key in fixed]:
        raise UsageError(f"{file}: {both[0]!r} is in axes and in options; leave it in one of them")
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    for entry in grid.exclude:
        wanted = {_known(file, "exclude", key, axes): value for key, value in entry.items()}
        kept = [point for point in points if not all(point[key] == value for key, value in wanted.items())]
        if not wanted or len(kept) == len(points):
            raise UsageError(f"{file}: exclude {_told(wanted)}: no combination of the axes has that")
        points = kept
    points += [{_known(file, "include", key, known): value for key, value in entry.items()} for entry in grid.include]
    if not points:
        raise UsageError(f"{file}: nothing is left to run: exclude takes every combination")
    whole = [fixed | point for point in points]
    typed = [{key: _typed(file, key, value, known[key]) for key, value in values.items()} for values in whole]
    names = _names(points, typed)
    return [Run(*made) for made in zip(names, whole, typed, strict=True)]


def varying(runs: Sequence[Run]) -> list[str]:
    """Options that are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.values)
    return [key for key in keys if len({run.values.get(key) for run in runs}) > 1]


def shown(value: Value | None) -> str:
    """A value for one cell or line; a dash for an option that is left to its default."""
    return "-" if value is None else value if isinstance(value, str) else "+".join(value)


def used(key: str, arguments: Mapping[str, Any]) -> str:
    """The value, as :func:`shown` would have it, that a run uses of an option which its grid leaves out.

    Args:
        key: The option's name.
        arguments: All that the run's command makes of its command line.
    """
    value = arguments.get("fidelity") == FIDELITY[key] if key in FIDELITY else arguments.get(key.replace("-", "_"))
    if isinstance(value, bool):
        return str(value).lower()
    return shown(None if value is None else tuple(map(str, value)) if isinstance(value, list) else str(value))


def _known(file: Path, where: str, key: str, known: Mapping[str, Any]) -> str:
    name = key.replace("_", "-")
    if name not in known:
        raise UsageError(f"{file}: unknown key {key!r} in {where}; {did_you_mean(name, known)}")
    return name


def _typed(file: Path, key: str, value: Value, option: Option) -> list[str]:
    if isinstance(value, tuple) and not option.multiple:
        raise UsageError(f"{file}: {key}: {list(value)}: takes one value a run; a list of values belongs into axes")
    if not option.switch:
        return [f"{option.on}={one}" for one in ((value,) if isinstance(value, str) else value)]
    chosen = SWITCH.get(str(value).lower())
    if chosen is None:
        raise UsageError(f"{file}: {key}: {value!r}: it is a switch; use true or false")
    return [option.on] if chosen else [option.off] if option.off else []


def _names(points: Sequence[Mapping[str, Value]], typed: Sequence[Mapping[str, Sequence[str]]]) -> list[str]:
    names = ["_".join(_part(key, value) for key, value in point.items()) or "run" for point in points]
    counts = Counter(names)
    for index, name in enumerate(names):
        if counts[name] > 1 or len(name) > LONGEST_NAME:
            # Two models of one name in different folders, or a name that no file system takes.
            digest = hashlib.sha256("\0".join(part for parts in typed[index].values() for part in parts).encode()).hexdigest()
            names[index] = f"{name[:LONGEST_NAME]}_{digest[:8]}"
    return names


def _part(key: str, value: Value) -> str:
    texts = [value] if isinstance(value, str) else list(value)
    if key == "model":
        texts = [f"{text.partition(':')[0]}-{Path(text).name}" if text.startswith("random:") else Path(text).name for text in texts]
    told = "+".join(re.sub(r"[^A-Za-z0-9.+]+", "-", text).strip("-.") for text in texts)
    if key in SPEAKS_FOR_ITSELF:
        return told or key
    return f"{key}{told}" if told[:1].isdigit() else f"{key}-{told}"


def _told(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{key} {shown(value)}" for key, value in values.items()) or "{}"


def require_distinct(file: Path, runs: Sequence[Run], arguments: Sequence[str]) -> None:
    """Refuses two runs that are one: their directories would hold the same twice.

    Args:
        file: Where the grid stands.
        runs: Its runs.
        arguments: Of each, all that its command makes of what was typed, as one text.
    """
    first: dict[str, Run] = {}
    for run, text in zip(runs, arguments, strict=True):
        if text in first:
            raise UsageError(f"{file}: {_told(first[text].values)} and {_told(run.values)} are the same run; leave one out")
        first[text] = run
