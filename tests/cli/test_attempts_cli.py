"""Runs of several attempts: what a report says of the machine and the code that measured each row."""

import json
from typing import Any

from sdbench.results import read_jsonl, strict_json

ASKED = {"pattern": ["2:4"], "shapes": "o,down", "dtype": "bf16", "device": "cuda"}


def result(variant: str, layer: str, attempt: int = 1) -> dict[str, Any]:
    p50 = {"linear": 12.0, "lane_row": 4.0}[variant]
    return {
        "record": "result", "kernel": "dense" if variant == "linear" else "spmv", "variant": variant,
        "pattern": None if variant == "linear" else "2:4", "layer": layer, "shape": [16, 32], "of_shape": [16, 32 if layer == "o" else 64],
        "dtype": "bf16", "config": {}, "outcome": "correct", "error": 1e-7, "us": {"p20": p50, "p50": p50, "p80": p50}, "us_reason": None,
        "message": None, "bytes": 1000, "gbps": 4123.4, "roofline": 0.876, "configs": 1, "outcomes": {"correct": 1}, "attempt": attempt,
    }  # fmt: skip


ROWS = [result(variant, layer) for layer in ("o", "down") for variant in ("linear", "lane_row")]
CHAIN = {
    "record": "chain", "kernel": "chain", "variant": "spmv", "pattern": "2:4", "layers": 36, "outcome": "correct", "us_reason": None,
    "us": {"p20": 900.0, "p50": 1000.0, "p80": 1100.0}, "speedup": {"linear": 2.0, "dense": 1.5},
}  # fmt: skip


def attempts(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"attempt": number, "started": "2026-12-01T00:00:00+00:00", "outcome": "complete", "changed": changed}
        for number, changed in enumerate(changes, start=1)
    ]


A100: dict[str, Any] = {"environment": {"torch": "2.13.0", "triton": "3.7.1", "gpu": {"name": "NVIDIA A100"}}}
LATER: dict[str, Any] = {"git": {"commit": "fedcba9876543210", "dirty": True}}


def test_of_one_machine_and_code(sdbench, saved_run):
    saved_run("run", "kernels", ASKED, [*ROWS[:2], *(one | {"attempt": 2} for one in ROWS[2:])], audit=attempts({}, {}))
    header, title, *_ = sdbench("report", "run").out.splitlines()
    assert header.endswith("on NVIDIA H200, torch 2.11.0, Triton 3.6.0, commit 0123456, complete in 2 attempts")
    assert title.startswith("SpMV")


def test_of_two(sdbench, saved_run):
    rows = [*ROWS[:2], *(one | {"attempt": 2} for one in ROWS[2:]), CHAIN | {"attempt": 2}]
    saved_run("run", "kernels", ASKED, rows, audit=attempts({}, A100 | LATER))
    assert sdbench("report", "run").out.splitlines()[:4] == [
        "run: sdbench kernels of o,down, 2:4, bf16 on several machines or versions, complete in 2 attempts",
        "ROWS OF 2 ATTEMPTS that differ in torch, triton, gpu, git: speed-ups and sums across them compare these too",
        "attempt 1 measured 2 of the rows and samples (o) on NVIDIA H200, torch 2.11.0, Triton 3.6.0, commit 0123456",
        "attempt 2 measured 3 of the rows and samples (down, chains) on NVIDIA A100, torch 2.13.0, Triton 3.7.1, "
        "commit fedcba9 with changes",
    ]


def test_an_attempt_that_measured_nothing_lends_no_name(sdbench, saved_run):
    saved_run("run", "kernels", ASKED, ROWS, audit=attempts({}, A100 | LATER))
    assert "on NVIDIA H200, torch 2.11.0, Triton 3.6.0, commit 0123456, complete in 2" in sdbench("report", "run").out.splitlines()[0]
    assert json.loads(sdbench("report", "run", "--format", "json").out)["environment"]["gpu"]["name"] == "NVIDIA H200"


def test_rows_that_were_measured_again_count_for_the_later_attempt(sdbench, saved_run):
    saved_run("run", "kernels", ASKED, [*ROWS, *(one | {"attempt": 2} for one in ROWS)], audit=attempts({}, A100))
    header, title, *_ = sdbench("report", "run").out.splitlines()
    assert "on NVIDIA A100, torch 2.13.0, Triton 3.7.1, commit 0123456" in header and title.startswith("SpMV")


def test_told_when_it_happens_and_in_its_own_report(sdbench, tmp_path, monkeypatch, caplog):
    from sdbench import environment, results

    call = ("kernels", "--shapes", "8x32,8x64", "--device", "cpu", "--variant", "reference", "--output", "run")
    monkeypatch.setattr(environment, "describe", lambda device: {"torch": "2.11.0", "gpu": None, "cpu": {"model": "one"}})
    monkeypatch.setattr(results, "git_state", lambda: {"commit": "0123456789", "dirty": False})
    sdbench(*call)
    rows = read_jsonl(tmp_path / "run/rows.jsonl")
    kept = [one for one in rows if one["shape"] == [8, 32]]
    (tmp_path / "run/rows.jsonl").write_text("".join(strict_json(one) + "\n" for one in kept))
    monkeypatch.setattr(environment, "describe", lambda device: {"torch": "2.11.0", "gpu": None, "cpu": {"model": "two"}})
    monkeypatch.setattr(results, "git_state", lambda: {"commit": "9876543210", "dirty": False})
    done = sdbench(*call)
    told = "run: kept rows are not of this machine and code (cpu.model one, two; git.commit 0123456789, 9876543210, the last one now)"
    lost = f"run/rows.jsonl holds {len(kept)} of {len(rows)} rows: what is gone is measured again"
    assert [record.message for record in caplog.records] == [f"{told}; reports tell them apart", lost]
    first, second, third = done.out.splitlines()[:3]
    assert first.startswith("ROWS OF 2 ATTEMPTS that differ in cpu, git:")
    assert "(8x32) on CPU" in second and "commit 0123456" in second and "(8x64) on CPU" in third and "commit 9876543" in third
    assert all(line in (tmp_path / "run/report.md").read_text() for line in (first, second, third))
    assert sdbench("report", "run").out.split("\n", 1)[1] == done.out
    assert len(caplog.records) == 2
