"""The inline PTX of the SpMM, run instruction by instruction in numpy: no GPU is needed to know what it computes."""

import re
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from sdbench.calibrate.magnitude import keep_mask
from sdbench.kernels.spmm.permutes import QUADS, REACH, multiply_ptx, room_ptx, unfold_ptx
from sdbench.packing import pack
from sdbench.pattern import Pattern

PATTERNS = ["1:4", "2:4", "3:4", "2:8", "4:8", "6:8", "4:16", "8:16", "12:16", "8:32", "16:32", "24:32"]
"""All patterns with 8, 16 or 24 values a word."""

SPREAD = 1040
"""Where shared memory begins in these tests: not at a multiple of what a warp needs."""

Words = dict[str, np.ndarray]


def permute(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both, found = low | high << np.uint64(32), np.zeros_like(low)
    for place in range(4):
        chosen = selector >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (chosen & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        # From 8 on, the byte's highest bit, eight times.
        byte = np.where(chosen < 8, byte, (byte >> np.uint64(7)) * np.uint64(255))
        found |= byte << np.uint64(8 * place)
    return found


def funnel(low: np.ndarray, high: np.ndarray, shift: np.ndarray, right: bool) -> np.ndarray:
    both, shift = low | high << np.uint64(32), np.minimum(shift, np.uint64(32))
    return both >> shift if right else both << shift >> np.uint64(32)


def lanes_product(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]) -> list[np.ndarray]:
    """mma.m16n8k16 of bf16, one warp: PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type"."""

    def halves(word: np.ndarray) -> np.ndarray:
        words = np.stack([word & np.uint64(0xFFFF), word >> np.uint64(16)], -1).astype(np.uint32) << np.uint32(16)
        return words.view(np.float32).astype(np.float64)

    rows, columns, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for lane, (register, half) in product(range(32), product(range(4), range(2))):
        rows[lane // 4 + 8 * (register % 2), lane % 4 * 2 + half + 8 * (register // 2)] = halves(a[register])[lane, half]
        sums[lane // 4 + 8 * (register // 2), lane % 4 * 2 + register % 2] = c[register][lane]
        if register < 2:
            columns[lane % 4 * 2 + half + 8 * register, lane // 4] = halves(b[register])[lane, half]
    sums = sums + rows @ columns
    lane = np.arange(32)
    return [sums[lane // 4 + 8 * (register // 2), lane % 4 * 2 + register % 2] for register in range(4)]


class Memory:
    """Shared memory, of all lanes together or of each alone, full of ones."""

    def __init__(self, lanes: int, together: bool = False):
        self.bytes = np.full((1 if together else lanes, 64 * REACH), 255, dtype=np.uint8)
        self.owner = np.zeros(lanes, dtype=int) if together else np.arange(lanes)

    def store(self, address: np.ndarray, value: np.ndarray, size: int) -> None:
        for place in range(size):
            self.bytes[self.owner, address.astype(int) + place] = value >> np.uint64(8 * place) & np.uint64(255)

    def load(self, address: np.ndarray) -> np.ndarray:
        parts = [self.bytes[self.owner, address.astype(int) + place].astype(np.uint64) << np.uint64(8 * place) for place in range(4)]
        return np.bitwise_or.reduce(parts)


def highest(word: np.ndarray) -> np.ndarray:
    """bfind.u32: the number of the highest set bit, all ones without one."""
    _, exponent = np.frexp(word.astype(np.float64))
    return np.where(word == 0, 0xFFFFFFFF, exponent - 1).astype(np.uint64)


def run(ptx: str, operands: list[np.ndarray], results: int, memory: Memory | None = None) -> list[np.ndarray]:
    """What PTX makes of its operands: a number a lane in 64 bits each."""
    known: Words = {f"${results + place}": operand for place, operand in enumerate(operands)}
    memory = memory or Memory(len(operands[0]))

    def value(name: str) -> np.ndarray:
        # A variable's name stands for its address.
        number = SPREAD if name == "spread" else int(name, 0) if name not in known else 0
        return known[name] if name in known else np.full_like(operands[0], number & 0xFFFFFFFF)

    def address(text: str) -> np.ndarray:
        base, _, offset = text.strip("[]").partition("+")
        return value(base) + np.uint64(int(offset or 0))

    width = np.uint64(0xFFFFFFFF)
    for line in ptx.splitlines():
        found = re.fullmatch(r"(mov|prmt|and|or|add|sub|shr|shl|selp|setp|shf|mul|mad|lop3|bfind|szext|ld|st|mma)([\w.]*) (.*);", line)
        if not found:
            assert line in "{}" or line.startswith((".reg", ".shared"))
            continue
        name, kind = found[1], found[2]
        texts = re.findall(r"{[^}]*}|[^,\s]+", found[3])
        target, *sources = [re.findall(r"[^{},\s]+", text) for text in texts]
        if name == "mma":
            a, b, c = ([known[part] for part in source] for source in sources)
            known |= dict(zip(target, lanes_product(a, b, c), strict=True))
            continue
        if name == "st":
            assert kind.startswith(".shared.b")
            memory.store(address(target[0]), value(sources[0][0]), int(kind[9:]) // 8)
            continue
        if name == "ld":
            known[target[0]] = memory.load(address(sources[0][0]))
            continue
        if kind == ".b32" and len(target) == 2:
            whole = value(sources[0][0])
            known[target[0]], known[target[1]] = whole & np.uint64(0xFFFF), whole >> np.uint64(16)
            continue
        if kind == ".b64" and len(target) == 2:
            known[target[0]], known[target[1]] = value(sources[0][0]) & width, value(sources[0][0]) >> np.uint64(32)
            continue
        if kind == ".b64":
            known[target[0]] = value(sources[0][0]) | value(sources[0][1]) << np.uint64(32)
            continue
        parts = [value(source[0]) for source in sources]
        if kind == ".f32":
            known[target[0]] = parts[0]
            continue
        result = {
            "mov": lambda x: x, "prmt": permute, "and": np.bitwise_and, "or": np.bitwise_or, "add": np.add, "sub": np.subtract,
            "shr": np.right_shift, "shl": np.left_shift, "selp": lambda x, y, p: np.where(p.astype(bool), x, y),
            "setp": lambda x, y: (x != y).astype(np.uint64),
            "shf": partial(funnel, right=kind.startswith(".r")),
            "bfind": highest, "mul": np.multiply, "mad": lambda x, y, z: x * y + z,
            # 0xEA of three inputs: what the first two share, or the third.
            "lop3": lambda x, y, z, table: x & y | z,
            "szext": lambda x, bits: x & (np.uint64(1) << (bits & np.uint64(31))) - np.uint64(1),
        }[name](*parts)  # fmt: skip
        known[target[0]] = result & width
    return [known[f"${place}"] for place in range(results)]


def room(lanes: int) -> np.ndarray:
    """A place in a memory of its own for each lane, as room_ptx gives them to the lanes of a warp."""
    return np.arange(lanes, dtype=np.uint64) % np.uint64(32) * np.uint64(4)


def packed_lanes(pattern: Pattern, rows: int, in_features: int = 32) -> tuple[torch.Tensor, list[list[np.ndarray]]]:
    """A pruned bf16 matrix, and per mask word the operands of its lanes, a row each."""
    weight = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()
    keep = keep_mask(torch.randn(rows, in_features, generator=torch.Generator().manual_seed(7)), pattern)
    packed = pack(weight, keep, pattern)
    words = []
    for word in range(packed.words):
        values = packed.values[word].view(torch.int64).permute(1, 0, 2).reshape(rows, -1).numpy().view(np.uint64)
        words.append([room(rows), packed.mask_words[word].numpy().view(np.uint32).astype(np.uint64), *values.T.copy()])
    return torch.where(keep, weight, 0), words


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("text", PATTERNS)
def test_unfolded_words_are_the_pruned_rows_bit_for_bit(text: str, memory: bool) -> None:
    """Of so many random masks that every nibble, every pair of nibbles and every count of an upper half comes up."""
    pruned, (operands,) = packed_lanes(Pattern.parse(text), 20000)
    quads = run(unfold_ptx(Pattern.parse(text), memory), operands, QUADS)
    assert np.array_equal(np.stack(quads, -1).view(np.int64), pruned.view(torch.int64).numpy())


ENDS = [
    ("16:32", 0xAAAAAAAA), ("16:32", 0x55555555),
    ("16:32", 0x0000FFFF), ("16:32", 0xFFFF0000), ("16:32", 0x00FFFF00), ("16:32", 0xFF0000FF), ("16:32", 0xF0F0F0F0),
    ("8:32", 0x0000FF00), ("8:32", 0x00FF0000), ("24:32", 0xFF00FFFF), ("24:32", 0xFFFF00FF),
    ("8:16", 0xFF0000FF), ("12:16", 0x0FFFFFF0), ("4:8", 0xF00FF00F),
]  # fmt: skip


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize(("text", "mask"), ENDS)
def test_masks_at_the_ends_of_what_a_pattern_allows(text: str, mask: int, memory: bool) -> None:
    pattern = Pattern.parse(text)
    keep = torch.tensor([[bool(mask >> column & 1) for column in range(32)]])
    weight = torch.arange(1, 33, dtype=torch.float32).bfloat16()[None]
    packed = pack(weight, keep, pattern)
    values = packed.values.view(torch.int64).reshape(1, -1).numpy().view(np.uint64)
    quads = run(unfold_ptx(pattern, memory), [room(1), np.array([mask], dtype=np.uint64), *values.T.copy()], QUADS)
    assert np.array_equal(np.stack(quads, -1).view(np.int64), torch.where(keep, weight, 0).view(torch.int64).numpy())


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("text", PATTERNS)
def test_a_word_past_an_edge_gives_zeros(text: str, memory: bool) -> None:
    pattern = Pattern.parse(text)
    quads = run(unfold_ptx(pattern, memory), [np.zeros(1, dtype=np.uint64)] * (2 + pattern.kept_per_word // 4), QUADS)
    assert not np.stack(quads).any()


def test_a_warp_multiplies_sixteen_rows_by_eight_tokens() -> None:
    """Unfolding and matrix instructions together, a word and a token a lane as their docstrings say."""
    pattern = Pattern(2, 4)
    pruned, words = packed_lanes(pattern, 16, 128)
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = x.view(torch.int64).numpy().view(np.uint64).reshape(8, 4, QUADS)
    g, t = np.divmod(np.arange(32), 4)
    unfolded = np.stack([np.stack(run(unfold_ptx(pattern, False), operands, QUADS)) for operands in words])
    fragments = [*unfolded[t, :, g].T, *unfolded[t, :, g + 8].T, *tokens[g, t].T]
    before = np.arange(128, dtype=np.float64).reshape(4, 32)
    sums = np.stack(run(multiply_ptx(True), [*fragments, *before], 4)) - before
    want = (pruned.double() @ x.double().T).numpy()
    got = np.zeros((16, 8))
    for register in range(4):
        got[g + 8 * (register // 2), 2 * t + register % 2] = sums[register]
    assert np.allclose(got, want, rtol=1e-9)


def test_lanes_of_two_warps_share_no_place_and_no_bank() -> None:
    pattern = Pattern(16, 32)
    pruned, (operands,) = packed_lanes(pattern, 64)
    (rooms,) = run(room_ptx(2 * REACH), [np.arange(64, dtype=np.uint64)], 1)
    assert rooms.min() >= SPREAD and rooms.max() < SPREAD + 3 * REACH and (rooms % np.uint64(REACH)).max() < 128
    assert sorted(rooms[:32] // np.uint64(4) % np.uint64(32)) == list(range(32))
    quads = run(unfold_ptx(pattern, True), [rooms, *operands[1:]], QUADS, Memory(64, together=True))
    assert np.array_equal(np.stack(quads, -1).view(np.int64), pruned.view(torch.int64).numpy())
