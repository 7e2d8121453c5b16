"""The entry point: help pages, exit codes, and one line for whatever goes wrong."""

import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from sdbench import __version__, cli, devices
from sdbench.architectures import ARCHITECTURES
from sdbench.calibrate.methods import METHODS
from sdbench.calibrate.sources import SOURCES
from sdbench.cli.options import DEVICE_MAPS, SPMM_VARIANTS, SPMV_VARIANTS, TUNABLE_VARIANTS
from sdbench.errors import CheckFailed, SdbenchError, UsageError
from sdbench.kernels import registry
from sdbench.suites.kernels.tune import tunable

HEAVY = ("torch", "transformers", "triton", "numpy", "pandas", "pydantic")
PAGES = {
    "": ["sdbench e2e --calib decode", "sdbench kernels --pattern 2:4", "split", "env"],
    "e2e": ["sdbench e2e --calib decode", "--model", "--min-speedup", "default: 512; 160"],
    "kernels": ["sdbench kernels --pattern 2:4", "--shapes", "--variant", "llama-3.1-8b", "lsb_scan"],
    "tune": ["sdbench tune --pattern 2:4", "--export"],
    "decode": ["sdbench decode --model random:Qwen/Qwen3-4B-Instruct-2507", "--context", "--profile"],
    "report": ["sdbench report run", "--format", "--plot", "--html"],
    "runs": ["sdbench runs results --json", "FOLDER"],
    "compare": ["sdbench compare before after", "--fail-over", "default: 5%"],
    "sweep": ["sdbench sweep grid.yaml", "--executor", "--ray-address", "validation-examples: 200"],
    "split": ["Example: sdbench split train.jsonl", "--validation-size"],
    "env": ["--json"],
}


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "100"}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("command", PAGES)
def test_help_shows_an_example_and_imports_nothing_heavy(command: str, tmp_path: Path) -> None:
    report = (
        "import atexit, sys; from sdbench.cli import main; "
        f"atexit.register(lambda: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)); "
        f"sys.argv = ['sdbench', *{command.split()}, '--help']; main()"
    )
    done = run("-c", report, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    text = " ".join(done.stdout.replace("│", " ").split())
    for part in PAGES[command]:
        assert part in text
    # An example stands on a line of its own, however long the text before it is.
    assert command == "env" or any(line.strip().removeprefix("Example: ").startswith("sdbench ") for line in done.stdout.splitlines())


def test_examples_are_not_folded_on_a_terminal_of_80_columns(sdbench: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("e2e", "kernels", "report", "compare"):
        examples = importlib.import_module(f"sdbench.cli.{name}").command.help.partition("\b\n")[2].splitlines()
        assert len(examples) >= 3
        lines = [line.strip() for line in sdbench(name, "--help").out.splitlines()]
        assert all(example.strip() in lines for example in examples)


def test_every_option_is_explained() -> None:
    for name in cli.COMMANDS:
        command = importlib.import_module(f"sdbench.cli.{name}").command
        silent = [parameter.name for parameter in command.params if isinstance(parameter, click.Option) and not parameter.help]
        assert silent == [], name


def test_the_help_of_e2e_names_every_source_and_method() -> None:
    """Written out there, since the registries import torch."""
    told = {parameter.name: parameter.help for parameter in importlib.import_module("sdbench.cli.e2e").command.params}
    assert all(name in told["calib"] for name in SOURCES)
    assert all(name in told["method"] for name in METHODS)


def test_the_help_of_kernels_and_tune_names_every_variant_and_model() -> None:
    """Variants are written out there, since the registry imports torch."""
    assert tuple(variant.name for variant in registry.variants("spmv")) == SPMV_VARIANTS
    assert {variant.name for variant in registry.variants("spmm")} == set(SPMM_VARIANTS)
    assert devices.DEVICE_MAPS == DEVICE_MAPS
    assert tuple(dict.fromkeys(variant.name for variant in tunable())) == TUNABLE_VARIANTS
    for name, variants in (("kernels", SPMV_VARIANTS), ("kernels", SPMM_VARIANTS), ("tune", TUNABLE_VARIANTS)):
        told = {parameter.name: parameter.help for parameter in importlib.import_module(f"sdbench.cli.{name}").command.params}
        assert ", ".join(variants) in told["variants"]
        assert ", ".join(ARCHITECTURES) in told["shapes"]


def test_help_answers_at_once(tmp_path: Path) -> None:
    """Under 0.5 s of CPU time; the best of five calls counts, since a busy machine slows single ones down."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("-m", "sdbench", "--help", cwd=tmp_path).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if times[-1] < 0.5:
            return
    pytest.fail(f"CPU seconds: {times}")


def test_the_list_of_commands_says_what_their_own_pages_say(sdbench: Any) -> None:
    listed = sdbench("--help").out
    for name, line in cli.COMMANDS.items():
        command = importlib.import_module(f"sdbench.cli.{name}").command
        assert (command.name, command.help.splitlines()[0]) == (name, line)
        assert f" {name} " in listed


def test_version(sdbench: Any) -> None:
    done = sdbench("--version")
    assert (done.code, done.err) == (0, "") and __version__ in done.out


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ("e2", ["No such command 'e2'", "Did you mean 'e2e'?"]),
        ("kernel --pattern 2:4", ["Did you mean 'kernels'?"]),
        ("frobnicate", ["No such command 'frobnicate'", f"Commands: {', '.join(cli.COMMANDS)}"]),
        ("--halp", ["No such option", "--help"]),
        ("env --jsn", ["No such option", "--json"]),
    ],
)
def test_a_misspelling_is_answered_with_the_right_spelling(arguments: Any, messages: Any, sdbench: Any) -> None:
    sdbench(*arguments.split()).refuses(2, *messages)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SdbenchError("no luck"), 1, "no luck"),
        (UsageError("not so"), 2, "not so"),
        (CheckFailed("differs"), 3, "differs"),
        (SdbenchError("a name with\na line break"), 1, "a name with a line break"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.BadParameter("two\n  lines"), 2, "Invalid value: two lines"),
        (ValueError("first\nsecond"), 1, "unexpected ValueError: first second (SDBENCH_DEBUG=1 shows where)"),
    ],
)
def test_every_error_is_one_line(error: Any, code: Any, line: Any, sdbench: Any, monkeypatch: Any) -> None:
    def fail(**options: object) -> None:
        raise error

    monkeypatch.setattr(cli.group, "main", fail)
    done = sdbench("anything")
    assert (done.code, done.out, done.err) == (code, "", f"sdbench: error: {line}\n")


def test_debugging_shows_where(sdbench: Any, monkeypatch: Any) -> None:
    def fail(**options: object) -> None:
        raise ValueError("inside")

    monkeypatch.setattr(cli.group, "main", fail)
    monkeypatch.setenv("SDBENCH_DEBUG", "1")
    with pytest.raises(ValueError, match="inside"):
        cli.main()


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    """``sdbench env | true``: what is written after the reader has gone must not end in a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "sdbench", "--help"], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("e2e", "--pattern", "2:4", "--pattern", "4:8"), "--pattern is given 2 times, and e2e takes one; 'sdbench sweep' runs a grid"),
        (("prune", "--pattern", "2:4", "--pattern", "4:8", "--output", "out"), "--pattern is given 2 times, and prune takes one"),
    ],
)
def test_of_several_patterns_none_is_dropped_without_a_word(arguments: Any, line: Any, sdbench: Any) -> None:
    sdbench(*arguments).refuses(2, line)
