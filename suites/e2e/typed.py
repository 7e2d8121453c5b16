"""An argument of an ``e2e`` run, as ``run.json`` has it, in the words of the command line. Nothing here needs torch."""

from collections.abc import Mapping
from typing import Any

FIDELITY = {"no": "no --fidelity", "also": "--fidelity", "only": "--fidelity-only"}

SWITCHES_OFF = ("compile_baseline", "alternatives")
"""Options with a ``--no-`` form."""

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

FILES = {"model_files": "model", "compare_model_files": "compare_model"}
"""What tells two models of one name apart, and the option that names them; that of a data file is the option and ``_sha256``."""


def typed(name: str, value: Any) -> str:
    """The option and its value as a user types them; "no --option" for one that was left out."""
    option = f"--{name.replace('_', '-')}"
    if name == "fidelity":
        return FIDELITY.get(value, FIDELITY["no"])
    if name == "task" and value == "own":
        return "no --task"  # but a file of its own
    if name == "dtype":
        return f"{option} {DTYPES.get(value, value)}"
    if value is False and name in SWITCHES_OFF:
        return f"--no-{option[2:]}"
    if value is None or value is False or value in ([], {}):
        return f"no {option}"
    if value is True:
        return option
    if isinstance(value, Mapping):
        value = [f"{part}={weight:g}" for part, weight in value.items()]
    return " ".join(f"{option} {one}" for one in value) if isinstance(value, list) else f"{option} {value}"


def difference(name: str, mine: str, first: Any, other: str, second: Any) -> str:
    """How two runs differ in an argument, for an error.

    Args:
        name: The argument.
        mine: What the one run is called.
        first: Its value.
        other: What the other is called.
        second: Its value.
    """
    named = FILES.get(name) or name.removesuffix("_sha256")
    if named != name:
        return f"{mine} and {other} have another --{named.replace('_', '-')}, though its name is the same"
    if name == "task_version":
        return f"{mine} has version {first} of --task and {other} {second}"
    if name == "profile":
        # "seed, version 1": the version is not typed.
        first, second = (value and value.replace(", version ", " of version ") for value in (first, second))
    return f"{mine} has {typed(name, first)} and {other} {typed(name, second)}"
