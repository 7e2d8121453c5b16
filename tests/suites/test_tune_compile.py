"""Configs compile side by side and nothing is launched: with a stand-in for the driver, since there may be no GPU here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
import json, threading, types
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from sdbench.kernels import registry
from sdbench.suites.kernels.compiling import compile_all
from sdbench.suites.kernels.operands import make_operand

class Driver:
    """What compilation asks of a device; a launch would ask for more."""
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())

@triton.jit
def scale(x_ptr, y_ptr, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(y_ptr + lane, tl.load(x_ptr + lane).to(tl.float32) * FACTOR)

def launch(weight, x, y, config):
    scale[(1,)](x, y, config["block"], 2)
    scale[(1,)](x, y, config["block"], config["factor"], num_warps=1)
    return y

variant = registry.Variant("dense", "scale", "for a test", launch, lambda problem: [], lambda problem: {})
operand = make_operand((64, 64), torch.bfloat16, None, torch.device("cpu"), 0)
block = lambda size, factor=3: {"block": size, "factor": factor}
configs = [block(16), block(24), block(32), {}, block(24), block(32), block(64, 4)]

threads, together, real = set(), threading.Barrier(2), triton.compile
def spy(*arguments, **options):
    threads.add(threading.get_ident())
    if len(threads) <= 2:
        together.wait(60)  # passes only while another compilation is under way
    return real(*arguments, **options)
run = JITFunction.run
scale.device_caches[0]
scale.compile = spy
first = list(compile_all(variant, operand, configs))
def compiled_before(*arguments, **options): raise AssertionError("compiled a second time")
scale.compile = compiled_before
second = list(compile_all(variant, operand, [configs[0], configs[2], configs[6]]))
print(json.dumps({"first": first, "second": second, "main": threading.get_ident() in threads, "restored": JITFunction.run is run}))
'''


@pytest.mark.slow
def test_configs_compile_in_parallel_and_none_is_launched(tmp_path: Path) -> None:
    """CASES 10: a config that does not compile, or that its launcher refuses, costs only its own outcome."""
    script = tmp_path / "compile_configs.py"
    script.write_text(SCRIPT)
    # Where the interpreter is on nothing compiles; a cache of its own, so that there is something to compile.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    verdicts = found["first"]
    assert [verdict is None for verdict in verdicts] == [True, False, True, False, False, True, True], verdicts
    assert "power of 2" in verdicts[1] and verdicts[4] == verdicts[1] and verdicts[3] == "KeyError: 'block'"
    assert found["second"] == [None, None, None]
    assert found["restored"] and not found["main"]
