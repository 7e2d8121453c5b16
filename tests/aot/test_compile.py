"""Compile-only checks: every registered Triton kernel builds for sm_80 and sm_90 without a GPU, with the loads that it was written for."""

import json
import os
import subprocess
import sys

import pytest

PROBLEMS = ["2:4", "1:4", "3:4"]

SCRIPT = """
import json, re, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sdbench.kernels import registry
from sdbench.pattern import Pattern

capability, results = int(sys.argv[1]), {}
for kernel, patterns in (("spmv", json.loads(sys.argv[2])), ("dense", [None])):
    for variant in registry.variants(kernel):
        if variant.compile_source is None:
            continue
        for pattern in patterns:
            problem = registry.Problem(19456, 2560, torch.bfloat16, pattern and Pattern.parse(pattern), 132, capability)
            if variant.constraint(problem):
                continue
            config = {**variant.default(problem), "pdl": problem.dependent_launch}
            source = variant.compile_source(problem, config)
            pointers = {(index,): [["tt.divisibility", 16]] for index, kind in enumerate(source.signature.values()) if kind[0] == "*"}
            signature = source.signature | dict.fromkeys(source.constexprs, "constexpr")
            compiled = triton.compile(
                ASTSource(source.function, signature, source.constexprs, pointers),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": source.num_warps, "enable_fp_fusion": True},
            )
            ptx = compiled.asm["ptx"]
            results[f"{kernel}/{variant.name}/{pattern}"] = {
                "wide_loads": len(re.findall(r"ld\\.global\\S*\\.v(?:2\\.b64|4\\.b32)", ptx)),
                "bfind": ptx.count("bfind.u32"),
                "prmt": ptx.count("prmt.b32 t"),
                "waits": ptx.count("griddepcontrol.wait"),
                "local": len(re.findall(r"\\b(?:ld|st)\\.local", ptx)),
                "cubin": len(compiled.asm["cubin"]),
            }
print(json.dumps(results))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int) -> None:
    # A process of its own: where the interpreter is on, kernels have no source to compile.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability), json.dumps(PROBLEMS)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    assert {name.rpartition("/")[0] for name in results} == {"spmv/lane_row", "spmv/lane_row_nibble", "spmv/portable", "dense/gemv"}
    for name, found in results.items():
        assert found["cubin"] > 0
        assert found["local"] == 0, f"{name} spills"
        # Dependent launch is Hopper's; a kernel that waits must do so once, before its loop.
        assert found["waits"] == (capability >= 90 and "portable" not in name)
    for pattern, chunks in zip(PROBLEMS, (2, 1, 3), strict=True):
        found = results[f"spmv/lane_row/{pattern}"]
        # The first word and the prefetch in the loop: a 16-byte load a chunk each; one bit scan a value, twice (loop and last word).
        assert found["wide_loads"] == 2 * chunks
        assert found["bfind"] == 2 * 8 * chunks
    for pattern, chunks in (("2:4", 2), ("1:4", 1)):
        found = results[f"spmv/lane_row_nibble/{pattern}"]
        assert (found["bfind"], found["wide_loads"]) == (0, 2 * chunks)
        assert found["prmt"] == 4
    assert results["dense/gemv/None"]["wide_loads"] > 0
