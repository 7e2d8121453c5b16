"""``.ci/compare-runs``: what the workflow asks of a change that replaces committed runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci/compare-runs"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="no checkout: a source distribution has no .ci")
RUN = "results/gpu/kernels/model"


def git(repository: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=repository, check=True, capture_output=True)


def write(repository: Path, p50: float) -> None:
    folder = repository / RUN
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "schema": "sdbench.run/1", "command": "kernels", "arguments": {"seed": 0}, "environment": {"gpu": {"name": "H200"}},
        "versions": {}, "git": None, "created": "2026-12-01T00:00:00+00:00", "outcome": "complete",
    }  # fmt: skip
    row = {
        "record": "result", "kernel": "spmv", "variant": "a", "pattern": "2:4", "layer": "o", "shape": [8, 8], "of_shape": [8, 8],
        "dtype": "bf16", "config": {}, "outcome": "correct", "error": 1e-7, "us": {"p20": p50 - 0.1, "p50": p50, "p80": p50 + 0.1},
        "us_reason": None, "message": None, "gbps": 1.0, "roofline": None, "configs": 1, "outcomes": {"correct": 1},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci/compare-runs")
    command = tmp_path / "sdbench"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sdbench "$@"\n')
    command.chmod(0o755)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".ci")
    git(tmp_path, "commit", "-qm", "no runs")
    write(tmp_path, 10.0)
    git(tmp_path, "add", "results")
    git(tmp_path, "commit", "-qm", "a run")
    return tmp_path


def compare(repository: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"SDBENCH": str(repository / "sdbench")}
    return subprocess.run([".ci/compare-runs", *arguments], cwd=repository, capture_output=True, text=True, check=False, env=environment)


def test_a_slower_run_in_place_of_a_committed_one_ends_with_4(repository: Path) -> None:
    same = compare(repository, "HEAD")
    assert (same.returncode, same.stdout) == (0, f"{RUN}: unchanged\n")
    write(repository, 12.0)
    slower = compare(repository, "HEAD")
    assert slower.returncode == 4 and "1 slower" in slower.stdout and "spmv a 2:4 o 8x8 bf16 (us) slower" in slower.stderr
    write(repository, 10.2)
    noise = compare(repository, "HEAD")
    assert noise.returncode == 0 and "slower within noise" in noise.stdout


def test_a_run_without_one_before_it(repository: Path) -> None:
    new = compare(repository, "HEAD~1")
    assert (new.returncode, new.stdout) == (0, f"{RUN}: new, or without a run.json before\n")
    assert compare(repository, "nowhere").returncode == 2
    assert compare(repository).returncode != 0
