"""Compiles registered kernel variants for a GPU that need not be there, and prints what came out: a JSON object a line.

A script and no part of a test: where Triton's interpreter is on, as it is in the tests of a machine without a GPU, nothing can be compiled.

    python compile_variants.py default 90 gate_up,down 2:4,16:32,dense
    python compile_variants.py default 90 gate_up dense num_warps=8,maxnreg=32
    python compile_variants.py shipped 90 gate_up,down
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sdbench.architectures import named_shapes
from sdbench.devices import DTYPES
from sdbench.kernels import registry, tuned
from sdbench.kernels.registry import CompileSource, Config, Problem, Variant
from sdbench.pattern import Pattern
from sdbench.suites.kernels.suite import UNPRUNED

SHAPES = named_shapes("qwen3-4b")
SM_COUNT = {80: 108, 90: 132, 100: 148}
"""Of an A100, an H200 and a B200: default configs depend on it."""

SOME_TOKENS = (4, 32)
"""Rows of x for kernels that are not for one, where they serve so many."""

Case = tuple[Variant, Problem, Config]


def compilable() -> list[Variant]:
    """Every registered variant with a kernel of ours."""
    registry.variants("spmv")  # loads every kernel's files
    return [variant for _, variant in sorted(registry._VARIANTS.items()) if variant.compile_source]


def default_cases(capability: int, layers: list[str], patterns: list[str]) -> Iterator[Case]:
    """Default configs; the first of each variant comes with dependent launch as well, where the variant and the device have it.

    Args:
        capability: Compute capability, 90 for 9.0.
        layers: Names of Qwen3-4B's fused matrices.
        patterns: N:M for the packed weights; "dense" for the kernels of weights without a pattern.
    """
    for variant in compilable():
        dependent = False
        for text in patterns:
            if (text == "dense") != (variant.kernel in UNPRUNED):
                continue
            pattern = None if text == "dense" else Pattern.parse(text)
            numbers = (1,) if variant.serves(1) else [tokens for tokens in SOME_TOKENS if variant.serves(tokens)]
            for layer, tokens in product(layers, numbers):
                problem = Problem(*SHAPES[layer], torch.bfloat16, pattern, SM_COUNT[capability], capability, tokens)
                if variant.constraint(problem):
                    continue
                config = variant.default(problem)
                yield variant, problem, config
                if "pdl" in config and problem.dependent_launch and not dependent:
                    dependent = True
                    yield variant, problem, {**config, "pdl": 1}


def shipped_cases(capability: int, layers: list[str]) -> Iterator[Case]:
    """The configs that ship for the shapes of some layers."""
    shapes = [SHAPES[layer] for layer in layers]
    for choice in tuned.shipped(capability):
        key, variant = choice.key, registry.find(choice.key.kernel, choice.key.variant)
        if tuple(key.shape) in shapes and variant.compile_source:
            pattern = Pattern.parse(key.pattern) if key.pattern else None
            yield variant, Problem(*key.shape, DTYPES[key.dtype], pattern, SM_COUNT[capability], capability, key.tokens), choice.config


def compile_for(source: CompileSource, capability: int, **options: Any) -> Any:
    """``triton.compile`` with what a launch on these shapes would tell it.

    Pointers and extents are multiples of 16; what hangs on a split of K need not be, and of some a launch tells nothing.
    """
    told = {parameter.name for parameter in source.function.params if not parameter.do_not_specialize}
    known = [
        index
        for index, (name, kind) in enumerate(source.signature.items())
        if name in told and (kind.startswith("*") or (kind == "i32" and "split" not in name))
    ]
    signature = source.signature | dict.fromkeys(source.constexprs, "constexpr")
    return triton.compile(
        ASTSource(source.function, signature, source.constexprs, {(index,): [["tt.divisibility", 16]] for index in known}),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": source.num_warps, "enable_fp_fusion": True, **options},
    )


def inside_loops(ptx: str) -> list[str]:
    """Lines of PTX between a label and a branch back to it."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line.partition(":")[0]: number for number, line in enumerate(lines) if re.match(r"\$\w+:", line)}
    inside: set[int] = set()
    for number, line in enumerate(lines):
        branch = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if branch and labels[branch[1]] < number:
            inside |= set(range(labels[branch[1]], number))
    return [lines[number] for number in sorted(inside)]


def exchanges(lines: list[str]) -> int:
    """Instructions by which threads exchange data: shared memory, barriers, shuffles.

    A layout conversion that moves data becomes such instructions. One that only renames what a thread holds already stays in Triton's IR,
    where it looks the same, and costs nothing. What a thread writes for itself (``spmm/permutes.py``) is no exchange, nor is a barrier that
    no thread takes part in (``spmm/warps.py``).
    """
    moving = r"\b(?:ld|st)\S*\.shared(?!.*\[(?:room\+\d+|place)\])|(?<!@never )\bbar(?:rier)?\.|\bshfl\."
    return sum(bool(re.search(moving, line)) for line in lines)


def streamed_loads(ptx: str) -> dict[int, int]:
    """Bytes of one load -> number of such loads, of those that are read once: masks and values, marked ``evict_first``."""
    counts: dict[int, int] = {}
    for vector, bits in re.findall(r"ld\.global\S*evict_first\S*?(?:\.v(\d))?\.b(\d+)\s", ptx):
        size = int(vector or 1) * int(bits) // 8
        counts[size] = counts.get(size, 0) + 1
    return counts


def misplaced_products(ttgir: str) -> int:
    """Matrix instructions written as PTX on tiles whose element i is not the one element of thread i, which is what they count on."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", ttgir, re.MULTILINE))
    plain = {name for name, layout in layouts.items() if re.search(r"sizePerThread = \[1\], threadsPerWarp = \[32\],", layout)}
    tiles = re.findall(r"elementwise_inline_asm .*mma\.sync.* -> tensor<\d+xf32, (#\S+?)>,", ttgir)
    return sum(layout not in plain for layout in tiles)


def memory_of_a_thread(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of stack and local memory (both 0 where nothing spills), as the cubin itself has them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", done.stdout)
    assert found is not None, done.stdout
    return dict(zip(("registers", "stack", "local"), map(int, found.groups()), strict=True))


def machine_code(cubin: bytes) -> str:
    """A cubin's instructions as the GPU runs them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True).stdout


def late_loads(code: str) -> int:
    """Loads of weights among the work of the step that should hide their latency, for loops of two steps: behind the first one's work."""
    lines = code.splitlines()
    labels = {line.strip().rstrip(":"): number for number, line in enumerate(lines) if line.startswith(".L")}
    late = 0
    for number, line in enumerate(lines):
        branch = re.search(r"\bBRA\S*\s.*?(\.L\w+)", line)
        if branch and labels.get(branch[1], number) < number:
            loop = lines[labels[branch[1]] : number]
            products = [place for place, step in enumerate(loop) if " HMMA" in step]
            # What is read once is marked evict_first.
            loads = [place for place, step in enumerate(loop) if re.search(r" LDG\S*\.EF\b", step)]
            late += sum(sum(product < load for product in products) > len(products) / 2 for load in loads)
    return late


def facts(compiled: Any) -> dict[str, Any]:
    """What the checks look at."""
    ptx = compiled.asm["ptx"]
    loops = inside_loops(ptx)
    return {
        **memory_of_a_thread(compiled.asm["cubin"]),
        "loop_instructions": len(loops),
        "exchanges_in_loops": exchanges(loops),
        "streamed_loads": streamed_loads(ptx),
        "bit_scans": ptx.count("bfind.u32"),
        "waits": ptx.count("griddepcontrol.wait"),
        "late_loads": late_loads(machine_code(compiled.asm["cubin"])) if "mma.sync" in ptx else 0,
        "products": ptx.count("mma.sync"),
        "misplaced_products": misplaced_products(compiled.asm["ttgir"]),
    }


def main(arguments: list[str]) -> None:
    """Compiles what the arguments name, each distinct kernel once."""
    kind, capability, layers, *rest = arguments
    if kind == "default":
        cases = default_cases(int(capability), layers.split(","), rest[0].split(","))
    else:
        cases = shipped_cases(int(capability), layers.split(","))
    options = {name: int(value) for name, value in (option.split("=") for part in rest[1:] for option in part.split(","))}
    seen: dict[str, dict[str, Any]] = {}
    for variant, problem, config in cases:
        assert variant.compile_source is not None
        source = variant.compile_source(problem, config)
        same = repr((source.function, source.signature, source.constexprs, source.num_warps))
        if same not in seen:
            seen[same] = facts(compile_for(source, int(capability), **options))
        row = {
            "kernel": variant.kernel,
            "variant": variant.name,
            "shape": [problem.out_features, problem.in_features],
            "pattern": str(problem.pattern) if problem.pattern else None,
            "tokens": problem.tokens,
            "value_bytes": problem.pattern.kept_per_word * problem.dtype.itemsize if problem.pattern else None,
            "config": dict(config),
        }
        sys.stdout.write(json.dumps(row | seen[same]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
