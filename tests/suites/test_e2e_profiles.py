"""Profiles as files: what the bundled ones say, and what is no profile."""

from pathlib import Path

import pytest
import yaml

from sdbench.cli.e2e import command
from sdbench.cli.profiles import PROFILES
from sdbench.errors import SdbenchError, UsageError
from sdbench.suites.e2e.profiles import find_profile, profiles, read_profile

GOOD = {"schema": "sdbench.profile/1", "name": "mine", "version": 1, "description": "d", "source": "s", "patterns": ["2:4"], "options": {}}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(GOOD | changes))
    return path


def test_seed_is_the_earlier_run() -> None:
    wanted = {
        "pattern": "2:4",
        "model": "Qwen/Qwen3-4B-Instruct-2507",
        "revision": "cdbee75f17c01a7cc42f958dc650907174af0554",
        "task": "gsm8k",
        "method": "wanda",
        "calib": ["decode"],
        "calibration_examples": 4,
        "validation_examples": 4,
        "max_tokens": 512,
        "equal_tokens": 512,
        "seed": 42,
    }
    assert wanted.items() <= find_profile("seed").defaults().items()


def test_paper_samples_and_has_four_patterns() -> None:
    paper = find_profile("paper")
    assert paper.patterns == ["2:4", "4:8", "8:16", "16:32"]
    defaults = paper.defaults()
    assert (defaults["method"], defaults["calib"], defaults["pattern"]) == ("sparsegpt", ["decode"], "2:4")
    assert float(defaults["temperature"]) > 0  # type: ignore[arg-type]  # defaults are of any type


def test_help_names_every_profile_and_profiles_every_option() -> None:
    known = {option.name for option in command.params}
    for name, profile in profiles().items():
        assert f"{name} (" in PROFILES
        assert profile.defaults().keys() <= known


def test_an_unknown_one() -> None:
    with pytest.raises(UsageError, match=r"unknown profile 'sed'; did you mean seed\?"):
        find_profile("sed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "yours"}, "the profile is called 'yours' and its file 'mine'"),
        ({"options": {"allow-code-execution": True}}, "options.allow-code-execution is nothing that a profile sets"),
        ({"options": {"pattern": "4:8"}}, "options.pattern is nothing that a profile sets"),
        ({"version": 0}, "version: Input should be greater than or equal to 1"),
        ({"patterns": []}, "patterns: List should have at least 1 item"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"options": {"seed": {"a": 1}}}, "options.seed"),
    ],
)
def test_no_profile(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    assert read_profile(write(tmp_path)).label == "mine, version 1"
    with pytest.raises(SdbenchError, match=f"mine.yaml: .*{message}"):
        read_profile(write(tmp_path, **changes))
