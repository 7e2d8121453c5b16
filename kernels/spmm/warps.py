"""What ``tile`` leaves to no compiler: that loads start before the work that hides their latency, and how warps add their sums."""

import triton
import triton.language as tl

from sdbench.kernels.spmm.permutes import REACH

_REACH = tl.constexpr(REACH)


@triton.jit
def after_loads(words, SLOTS: tl.constexpr):
    """A step's words, a mask and three chunks for each of SLOTS rows, once every load before this call has been issued.

    Whatever the order of the PTX, ptxas moves loads down to their first use, past all that should hide their latency. What keeps them is a
    barrier that no thread ever takes part in, since no grid is empty: no load may pass it, and the words hang on its result.
    """
    kept = ()
    for slot in tl.static_range(SLOTS):
        mask = tl.inline_asm_elementwise(
            """{
            .reg .pred never;
            .reg .b32 none, programs;
            mov.u32 programs, %nctaid.x;
            setp.eq.u32 never, programs, 0;
            mov.b32 none, 0;
            @never bar.red.popc.u32 none, 0, never;
            xor.b32 $0, $1, none;
            }""",
            "=r,r", [words[4 * slot]], dtype=tl.uint32, is_pure=False, pack=1,
        )  # fmt: skip
        # Triton's tuples grow by addition alone, each time into another type.
        kept = kept + (mask, words[4 * slot + 1], words[4 * slot + 2], words[4 * slot + 3])  # type: ignore[assignment]  # noqa: RUF005
    return kept


@triton.jit
def sum_over_warps(
    sums, room, lane,
    REGISTERS: tl.constexpr, EACH: tl.constexpr, ROW_WARPS: tl.constexpr, WORD_WARPS: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """Adds what the warps of the same rows have of each sum, in their order, and deals the totals out to them.

    Through shared memory, where neighbouring lanes write and read neighbouring words; ``tl.sum`` over warps has most of its accesses in
    conflict, which took a fifth of a product's time.

    Args:
        sums: REGISTERS float32 tiles ``[threads]``, of which those of lane l in all WORD_WARPS warps of a row warp belong together.
        room: From ``unfold.room_of``.
        lane: int32 ``[threads]``, a thread's number.
        REGISTERS: How many sums a thread has.
        EACH: How many totals a thread gets: REGISTERS / WORD_WARPS, rounded up.
        ROW_WARPS: Warps side by side along rows; warp w has rows of w % ROW_WARPS.
        WORD_WARPS: Warps side by side along words, two or more.
        MEMORY: Whether warps have spread words in the same memory.

    Returns:
        EACH float32 tiles ``[threads]``: totals of the sums from w // ROW_WARPS * EACH on; those from REGISTERS on are of nothing.
    """
    THREADS: tl.constexpr = 32 * ROW_WARPS * WORD_WARPS
    own = room - lane // 32 * (_REACH - 128)
    if MEMORY:
        # Words may still lie there.
        tl.debug_barrier()
    for register in tl.static_range(REGISTERS):
        tl.inline_asm_elementwise(
            "st.shared.f32 [$1], $2; mov.b32 $0, 0;", "=r,r,f", [own + register * (4 * THREADS), sums[register]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.debug_barrier()
    first = own - lane * 4 + lane % (32 * ROW_WARPS) * 4 + lane // (32 * ROW_WARPS) * (EACH * 4 * THREADS)
    added = ()
    for number in tl.static_range(EACH):
        total = tl.zeros([THREADS], tl.float32)
        for warp in tl.static_range(WORD_WARPS):
            total += tl.inline_asm_elementwise(
                "ld.shared.f32 $0, [$1];", "=f,r", [first + (number * (4 * THREADS) + warp * (128 * ROW_WARPS))],
                dtype=tl.float32, is_pure=False, pack=1,
            )  # fmt: skip
        # Triton's tuples grow by addition alone, each time into another type.
        added = added + (total,)  # type: ignore[assignment]  # noqa: RUF005
    return added
