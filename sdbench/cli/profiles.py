"""``--profile``: options of a protocol under one name; those on the command line win."""

from collections.abc import Callable, Collection
from typing import Any

import rich_click as click
from click import get_current_context
from click.core import ParameterSource

PROFILES = "seed (an earlier run on Qwen3-4B and GSM8K) or paper (the paper's: sampled replies, SparseGPT, a run for each of four patterns)"


def profile_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--profile NAME``."""
    return click.option(
        "--profile",
        is_eager=True,
        callback=_apply,
        help=f"Take the options of a protocol: {PROFILES}. What else the command line says wins.",
    )(function)


def is_given(name: str) -> bool:
    """Whether the command line itself gives a parameter of the running command."""
    return get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def unused_prompt_tokens(kind: str) -> list[str]:
    """A line where ``--prompt-tokens`` is given and a model of some kind brings its own prompts; none where it counts."""
    return ["--prompt-tokens is about random: models, and changes nothing here"] if kind != "random" and is_given("prompt_tokens") else []


def given_options(names: Collection[str]) -> list[str]:
    """Options of the running command, of these names, that the command line itself gives, as they are typed."""
    return [option.opts[0] for option in get_current_context().command.params if option.name in names and is_given(option.name)]


def changed() -> tuple[str, ...]:
    """Options of the profile that the running command's line has another value for, by name, sorted; none without a profile."""
    context = get_current_context()
    of_profile = {name: tuple(value) if isinstance(value, list) else value for name, value in (context.default_map or {}).items()}
    return tuple(sorted(name.replace("_", "-") for name, value in of_profile.items() if context.params[name] != value))


def _apply(context: click.Context, parameter: click.Parameter, name: str | None) -> Any:
    """Makes the profile's options the command's defaults, before any other option is read."""
    if name is None:
        return None
    from sdbench.calibrate.registry import did_you_mean
    from sdbench.errors import SdbenchError
    from sdbench.suites.e2e.profiles import find_profile

    profile = find_profile(name)
    defaults = profile.defaults()
    known = {option.name for option in context.command.params if option.name}
    for unknown in sorted(defaults.keys() - known):
        option = unknown.replace("_", "-")
        close = did_you_mean(option, [name.replace("_", "-") for name in known])
        raise SdbenchError(f"profile {name}: there is no option --{option}; {close}")
    context.default_map = defaults
    return profile
