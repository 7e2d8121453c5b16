"""``sdbench split`` from the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdbench.suites.data import load_examples, verify_manifest


def sdbench(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sdbench", "split", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "100"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [json.dumps({"question": f"Bo has {n} plums. How many?", "answer": f"#### {n}"}) for n in range(20)]
    (tmp_path / "plums.jsonl").write_text("\n".join([*lines, lines[0]]) + "\n")
    return tmp_path


def test_output_folder(folder: Path) -> None:
    done = sdbench("plums.jsonl", "--output", "parts", "--validation-size", "0.25", "--revision", "r1", cwd=folder)
    assert done.returncode == 0, done.stderr
    out = folder / "parts"
    manifest = verify_manifest(out / "manifest.json", out / "train.jsonl", out / "validation.jsonl", "r1")
    assert (manifest.parts.train.examples, manifest.parts.validation.examples, manifest.dropped_duplicates) == (15, 5, 1)
    assert manifest.parts.train.sha256[:12] in done.stdout
    assert "dropped as repeated questions: 1; shared questions: 0" in done.stdout
    assert "sdbench e2e --train parts/train.jsonl --validation parts/validation.jsonl --split-manifest parts/manifest.json" in done.stdout


def test_three_files_and_json(folder: Path) -> None:
    names = ["--train-out", "a.jsonl", "--validation-out", "b.jsonl", "--manifest-out", "m.json"]
    done = sdbench("plums.jsonl", *names, "--validation-size", "7", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((folder / "m.json").read_text())
    assert (len(load_examples(folder / "a.jsonl")), len(load_examples(folder / "b.jsonl"))) == (13, 7)


def test_dropped_examples_are_told(folder: Path) -> None:
    """Repeated questions, one of them with another answer; white space and case make none."""
    source = folder / "plums.jsonl"
    told = ("####  0 ", "#### 1", "#### 7")
    more = [{"question": f"bo has {n} plums.  How many?", "answer": answer} for n, answer in enumerate(told)]
    source.write_text(source.read_text() + "".join(json.dumps(example) + "\n" for example in more))
    done = sdbench("plums.jsonl", "--output", "parts", "--json", cwd=folder)
    assert done.stderr == (
        "dropped 4 examples whose question an earlier one asks, lest it be in both parts; "
        "1 of them have another answer than that one, which is kept\n"
    )
    document = json.loads(done.stdout)
    assert (document["dropped_duplicates"], document["dropped_contradictions"]) == (4, 1)
    parts = load_examples(folder / "parts/train.jsonl") + load_examples(folder / "parts/validation.jsonl")
    assert [example.answer for example in parts if example.question.startswith("Bo has 2 ")] == ["#### 2"]


def test_nothing_is_told_where_nothing_is_dropped(folder: Path) -> None:
    source = folder / "plums.jsonl"
    source.write_text("".join(source.read_text().splitlines(keepends=True)[:-1]))
    assert sdbench("plums.jsonl", "--output", "parts", cwd=folder).stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing.jsonl", "--output", "parts"], 2, "cannot read nothing.jsonl: No such file or directory"),
        (["plums.jsonl"], 2, "say where the parts go"),
        (["plums.jsonl", "--train-out", "a.jsonl"], 2, "say where the parts go"),
        (["plums.jsonl", "--output", "parts", "--validation-size", "many"], 2, "'many' is neither a count"),
        (["plums.jsonl", "--output", "parts", "--validation-size", "20"], 2, "20 distinct questions"),
        (["plums.jsonl", "--output", "parts", "--validation-size", "1.5"], 2, "validation size 1.5"),
        (["plums.jsonl", "--output", "parts", "--validation-size", "-3"], 2, "validation size -3"),
        (["plums.jsonl", "--output", "parts", "--revision", ""], 2, "revision is empty"),
        (["test.jsonl", "--output", "parts"], 2, "says test split"),
        (["plums.jsonl", "--output", "plums.jsonl/parts"], 1, "cannot write plums.jsonl/parts"),
    ],
)
def test_bad_input_is_one_line(folder: Path, arguments: list[str], code: int, message: str) -> None:
    done = sdbench(*arguments, cwd=folder)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("sdbench: error: ") and message in done.stderr
    assert not (folder / "parts").exists()


def test_files_are_replaced_only_with_force(folder: Path) -> None:
    assert sdbench("plums.jsonl", "--output", "parts", cwd=folder).returncode == 0
    refused = sdbench("plums.jsonl", "--output", "parts", "--seed", "1", cwd=folder)
    assert refused.returncode == 2 and "use --force" in refused.stderr
    assert sdbench("plums.jsonl", "--output", "parts", "--seed", "1", "--force", cwd=folder).returncode == 0


def test_help_has_an_example_and_stays_light(folder: Path) -> None:
    done = sdbench("--help", cwd=folder)
    assert done.returncode == 0
    assert "Example: sdbench split train.jsonl --output data --validation-size 200" in done.stdout
    assert "OUTPUT/train.jsonl" in done.stdout
    loaded = "import sys; import sdbench.cli.split; print([m for m in ('torch', 'numpy', 'pandas', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout == "[]\n"
