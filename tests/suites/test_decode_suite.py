"""The decode suite in-process on a tiny random model, and its tables."""

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel
from triton.runtime.errors import OutOfResources, PTXASError

from sdbench.calibrate.magnitude import keep_mask
from sdbench.calibrate.select import select_linears
from sdbench.engine.decoders import TransformersDecoder, named
from sdbench.engine.fused import FusedDecoder
from sdbench.engine.packed_linear import packed_linears
from sdbench.engine.paths import COMPILED, EAGER, FUSED, FUSED_GRAPH, FUSED_INT8, GRAPH, SHORT
from sdbench.errors import SdbenchError, UsageError
from sdbench.models import load_model, resolve_model
from sdbench.packing import pack
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.results import RunDirectory
from sdbench.suites.decode import suite
from sdbench.suites.decode.options import DecodeOptions
from sdbench.suites.decode.profile import kind_of, shares
from sdbench.suites.decode.prompts import in_turn
from sdbench.suites.decode.report import _prompts, report
from sdbench.suites.decode.suite import judge, run
from sdbench.suites.reports import render
from sdbench.suites.runs import read_run


def options(folder: Path, **changes: Any) -> DecodeOptions:
    standard: dict[str, Any] = {
        "spec": resolve_model(f"random:{folder}", None, torch.device("cpu")),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "patterns": (Pattern(2, 4),),
        "contexts": (4, 9),
        "tokens": 5,
        "repeats": 2,
        "warmup_tokens": 2,
        "baselines": True,
        "profiled": False,
        "targets": (),
        "ignore": (),
        "seed": 0,
    }
    return DecodeOptions(**standard | changes)


@pytest.fixture
def folder(tiny_qwen3: PreTrainedModel, tmp_path: Path) -> Path:
    tiny_qwen3.config.save_pretrained(tmp_path / "architecture")
    return tmp_path / "architecture"


def quiet() -> Progress:
    return Progress(Console(file=io.StringIO()))


def test_every_way_and_context_has_a_row(folder: Path, tmp_path: Path) -> None:
    wanted = options(folder)
    with RunDirectory.open(tmp_path / "run", "decode", wanted.arguments(), {}) as directory:
        rows = run(wanted, directory, quiet())
    ways = [("dense", FUSED, 4), ("dense", FUSED, 9), ("dense", EAGER, 4), ("2:4", FUSED, 4), ("2:4", FUSED, 9)]
    assert [(row["arm"], row["path"], row["context"]) for row in rows] == ways
    linears = 2 * 4 * (64 * (128 + 64 + 64) + 128 * 64 + 64 * 128 * 3)
    for row in rows:
        assert row["outcome"] == "correct" and row["tokens"] == 5
        assert row["ms_per_token"] == pytest.approx(1e3 / row["decode_rate"]["p50"])
        assert row["gbps"] == pytest.approx(row["step_bytes"] * row["decode_rate"]["p50"] / 1e9)
        assert (row["ceiling"], row["kernels"], row["capture"]) == (None, None, None)
        memory = row["memory"]
        positions = row["context"] + 5
        assert memory["cache"] == (None if row["path"] == EAGER else 2 * 2 * 64 * positions * 4)  # keys and values x layers x width x bytes
        assert memory["parameters"] == rows[0]["memory"]["parameters"] - (linears if row["arm"] == "2:4" else 0)
        # What steps read is what the modules hold: each pruned linear once.
        assert memory["packed"] == (linears * 17 // 32 if row["arm"] == "2:4" else 0)
        assert memory["weights"] == memory["parameters"] + memory["packed"]
        assert memory["weights_ratio"] == memory["weights"] / rows[0]["memory"]["weights"]
        assert memory["allocated"] is None and "no GPU" in memory["allocated_reason"]
    # Seven linears a layer keep half of their values and a bit for each column: fp32 at 2:4 reads 17/32 of the dense linears.
    assert rows[0]["step_bytes"] - rows[3]["step_bytes"] == linears * 15 / 32
    assert rows[1]["step_bytes"] - rows[0]["step_bytes"] == 5 * 2 * 2 * 64 * 4  # positions x layers x keys and values x width x bytes
    fastest = max(row["decode_rate"]["p50"] for row in rows[:3] if row["context"] == 4)
    assert rows[3]["speedup"] == pytest.approx(rows[3]["decode_rate"]["p50"] / fastest)
    assert [bool(row["prompt"]) for row in rows] == [False, False, False, True, True]
    for row in rows[3:]:
        prompt = row["prompt"]
        assert (prompt["context"], prompt["pairs"], prompt["outcome"]) == (row["context"], 2, "correct")
        assert (
            prompt["dense_seconds"]["p50"] > 0 and prompt["pruned_seconds"]["p50"] > 0 and prompt["ratio"]["p20"] <= prompt["ratio"]["p50"]
        )
    assert render(read_run(tmp_path / "run")).more == report(rows, wanted.arguments(), {}).more
    assert render(read_run(tmp_path / "run")).cells == report(rows, wanted.arguments(), {}).cells


def test_prompts_run_in_turn_on_what_they_say(tiny_qwen3: PreTrainedModel) -> None:
    """Dense products first, then packed ones, then the other way round; the model is left as it was."""
    linears = select_linears(tiny_qwen3)
    weights = {name: pack(one.weight.detach(), keep_mask(one.weight, Pattern(2, 4)), Pattern(2, 4)) for name, one in linears.items()}
    seen: list[str] = []
    layer = tiny_qwen3.model.layers[0].mlp
    with torch.no_grad(), packed_linears(tiny_qwen3, weights, "pruned") as packed:
        hooks = [linears["model.layers.0.mlp.down_proj"].register_forward_hook(lambda *_: seen.append("dense"))]
        hooks.append(packed["model.layers.0.mlp.down_proj"].register_forward_hook(lambda *_: seen.append("pruned")))
        rows = list(in_turn(tiny_qwen3, packed, linears, [[5, 6, 7], [5] * 9], 3))
        assert layer.down_proj is packed["model.layers.0.mlp.down_proj"]
    for hook in hooks:
        hook.remove()
    assert seen == 2 * ["dense", "pruned", "pruned", "dense", "dense", "pruned", "pruned", "dense"]
    assert [(row["context"], row["outcome"]) for row in rows] == [(3, "correct"), (9, "correct")]
    assert layer.down_proj is linears["model.layers.0.mlp.down_proj"]


class Elsewhere:
    """A weight's values on a device that is not here."""

    def __init__(self, device: str):
        self.device = device

    def to(self, device: str) -> "Elsewhere":
        if device == "full":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Elsewhere(device)


@pytest.mark.parametrize("second", ["gpu", "full"])
def test_weights_that_came_for_prompts_stay(second: str, tiny_qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are due there right after, and would be copied twice; without room for all of them none came."""
    monkeypatch.setattr("sdbench.suites.decode.prompts._pairs", lambda *_: [(2.0, 1.0)])
    linears: Any = {name: SimpleNamespace(weight=SimpleNamespace(data=Elsewhere("main memory"))) for name in "ab"}
    packed: Any = {name: SimpleNamespace(packed=SimpleNamespace(device=device)) for name, device in (("a", "gpu"), ("b", second))}
    (row,) = in_turn(tiny_qwen3, packed, linears, [[5, 6, 7]], 3)
    assert row["outcome"] == ("correct" if second == "gpu" else "out_of_resources")
    wanted = "gpu" if second == "gpu" else "main memory"
    assert [linear.weight.data.device for linear in linears.values()] == [wanted, wanted]


def test_prompts_without_room_for_both_weights(tiny_qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    linears = select_linears(tiny_qwen3)
    weights = {name: pack(one.weight.detach(), keep_mask(one.weight, Pattern(2, 4)), Pattern(2, 4)) for name, one in linears.items()}

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr("sdbench.suites.decode.prompts._pairs", full)
    with torch.no_grad(), packed_linears(tiny_qwen3, weights, "pruned") as packed:
        (row,) = in_turn(tiny_qwen3, packed, linears, [[5, 6, 7]], 3)
    assert (row["outcome"], row["reason"]) == ("out_of_resources", "CUDA out of memory. Tried to allocate 2 GiB")
    assert row["ratio"] is None and row["dense_seconds"] is None
    table = _prompts([{"arm": "2:4", "prompt": row}])
    assert table is not None and not table.cells
    assert table.lines[1] == "prompt of 2:4, 3: out_of_resources (CUDA out of memory. Tried to allocate 2 GiB)"


def test_a_resumed_run_keeps_what_it_has(folder: Path, tmp_path: Path) -> None:
    wanted = options(folder, contexts=(4,), baselines=False, repeats=1)
    with RunDirectory.open(tmp_path / "run", "decode", wanted.arguments(), {}) as directory:
        first = run(wanted, directory, quiet())
    with RunDirectory.open(tmp_path / "run", "decode", wanted.arguments(), {}) as directory:
        assert run(wanted, directory, quiet()) == first


def test_rows_of_another_gpu_are_not_compared_with(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all ways are measured already, and otherwise some of them: x dense would be over the other GPU's."""
    monkeypatch.setattr(suite, "load_model", lambda *_: pytest.fail("a model is loaded"))
    wanted = options(folder, contexts=(4,), baselines=False)
    on_gpu = replace(wanted, device=torch.device("cuda"))
    machines = [{"gpu": {"name": name, "capability": "9.0"}} for name in ("H100", "H200")]
    figures = {"tokens": 5, "outcome": "correct", "decode_rate": {"p20": 1.0, "p50": 1.0, "p80": 1.0}, "memory": None, "capture": None}
    with RunDirectory.open(tmp_path / "run", "decode", on_gpu.arguments(), machines[0]) as directory:
        for arm, path in (("dense", FUSED_GRAPH), ("int8", FUSED_INT8), ("2:4", FUSED_GRAPH)):
            directory.add_row({"record": "decode", "arm": arm, "path": path, "context": 4, **figures})
        directory.add_row({"record": "prompt", "arm": "2:4", "context": 4})
    with RunDirectory.open(tmp_path / "run", "decode", on_gpu.arguments(), machines[0]) as directory:
        assert [row["speedup"] for row in run(on_gpu, directory, quiet())] == [1, 1, 1]
    with (
        RunDirectory.open(tmp_path / "run", "decode", on_gpu.arguments(), machines[1]) as directory,
        pytest.raises(SdbenchError, match=r"run holds rows of H100 \(9.0\), and this is H200 \(9.0\); choose another --output"),
    ):
        run(on_gpu, directory, quiet())


def test_a_context_that_the_model_does_not_have(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []
    monkeypatch.setattr(suite, "_measure", lambda *arguments: measured.append(arguments))
    with pytest.raises(UsageError, match="--context 255 and --tokens 5 exceed the 256 positions"):
        run(options(folder, contexts=(4, 255), baselines=False), None, quiet())
    with pytest.raises(UsageError, match="--context 4 and --warmup-tokens 300 exceed the 256 positions"):
        run(options(folder, contexts=(4,), warmup_tokens=300), None, quiet())
    assert not measured


@pytest.mark.parametrize(("changes", "message"), [({"contexts": (0,)}, "--context is 0"), ({"tokens": 1}, "--tokens is 1")])
def test_options_out_of_range(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options(folder, **changes)


def test_a_speed_up_needs_a_dense_rate_at_its_context_by_its_loop() -> None:
    def row(arm: str, path: str, context: int, p50: float | None) -> dict[str, Any]:
        return {"arm": arm, "path": path, "context": context, "decode_rate": p50 and {"p20": 1.0, "p50": p50, "p80": 9.0}}

    rows = [
        row("dense", FUSED_GRAPH, 4, 2.0), row("dense", GRAPH, 4, None), row("int8", FUSED_INT8, 4, 3.0), row("2:4", FUSED_GRAPH, 4, 3.0),
        row("2:4", FUSED_GRAPH, 9, 2.0), row("2:4", GRAPH, 4, 1.0), row("dense", GRAPH, 5, 1.0), row("2:4", FUSED_GRAPH, 5, 3.0),
    ]  # fmt: skip
    assert [row["speedup"] for row in judge(rows)] == [1.0, None, 1.5, 1.5, None, None, 1.0, None]


def test_kernels_are_told_by_their_names() -> None:
    names = ["lane_row_kernel", "gemv_kernel", "attention_kernel", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "elementwise_kernel"]
    assert [kind_of(name) for name in names] == ["pruned products", "dense products", "attention", "dense products", "other"]
    # Of several prompts.
    names = ["tile_kernel", "arrange_kernel", "words_kernel", "expand_kernel", "finish_kernel", "pick_kernel", "gemm_kernel"]
    names += ["void cublasLt::splitKreduce_kernel<32, 16, int, float>"]
    kinds = [*["pruned products"] * 4, "sums of splits", "lm_head and argmax", "dense products", "dense products"]
    assert [kind_of(name) for name in names] == kinds


def test_overlapping_kernels_share_the_time_by_their_ends() -> None:
    # The norm is launched at 2 and waits until 10; the copy runs wholly inside the product.
    spans = [("norm_kernel", 2.0, 11.0), ("lane_row_kernel", 1.0, 10.0), ("copy", 3.0, 4.0), ("norm_kernel", 10.0, 13.0)]
    assert shares(spans) == {
        "pruned products": {"us": 6.0, "launches": 1},
        "other": {"us": 1.0, "launches": 1},
        "norms": {"us": 3.0, "launches": 2},
    }
    assert shares([]) == {}


def test_every_way_has_a_short_name() -> None:
    """Written out in the report, which imports no torch."""
    assert {*SHORT} == {FUSED, FUSED_GRAPH, FUSED_INT8, COMPILED, GRAPH, EAGER}


def test_every_name_of_a_way_is_that_way(folder: Path) -> None:
    model = load_model(options(folder).spec, torch.device("cpu"), torch.float32, print).model
    assert isinstance(named(FUSED, model, {}, 16), FusedDecoder)
    assert isinstance(named(EAGER, model, {}, 16), TransformersDecoder)
    with pytest.raises(SdbenchError, match="no way to decode is called 'fastest'"):
        named("fastest", model, {}, 16)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (OutOfResources(300_000, 232_448, "shared memory"), "out_of_resources"),
        (PTXASError("ptxas fatal"), "compile_error"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_resources"),
        (SdbenchError("no fused step"), "constraint"),
    ],
)
def test_a_way_that_fails_is_a_row(folder: Path, error: Exception, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = options(folder, contexts=(4,), repeats=1)
    made = suite.named

    def fails(path: str, *arguments: Any) -> Any:
        if path == EAGER:
            raise error
        return made(path, *arguments)

    monkeypatch.setattr(suite, "named", fails)
    rows = run(wanted, None, quiet())
    assert [row["outcome"] for row in rows] == ["correct", outcome, "correct"]
    assert rows[1]["reason"] and rows[1]["decode_rate"] is None and rows[2]["speedup"]
    assert rows[1]["reason"] in " ".join(report(rows, wanted.arguments(), {}).lines)


def test_graphs_are_told_once_an_arm(folder: Path) -> None:
    wanted = options(folder, contexts=(4, 9), baselines=False, repeats=1)
    rows = run(wanted, None, quiet())
    sizes = {("dense", 4): 75e6, ("dense", 9): 2e6, ("2:4", 9): 2e6}
    for row in rows:
        nbytes = sizes.get((row["arm"], row["context"]))
        row["capture"] = {"seconds": row["context"] / 4, "bytes": nbytes} if nbytes else None
    lines = [line for line in report(rows, wanted.arguments(), {}).lines if line.startswith("graph")]
    assert lines == [
        "graph of dense at 4 to 9: 1.0 to 2.2 s, 2 to 75 MB (compilation included)",
        "graph of 2:4 at 9: 2.2 s, 2 MB (compilation included)",
    ]


@pytest.mark.gpu
def test_a_pruned_qwen3_4b_takes_at_most_62_hundredths_of_the_dense_one() -> None:
    """Counted and by torch's allocator, and little more by the driver; lm_head and embedding, one dense matrix, included."""
    patterns = (Pattern(2, 4), Pattern(16, 32))
    command = [sys.executable, "-m", "sdbench", "decode", "--model", "random:Qwen/Qwen3-4B-Instruct-2507", "--no-baselines", "--json"]
    command += [part for pattern in patterns for part in ("--pattern", str(pattern))]
    done = subprocess.run([*command, "--tokens", "8", "--repeats", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    by_arm = {row["arm"]: row["memory"] for row in json.loads(done.stdout)["rows"]}
    linears = 36 * 2560 * (4096 + 2 * 1024 + 4096 + 3 * 9728)
    others = 151936 * 2560 + 2560 + 36 * (2 * 2560 + 2 * 128)
    assert by_arm["dense"]["weights"] == 2 * (linears + others)
    for pattern in map(str, patterns):
        memory = by_arm[pattern]
        assert memory["weights"] == 2 * others + linears * 9 // 8
        assert memory["originals"] == "main memory"
        assert memory["weights_ratio"] < 0.61
        assert memory["allocated_ratio"] <= 0.62
        # The driver's figure of the process where a container does not hide it, else of a GPU that nobody uses else: 0.633 on an H200;
        # kernels, graphs and unused ends of pages, 0.2 GB, are no smaller for a pruned model.
        assert (memory["process_ratio"] or memory["gpu_ratio"]) <= 0.64


@pytest.mark.gpu
def test_profile_and_graph_on_a_gpu(folder: Path) -> None:
    rows = run(options(folder, device=torch.device("cuda"), dtype=torch.bfloat16, profiled=True, contexts=(4,), tokens=40), None, quiet())
    by_arm = {row["arm"]: row for row in rows if row["profile"]}
    assert set(by_arm) == {"dense", "int8", "2:4"}
    for row in by_arm.values():
        assert row["kernels"] == pytest.approx(sum(entry["launches"] for entry in row["profile"].values()), abs=1)
        assert row["capture"]["seconds"] > 0 and math.isfinite(row["of_ceiling"])
    assert by_arm["2:4"]["profile"]["pruned products"]["launches"] == 8
