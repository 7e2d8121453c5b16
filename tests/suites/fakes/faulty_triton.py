"""A Triton variant whose configs hang a GPU or poison its context."""

import torch
import triton
import triton.language as tl

from sdbench.kernels.registry import Config, Variant, register

RIGHT, ENDLESS, ILLEGAL, TRAP = range(4)


@triton.jit
def misbehave(flag_ptr, scratch_ptr, KIND: tl.constexpr):
    lane = tl.arange(0, 32)
    if KIND == 1:
        turns = 0
        while tl.load(flag_ptr, volatile=True) == 0:
            turns += 1
        tl.store(scratch_ptr, turns)
    elif KIND == 2:
        tl.store(scratch_ptr + lane.to(tl.int64) * (1 << 40), lane)
    elif KIND == 3:
        lane = tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(scratch_ptr + lane, lane)
    else:
        tl.store(scratch_ptr + lane, lane)


def launch(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    scratch = torch.empty(32, dtype=torch.int32, device=x.device)
    misbehave[(1,)](flag, scratch, config["kind"], num_warps=config["num_warps"])
    return torch.mv(weight.float(), x.float(), out=y)


VARIANT = register(Variant("faulty", "triton", "for tests", launch, lambda problem: [], lambda problem: {"kind": RIGHT, "num_warps": 1}))
