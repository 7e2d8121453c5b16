"""``sdbench tune`` as a user calls it: without a GPU, and with a stand-in for what a GPU would answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sdbench.kernels import tuned
from sdbench.suites.kernels import tune
from sdbench.suites.kernels.runner import Local
from sdbench.timing import Times

SMALL = ["tune", "--shapes", "8x32", "--variant", "portable"]


def times(calls: Any, *, replays: int) -> Times:
    """A timer without a device: each of these is as fast as the other."""
    for call in calls:
        call()
    return Times(0.9, 1.0, 1.1)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """On the machine whose GPU is the CPU, the suite's own run with a timer of this file."""
    if "gpu" not in request.fixturenames:
        return
    on_cpu, run = request.getfixturevalue("gpu"), tune.run
    monkeypatch.setattr(tune, "run", lambda options, directory, progress: run(on_cpu(options), directory, progress, Local(times)))


def test_without_a_gpu_one_line_says_what_to_do(sdbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sdbench(*SMALL).refuses(1, "no CUDA device", "'sdbench kernels' checks the default configs without one")
    sdbench(*SMALL, "--device", "cpu").refuses(2, "--device cpu", "takes a CUDA GPU")
    sdbench(*SMALL, "--device", "cuda").refuses(1, "device 'cuda' was asked for")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--variant lanerow", "did you mean 'lane_row'?"),
        ("--variant reference", "variant 'reference' is none that can be tuned"),
        ("--shapes qwen3-4bb", "did you mean 'qwen3-4b'?"),
        ("--shapes 8x34", "layer 8x34: in_features 34 is not a multiple of M=4"),
        ("--pattern 5:4", "N:M keeps N of M"),
        ("--effort most", "'most' is not one of 'none', 'quick', 'full'"),
        ("--timeout 0", "--timeout"),
        ("--effort none --export choices.json", "there is nothing to write"),
    ],
)
def test_usage(arguments: str, message: str, sdbench: Any, gpu: None, tmp_path: Path) -> None:
    sdbench(*SMALL, *arguments.split(), "--output", "run").refuses(2, message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", ["--shapes 8X32", "--pattern 5:4", "--variant lanerow", "--effort none --export choices.json"])
def test_what_was_typed_is_checked_before_a_gpu_is_missed(arguments: str, sdbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = sdbench(*SMALL, *arguments.split())
    done.refuses(2)
    assert "CUDA" not in done.err


def test_an_export_that_could_not_be_written_is_refused_before_the_run(sdbench: Any, gpu: None, tmp_path: Path) -> None:
    (tmp_path / "sm_100.json").write_text(tuned.Shipped(schema=tuned.SET_SCHEMA, capability=100, choices=()).dump())
    (tmp_path / "text.json").write_text("no JSON")
    refusals = {"sm_100.json": "capability 100, not 90", "text.json": "no file of tuned configs", "no/a.json": "does not exist"}
    for name, message in refusals.items():
        sdbench(*SMALL, "--export", name, "--output", "run").refuses(1, message)
    assert not (tmp_path / "run").exists()


def test_a_run_prints_a_table_keeps_its_choice_and_exports_it(sdbench: Any, gpu: None, tmp_path: Path) -> None:
    done = sdbench(*SMALL, "--pattern", "2:4", "--pattern", "1:4", "--output", "run", "--export", "sm_90.json", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["schema"] == "sdbench.tune/1" and document["environment"]["gpu"]["name"] == "NVIDIA H200"
    assert [(row["variant"], row["pattern"], row["outcome"]) for row in document["rows"]] == [
        ("portable", "2:4", "correct"), ("portable", "1:4", "correct"),
    ]  # fmt: skip
    assert all(row["config_source"] == "search" and row["configs"] > 1 for row in document["rows"])
    assert "2 choices merged into sm_90.json" in done.err and str(tuned.cache_folder()) in done.err
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2
    exported = tuned.read_shipped(tmp_path / "sm_90.json")
    assert exported is not None
    configs = {row["pattern"]: row["config"] for row in document["rows"]}
    assert {choice.key.pattern: choice.config for choice in exported.choices} == configs

    again = sdbench(*SMALL, "--pattern", "2:4", "--pattern", "1:4", "--output", "run")
    assert again.code == 0
    assert (tmp_path / "run/report.md").read_text().startswith("### Fastest right configs on NVIDIA H200\n")
    lines = again.out.splitlines()
    assert lines[0] == "Fastest right configs on NVIDIA H200" and "s of compiling" in lines[-1]
    row = next(line for line in lines if "2:4" in line).split()
    assert row[:6] == ["8x32", "8x32", "2:4", "spmv/portable", "1.00", "0.90-1.10"] and "block_out=" in " ".join(row)
