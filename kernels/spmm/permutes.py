"""PTX that unfolds a mask word: S packed values, in descending columns, become the 32 columns of the dense row, in registers.

Where the pattern fixes how many values lie above a nibble (1:4 and 2:4), a byte permute (``prmt``), whose selector comes out of a table by
the mask's bits, puts two values, or one, or none, at two columns. Elsewhere each value takes a way through shared memory: stores there go
where a register says, and registers themselves cannot be numbered by one.

Zeros where a word's mask is 0 (what a guarded load gives past an edge, with zeros for values).
"""

from functools import cache

from sdbench.pattern import WORD, Pattern

QUADS = WORD // 4
"""Groups of four columns in a word, each 64 bits wide: the form in which the columns come out."""

_ZERO, _LOW, _HIGH = 0x44, 0x10, 0x32
"""Bytes of a selector: two bytes of the second operand, which is 0, and the halves of the first."""

REACH = 2048
"""Bytes of shared memory in which a warp spreads its words: 32 columns of 16 bits a lane."""


class _Code:
    """Instructions, and names for the registers that hold their results."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.words = 0

    def emit(self, instruction: str, *operands: str | int) -> str:
        """Adds an instruction with a 32-bit result, whose register is returned."""
        name = f"t{self.words}"
        self.words += 1
        self.lines.append(f"{instruction} {', '.join([name, *map(str, operands)])};")
        return name

    def look_up(self, table: tuple[int, ...], index: str) -> str:
        """Four bytes of a table of eight, by the lower four nibbles of a register (all below 8)."""
        low, high = (sum(byte << 8 * place for place, byte in enumerate(table[start : start + 4])) for start in (0, 4))
        return self.emit("prmt.b32", low, high, index)

    def selectors(self, lower: str, upper: str) -> list[str]:
        """Four selectors of 16 bits out of their lower and upper bytes."""
        found = []
        for order in (0x5140, 0x7362):
            both = self.emit("prmt.b32", lower, upper, order)
            found += [both, self.emit("shr.u32", both, 16)]
        return found


def _by_nibbles(code: _Code, keep: int) -> list[str]:
    """1:4 and 2:4: a nibble's values lie at a fixed place, and its lower three bits tell all of its cases apart."""
    tables = []
    for column in range(4):
        table = [_ZERO] * 8
        for nibble in range(1, 16):
            if nibble.bit_count() == keep and nibble >> column & 1:
                table[nibble & 7] = _HIGH if nibble >> (column + 1) else _LOW
        tables.append(tuple(table))
    index, dense = code.emit("and.b32", "m", 0x77777777), [""] * (2 * QUADS)
    for half in (1, 0):
        columns = [code.look_up(table, code.emit("shr.u32", index, 16) if half else index) for table in tables]
        halves = [code.selectors(*columns[:2]), code.selectors(*columns[2:])]
        for nibble in range(4):
            quad = 4 * half + nibble
            first = (QUADS - 1 - quad) * keep
            value = code.emit("shr.u32", f"v{first // 2}", 16) if first % 2 else f"v{first // 2}"
            for part in range(2):
                dense[2 * quad + part] = code.emit("prmt.b32", value, 0, halves[part][nibble])
    return dense


def _through_memory(code: _Code, keep: int) -> list[str]:
    """Any other pattern: each value goes to its column in shared memory, on zeros, and the columns come back.

    Columns 2j and 2j + 1 of a lane are a 32-bit word at ``room`` + 128j: a lane has a memory bank of its own, whatever its mask, and none
    reads what another one wrote. The highest set bit's number p goes to bits 1 and 7 to 10 of the address by a product with 66.
    """
    lines = code.lines
    lines += [f"st.shared.b32 [room+{128 * pair}], 0;" for pair in range(2 * QUADS)]
    for value in range(keep):
        if value % 2 == 0:
            lines.append(f"mov.b32 {{low, high}}, v{value // 2};")
        lines += [
            "bfind.u32 p, m;",
            "szext.wrap.u32 m, m, p;",
            "mul.lo.u32 place, p, 66;",
            "lop3.b32 place, place, 0x782, room, 0xEA;",
            f"st.shared.b16 [place], {'high' if value % 2 else 'low'};",
        ]
    return [code.emit("ld.shared.b32", f"[room+{128 * pair}]") for pair in range(2 * QUADS)]


def _has_fixed_places(pattern: Pattern) -> bool:
    return pattern.group == 4 and pattern.keep < 3


@cache
def room_ptx(pattern: Pattern, warps: int) -> str:
    """Inline PTX with the operands ``"=r"``, ``"r"``: a thread's number to where it spreads its words; empty where a pattern needs no room.

    Args:
        pattern: What will be unfolded.
        warps: Of a program.
    """
    if _has_fixed_places(pattern):
        return ""
    # Addresses are put together bit by bit, for which a warp's bytes begin at a multiple of their number.
    lines = [
        "{",
        f".shared .align 128 .b8 spread[{(warps + 1) * REACH}];",
        ".reg .b32 first, warp, lane;",
        "mov.u32 first, spread;",
        f"add.u32 first, first, {REACH - 1};",
        f"and.b32 first, first, {-REACH};",
        "shr.u32 warp, $1, 5;",
        "and.b32 lane, $1, 31;",
        f"mad.lo.u32 first, warp, {REACH}, first;",
        "mad.lo.u32 $0, lane, 4, first;",
        "}",
    ]
    return "\n".join(lines)


@cache
def unfold_ptx(pattern: Pattern) -> str:
    """Inline PTX with the operands ``"=l"`` * 8, ``"r"``, ``"r"``, ``"l"`` * S/4.

    Results are the word's columns, four 16-bit values each, lowest first. Operands are what :func:`room_ptx` gives, the mask word and the S
    values, four each, in descending columns.

    Args:
        pattern: S is 8, 16 or 24.
    """
    values, code = pattern.kept_per_word // 2, _Code()
    dense = _by_nibbles(code, pattern.keep) if _has_fixed_places(pattern) else _through_memory(code, pattern.kept_per_word)
    # Results are written last: an operand and a result may share a register.
    return "\n".join(
        [
            "{",
            f".reg .b32 room, m, p, place, v<{values}>, t<{code.words}>;",
            ".reg .b16 low, high;",
            f"mov.b32 room, ${QUADS};",
            f"mov.b32 m, ${QUADS + 1};",
            *(f"mov.b64 {{v{2 * place}, v{2 * place + 1}}}, ${QUADS + 2 + place};" for place in range(values // 2)),
            *code.lines,
            *(f"mov.b64 ${quad}, {{{dense[2 * quad]}, {dense[2 * quad + 1]}}};" for quad in range(QUADS)),
            "}",
        ]
    )


@cache
def multiply_ptx(bf16: bool) -> str:
    """Inline PTX with the operands ``"=f"`` * 4, ``"l"`` * 24, ``"f"`` * 4: 16 rows and 8 tokens, 128 columns, by the tensor cores.

    A warp's lane 4g + t holds word t of rows g and g + 8 (operands 4 to 11 and 12 to 19, as :func:`unfold_ptx` gives them), and token g at
    the columns of word t (20 to 27). A matrix instruction wants four columns of its sixteen from a lane, and which four is free, as long
    as both factors agree: here quad i of its word, so that nothing moves between lanes. Sums: row g at tokens 2t and 2t + 1, then row
    g + 8.
    """
    kind = "bf16" if bf16 else "f16"
    sums, instruction = "{c0, c1, c2, c3}", f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    lines = ["{", ".reg .b32 a<4>, b<2>;", ".reg .f32 c<4>;", *(f"mov.f32 c{place}, ${28 + place};" for place in range(4))]
    for quad in range(QUADS):
        lines += [f"mov.b64 {{a0, a2}}, ${4 + quad};", f"mov.b64 {{a1, a3}}, ${12 + quad};", f"mov.b64 {{b0, b1}}, ${20 + quad};"]
        lines.append(f"{instruction} {sums}, {{a0, a1, a2, a3}}, {{b0, b1}}, {sums};")
    return "\n".join([*lines, *(f"mov.f32 ${place}, c{place};" for place in range(4)), "}"])
