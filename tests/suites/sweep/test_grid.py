"""Grid files: the runs they make and their names; what is wrong with one, in a line that names file, key and value."""

from pathlib import Path
from typing import Any

import pytest

from sdbench.errors import UsageError
from sdbench.suites.sweep.grid import Option, Run, expand, read_grid, require_distinct, varying

KNOWN = {
    "model": Option("--model"),
    "pattern": Option("--pattern"),
    "calib": Option("--calib", multiple=True),
    "seed": Option("--seed"),
    "max-tokens": Option("--max-tokens"),
    "sequential": Option("--sequential", switch=True),
    "compile-baseline": Option("--compile-baseline", "--no-compile-baseline", switch=True),
}


@pytest.fixture
def runs(tmp_path: Path) -> Any:
    def read(text: str) -> list[Run]:
        file = tmp_path / "grid.yaml"
        file.write_text(text)
        return expand(file, read_grid(file), KNOWN)

    return read


def test_every_combination_is_a_run_in_the_order_of_the_axes(runs):
    made = runs("axes:\n  pattern: [2:4, 16:32]\n  seed: [0, 1]\noptions:\n  max_tokens: 6\n")
    assert [run.name for run in made] == ["2-4_seed0", "2-4_seed1", "16-32_seed0", "16-32_seed1"]
    assert made[1].arguments == ["--max-tokens=6", "--pattern=2:4", "--seed=1"]
    assert varying(made) == ["pattern", "seed"]


def test_values_are_the_texts_that_stand_there(runs):
    """YAML 1.1 reads 2:4 as 124, 007 as 7 and no as false."""
    made = runs("axes:\n  pattern: [2:4]\n  model: [007, no]\n")
    assert [run.arguments for run in made] == [["--pattern=2:4", "--model=007"], ["--pattern=2:4", "--model=no"]]


def test_an_inner_list_is_one_value_of_an_option_that_may_be_repeated(runs):
    made = runs("axes:\n  calib: [decode, [decode, self]]\n")
    assert [run.arguments for run in made] == [["--calib=decode"], ["--calib=decode", "--calib=self"]]
    assert [run.name for run in made] == ["decode", "decode+self"]


def test_switches(runs):
    made = runs("axes:\n  sequential: [true, false]\n  compile-baseline: [on, off]\n")
    assert [run.arguments for run in made] == [
        ["--sequential", "--compile-baseline"],
        ["--sequential", "--no-compile-baseline"],
        ["--compile-baseline"],
        ["--no-compile-baseline"],
    ]


def test_exclude_and_include(runs):
    text = "axes:\n  pattern: [2:4, 16:32]\n  seed: [0, 1]\nexclude:\n- {pattern: 2:4, seed: 1}\ninclude:\n- {pattern: 4:8}\n"
    assert [run.name for run in runs(text)] == ["2-4_seed0", "16-32_seed0", "16-32_seed1", "4-8"]


def test_names_hold_no_path_and_are_never_the_same(runs):
    made = runs("axes:\n  model: [a/tiny, b/tiny, 'random:org/big']\n")
    first, second, third = (run.name for run in made)
    assert first != second and first.startswith("tiny_") and second.startswith("tiny_") and third == "random-big"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axis: {}\n", "grid.yaml: unknown key 'axis'; did you mean axes?"),
        ("axes: {patern: [2:4]}\n", "grid.yaml: unknown key 'patern' in axes; did you mean pattern?"),
        ("axes: {seed: [0]}\noptions: {max_token: 4}\n", "unknown key 'max_token' in options; did you mean max-tokens?"),
        ("axes: {seed: [0]}\nexclude: [{pattern: 2:4}]\n", "unknown key 'pattern' in exclude; known: seed"),
        ("axes: {seed: [0]}\nexclude: [{seed: 1}]\n", "exclude seed 1: no combination of the axes has that"),
        ("axes: {seed: [0]}\nexclude: [{seed: 0}]\n", "nothing is left to run"),
        ("axes: {seed: [0]}\noptions: {seed: 0}\n", "'seed' is in axes and in options"),
        ("axes: {seed: 0}\n", "grid.yaml: axes.seed: 0 is no list of values; write [A, B]"),
        ("axes: {seed: []}\n", "axes.seed: nothing is no list of values"),
        ("axes: {seed: [0, {a: 1}]}\n", "{'a': '1'} is no value"),
        ("axes: {seed: [[0, 1]]}\n", "seed: ['0', '1']: takes one value a run"),
        ("axes: {seed: [0]}\noptions: {sequential: maybe}\n", "sequential: 'maybe': it is a switch; use true or false"),
        ("axes: {seed: [0]}\noptions: {model: }\n", "options.model: nothing is no value"),
        ("axes:\n  seed: [0]\n  seed: [1]\n", "grid.yaml, line 2: 'seed' stands there twice"),
        ("axes: [\n", "grid.yaml, line 2: "),
        ("- 1\n", "grid.yaml is no grid"),
        ("", "grid.yaml is no grid"),
        ("options: {seed: 0}\n", "axes: Field required"),
    ],
)
def test_what_is_wrong_is_one_line(text, message, runs):
    with pytest.raises(UsageError) as error:
        runs(text)
    assert message in str(error.value) and "\n" not in str(error.value) and "grid.yaml" in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*none\.yaml: No such file"):
        read_grid(tmp_path / "none.yaml")


def test_two_runs_that_are_one_are_refused(runs):
    made = runs("axes:\n  seed: [0, 00]\n")
    with pytest.raises(UsageError, match="seed 0 and seed 00 are the same run"):
        require_distinct(Path("grid.yaml"), made, ["same", "same"])
