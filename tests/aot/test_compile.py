"""Compile-only checks for sm_80, sm_90 and sm_100 without a GPU: what is registered builds, and into the code that it was written for."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdbench.kernels import tuned

SCRIPT = Path(__file__).with_name("compile_variants.py")
DECODE_SCRIPT = Path(__file__).with_name("compile_decode.py")

PATTERNS = "2:4,1:4,16:32,3:4,dense"
CASES = [(80, "down", PATTERNS), (90, "down", PATTERNS), (90, "qkv,o,gate_up", "2:4,dense"), (100, "down", PATTERNS)]
"""Capability, layers, patterns. ``down`` has the longest loop and an edge that tiles do not divide; the rest differs in sizes alone."""

NARROW = {
    "portable": "one plain load a value, so that any pattern, dtype and back end will do",
}
"""Variants that do not promise 16-byte loads of their values, and why; every other one does."""


def compile_all(cache: Path, *arguments: str, script: Path = SCRIPT) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel, in words."""
    found = []
    if row["stack"] or row["local"]:
        found.append(f"spills: {row['stack']} bytes of stack, {row['local']} of local memory a thread")
    # Tiles of a matrix unit go through shared memory on purpose.
    on_matrix_units = row["variant"] == "gemm"
    if row["exchanges_in_loops"] and not on_matrix_units:
        found.append(f"a layout conversion inside a loop moves data between threads ({row['exchanges_in_loops']} instructions)")
    if row["misplaced_products"]:
        found.append(f"{row['misplaced_products']} matrix instructions on tiles that are not an element a thread")
    if row["late_loads"] and row["config"].get("ahead"):
        found.append(f"{row['late_loads']} loads of a loop come after the work that should hide their latency")
    if row["waits"] != bool(row["config"].get("pdl")):
        found.append(f"{row['waits']} waits for the kernel before")
    if row["variant"] not in NARROW and not on_matrix_units:
        sizes = {int(size): count for size, count in row["streamed_loads"].items()}
        wide = 16 * sizes.pop(16, 0)
        narrow = sum(size * count for size, count in sizes.items())
        # Beside the values a packed weight has a 4-byte mask a word, which may come in any size.
        masks = wide * 4 / row["value_bytes"] if row["value_bytes"] else 0
        if not wide or narrow not in (0, masks):
            found.append(f"not all values come in 16-byte loads: {row['streamed_loads']}")
    return found


def check(rows: list[dict[str, Any]]) -> None:
    bad = {f"{r['kernel']}/{r['variant']} {r['pattern']} {r['shape']} {r['tokens']} {r['config']}": faults(r) for r in rows if faults(r)}
    assert not bad


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "layers", "patterns"), CASES)
def test_default_configs(capability: int, layers: str, patterns: str, tmp_path: Path) -> None:
    rows = compile_all(tmp_path, "default", str(capability), layers, patterns)
    assert {(row["kernel"], row["variant"]) for row in rows} >= {("spmv", name) for name in ("lane_row", "lane_row_nibble", "portable")}
    check(rows)
    # The look for exchanges in loops needs loops to look at; a short one is unrolled.
    assert layers != "down" or all(row["loop_instructions"] for row in rows if row["variant"] != "expand")
    by_table = [row for row in rows if row["variant"] == "lane_row_nibble"]
    assert all(row["products"] for row in rows if row["variant"] == "tile")
    assert by_table and not any(row["bit_scans"] for row in by_table)
    assert any(row["waits"] for row in rows) == (capability >= 90)


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["gate_up,down", "qkv,o"])
def test_shipped_configs(layers: str, tmp_path: Path) -> None:
    if not tuned.shipped(90):
        pytest.skip("no tuned configs ship for sm_90")
    rows = compile_all(tmp_path, "shipped", "90", layers)
    assert rows
    check(rows)


@pytest.mark.slow
def test_faults_are_seen_in_compiled_code(tmp_path: Path) -> None:
    """With twice the warps and a fraction of the registers that the tiles were made for."""
    rows = compile_all(tmp_path, "default", "90", "down", "dense", "num_warps=8,maxnreg=32")
    found = " ".join(fault for row in rows for fault in faults(row))
    assert "spills" in found and "moves data between threads" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "capability", "slices"),
    [("qwen3-4b", 90, True), ("qwen3-4b-short", 90, True), ("qwen3-4b-batch", 90, True), ("small-with-biases", 80, False)],
)
def test_kernels_of_a_decode_step(model: str, capability: int, slices: bool, tmp_path: Path) -> None:
    """They build, spill nothing, fit shared memory, and take part in dependent launch where the device has it.

    All but the first: attention reads the position before its wait, so that a step may not begin before the last one has ended.
    """
    rows = compile_all(tmp_path, model, str(capability), script=DECODE_SCRIPT)
    several = model.endswith("batch")
    names = ["norm_kernel", "attention_kernel", "merge_kernel", "norm_kernel", "gate_kernel"]
    names += ["pick_kernel" if several else "head_kernel", "advance_kernel"]
    assert [row["kernel"] for row in rows] == [name for name in names if slices or name != "merge_kernel"]
    for row in rows:
        assert (row["stack"], row["local"]) == (0, 0), row
        # Of an A100 and an H200.
        assert row["shared"] <= {80: 166_912, 90: 232_448}[capability], row
        assert (row["waits"], row["launches_next"]) == ((1, 1) if capability >= 90 else (0, 0)), row
    assert [row["dependent"] for row in rows] == [False] + [capability >= 90] * (len(rows) - 1)
    if not several:
        (head,) = [row for row in rows if row["kernel"] == "head_kernel"]
        assert set(head["streamed_loads"]) == {"16"}


def test_what_is_read_from_ptx() -> None:
    script = runpy.run_path(str(SCRIPT))
    ptx = """
      st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};
      @%p1 bra $L__BB0_3;
    $L__BB0_2:  // %loop
      bar.sync 0;
      @%p2 ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1];
      shfl.sync.bfly.b32 %r6, %r7, 16, 31, -1;
      @never bar.red.popc.u32 none, 0, never;
      @%p3 ld.global.L1::evict_first.L2::cache_hint.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ], %rd4;
      ld.global.L1::evict_first.b32 %r8, [ %rd5 + 0 ];
      ld.global.v4.b32 { %r9, %r10, %r11, %r12 }, [ %rd6 + 0 ];
      @%p4 bra $L__BB0_2;
    $L__BB0_3:
      bar.sync 0;
    """
    loops = script["inside_loops"](ptx)
    assert len(loops) == 8
    assert script["exchanges"](loops) == 3
    assert script["streamed_loads"](ptx) == {16: 1, 4: 1}


def test_late_loads_are_read_from_machine_code() -> None:
    script = runpy.run_path(str(SCRIPT))
    weight, x, work = (
        "      @P0 LDG.E.EF.128 R4, desc[UR4][R2.64] ;",
        "      LDG.E.128 R8, desc[UR4][R2.64] ;",
        "      HMMA.16816.F32.BF16 R0, R4, R8, R0 ;",
    )

    def late(*steps: str) -> int:
        return script["late_loads"]("\n".join((work, ".L_x_0:", *steps, "      @P0 BRA `(.L_x_0) ;", work, work, weight)))

    assert late(weight, x, work, work, weight, weight, work, work) == 0
    assert late(weight, work, work, weight, work, weight, work, x) == 1
    assert late(weight, work, work, work, work, weight, weight) == 2


def test_layouts_of_matrix_instructions_are_read_from_ttgir() -> None:
    script = runpy.run_path(str(SCRIPT))
    ttgir = """
#blocked = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
#blocked1 = #ttg.blocked<{sizePerThread = [2], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
    %a:4 = tt.elementwise_inline_asm "{ mma.sync.x; }" %s : tensor<128xf32, #LAYOUT> -> tensor<128xf32, #LAYOUT>, tensor<128xf32, #LAYOUT>
    %b = tt.elementwise_inline_asm "{ prmt; }" %m : tensor<128xi32, #blocked1> -> tensor<128xi64, #blocked1>, tensor<128xi64, #blocked1>
    """
    assert script["misplaced_products"](ttgir.replace("#LAYOUT", "#blocked")) == 0
    assert script["misplaced_products"](ttgir.replace("#LAYOUT", "#blocked1")) == 1


def test_every_fault_is_seen() -> None:
    good = {
        "kernel": "spmv",
        "variant": "lane_row",
        "config": {"pdl": 1},
        "value_bytes": 32,
        "stack": 0,
        "local": 0,
        "exchanges_in_loops": 0,
        "streamed_loads": {"4": 2, "16": 4},
        "waits": 1,
        "misplaced_products": 0,
        "late_loads": 0,
    }
    dense = good | {"kernel": "dense", "variant": "gemv", "value_bytes": None, "streamed_loads": {"16": 8}}
    for row in (good, dense, good | {"streamed_loads": {"16": 4}}, good | {"variant": "portable", "streamed_loads": {"4": 1, "2": 16}}):
        assert faults(row) == []
    for row, message in (
        (good | {"stack": 8}, "spills: 8 bytes of stack"),
        (good | {"local": 16}, "16 of local memory"),
        (dense | {"exchanges_in_loops": 5}, "moves data between threads"),
        (good | {"waits": 0}, "0 waits"),
        (good | {"misplaced_products": 8}, "8 matrix instructions on tiles"),
        (good | {"config": {"pdl": 1, "ahead": 1}, "late_loads": 3}, "3 loads of a loop come after the work"),
        (good | {"streamed_loads": {"4": 2, "8": 8}}, "not all values"),
        (good | {"streamed_loads": {"4": 2, "8": 2, "16": 3}}, "not all values"),
        (good | {"streamed_loads": {}}, "not all values"),
        (dense | {"streamed_loads": {"8": 2, "16": 7}}, "not all values"),
    ):
        (fault,) = faults(row)
        assert message in fault
