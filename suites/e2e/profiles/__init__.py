"""Profiles: options of a protocol under one name, one versioned YAML file each. Nothing here needs torch."""

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from sdbench.calibrate.registry import lookup
from sdbench.errors import SdbenchError
from sdbench.suites.yamls import Strict, read_yaml

PROFILES_DIR = Path(__file__).parent

NEVER = ("allow-code-execution", "output", "json", "profile", "plot")
"""Options that are for whoever runs a profile to give."""

Value = bool | int | float | str | list[str]


class Profile(Strict):
    """What a profile is.

    Attributes:
        schema_: Version of this form.
        name: Its file's name.
        version: Raised with every change of an option.
        description: One line.
        source: Whose protocol it is.
        patterns: The protocol's N:M patterns, one run each; a run without --pattern takes the first.
        options: Defaults of ``sdbench e2e`` by the option's name, without dashes in front.
    """

    schema_: Literal["sdbench.profile/1"] = Field(alias="schema")
    name: str
    version: int = Field(ge=1)
    description: str
    source: str
    patterns: list[str] = Field(min_length=1)
    options: dict[str, Value]

    @property
    def label(self) -> str:
        """Name and version, for a run's record."""
        return f"{self.name}, version {self.version}"

    def defaults(self) -> dict[str, Value]:
        """Defaults by the command's parameter names."""
        return {name.replace("-", "_"): value for name, value in ({"pattern": self.patterns[0]} | self.options).items()}


def read_profile(path: Path) -> Profile:
    """Reads one profile.

    Raises:
        SdbenchError: It cannot be read, is no profile, is called otherwise than its file, or sets what no profile may.
    """
    profile = read_yaml(path, Profile)
    if profile.name != path.stem:
        raise SdbenchError(f"{path}: the profile is called {profile.name!r} and its file {path.stem!r}; give both one name")
    if wrong := sorted(profile.options.keys() & {*NEVER, "pattern"}):
        raise SdbenchError(f"{path}: options.{wrong[0]} is nothing that a profile sets; leave it out")
    return profile


@cache
def profiles() -> dict[str, Profile]:
    """Every profile by name.

    Raises:
        SdbenchError: A file is damaged (file and fault named).
    """
    return {path.stem: read_profile(path) for path in sorted(PROFILES_DIR.glob("*.yaml"))}


def find_profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        UsageError: There is none; says which are close.
    """
    return lookup("profile", name, profiles())
