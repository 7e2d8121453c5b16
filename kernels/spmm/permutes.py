"""PTX that unfolds a mask word: S packed values, in descending columns, become the 32 columns of the dense row, in registers.

A byte permute (``prmt``), whose selector comes out of a table by the mask's bits, puts two values, or one, or none, at two columns. Which
values those are is known where the pattern fixes how many lie above (1:4 and 2:4). Elsewhere a window of the values has to slide by a count
of bits, but not often: the upper half of a group begins at the group's first value and the lower half ends at its last one, whatever the
mask; of a group of 16, only the lower nibble of the upper half and the upper nibble of the lower half depend on it.

In groups of 32 much slides, by 4 values and by 2 and by what is left. The other way goes through shared memory, where a register can say
which place is meant: each value to its column, and the columns back.

Zeros where a word's mask is 0 (what a guarded load gives past an edge, with zeros for values).
"""

from functools import cache

from sdbench.pattern import WORD, Pattern

QUADS = WORD // 4
"""Groups of four columns in a word, each 64 bits wide: the form in which the columns come out."""

_ZERO, _LOW, _HIGH = 0x44, 0x10, 0x32
"""Bytes of a selector: two bytes of the second operand, which is 0, and the halves of the first."""

# By the bits of a pair of columns: where the lower and the higher one find their values in a register whose first value is the pair's first
# (entries 0 to 3), and in one whose last value is the pair's last (4 to 7).
_LOWER_OF_PAIR = (_ZERO, _LOW, _ZERO, _HIGH, _ZERO, _HIGH, _ZERO, _HIGH)
_HIGHER_OF_PAIR = (_ZERO, _ZERO, _LOW, _LOW, _ZERO, _ZERO, _HIGH, _LOW)
# By the bits of the pair that is passed over: the two values that follow it, or those before it, out of two registers.
_PAST_FIRST = (0x10, 0x32, 0x32, 0x54, 0x54, 0x32, 0x32, 0x10)
_PAST_SECOND = tuple(byte + 0x22 for byte in _PAST_FIRST)

REACH = 2048
"""Bytes of shared memory in which a warp spreads its words: 32 columns of 16 bits a lane."""

Window = tuple[list[str], bool]
"""Registers, nearest first, and whether the values begin in the first one (True) or the last value ends it (False)."""


class _Code:
    """Instructions, and names for the registers that hold their results."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.words = self.predicates = 0

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

    def slide(self, window: Window, counts: str, rest: str, bit: int, width: int, wanted: int) -> Window:
        """A window of ``wanted`` registers past as many values as a field of ``counts`` says, 0 to ``width``.

        By 4 and by 2 values through selections of registers; by what is left, 0 to 2, through a funnel shift. Where the window has no such
        register, no mask asks for its values.

        Args:
            window: From where.
            counts: Fields of ``width`` bits, numbers of values.
            rest: In the same fields what selections leave: 0, 1 or 2.
            bit: Lowest bit of the field.
            width: 4 or 8.
            wanted: Registers.
        """
        registers, forward = window
        for step, bits in ((2, 0b1100), (1, 0b1010)) if width == 8 else ((1, 0b0110),):
            some, past = self.emit("and.b32", counts, bits << bit), f"p{self.predicates}"
            self.predicates += 1
            self.lines.append(f"setp.ne.u32 {past}, {some}, 0;")
            registers = [
                self.emit("selp.b32", registers[place + step], register, past) if place + step < len(registers) else register
                for place, register in enumerate(registers[: wanted + step])
            ]
        field = self.emit("shr.u32", rest, bit - 4) if bit > 4 else rest if bit == 4 else self.emit("shl.b32", rest, 4)
        shift, moved = self.emit("and.b32", field, 0x30), []
        for place in range(wanted):
            near, far = (registers[min(at, len(registers) - 1)] for at in (place, place + 1))
            moved.append(self.emit("shf.r.clamp.b32", near, far, shift) if forward else self.emit("shf.l.clamp.b32", far, near, shift))
        return moved, forward


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


def _nibble_windows(code: _Code, pattern: Pattern) -> list[Window | None]:
    """The values of each nibble, two registers at most; None where a group is a nibble."""
    windows: list[Window | None] = [None] * QUADS
    if pattern.group == 4:
        return windows
    # By the width of a field of the mask: set bits of each, and what selections leave of them to a funnel shift.
    fields = {}
    if pattern.group > 8:
        pairs = code.emit("sub.u32", "m", code.emit("and.b32", code.emit("shr.u32", "m", 1), 0x55555555))
        upper = code.emit("and.b32", code.emit("shr.u32", pairs, 2), 0x33333333)
        nibbles = code.emit("add.u32", code.emit("and.b32", pairs, 0x33333333), upper)
        odd, two = code.emit("and.b32", nibbles, 0x11111111), code.emit("and.b32", code.emit("shr.u32", nibbles, 1), 0x22222222)
        fields[4] = nibbles, code.emit("or.b32", odd, two)
    if pattern.group > 16:
        both = code.emit("add.u32", nibbles, code.emit("shr.u32", nibbles, 4))
        octets = code.emit("and.b32", both, 0x0F0F0F0F)
        odd, two = code.emit("and.b32", octets, 0x01010101), code.emit("and.b32", code.emit("shr.u32", octets, 2), 0x02020202)
        fields[8] = octets, code.emit("or.b32", odd, two)

    def divide(first: int, columns: int, window: Window) -> None:
        """Windows of the nibbles of a block whose values begin, or end, where the window does."""
        if columns == 4:
            windows[first // 4] = window
            return
        width, (registers, forward) = columns // 2, window
        wanted = min(width, pattern.keep) // 2
        near, far = (first + width, first) if forward else (first, first + width)
        divide(near, width, (registers[:wanted], forward))
        divide(far, width, code.slide(window, *fields[width], near, width, wanted))

    for group in range(WORD // pattern.group):
        start = group * pattern.keep // 2
        registers = [f"v{start + place}" for place in range(pattern.keep // 2)]
        width = pattern.group // 2
        wanted = min(width, pattern.keep) // 2
        lowest = WORD - (group + 1) * pattern.group
        divide(lowest + width, width, (registers[:wanted], True))
        divide(lowest, width, (registers[::-1][:wanted], False))
    return windows


def _by_pairs(code: _Code, pattern: Pattern) -> list[str]:
    """A window a nibble, and in it a register a pair of columns."""
    windows = _nibble_windows(code, pattern)
    forward = [window is not None and window[1] for window in windows]
    ends_lower = sum(4 << 4 * quad for quad in range(QUADS) if not forward[quad])
    ends_upper = sum(4 << 4 * quad for quad in range(QUADS) if not forward[quad] and windows[quad])
    from_upper = sum(15 << 4 * quad for quad in range(QUADS) if forward[quad])
    lower = code.emit("or.b32", code.emit("and.b32", "m", 0x33333333), ends_lower)
    upper = code.emit("or.b32", code.emit("and.b32", code.emit("shr.u32", "m", 2), 0x33333333), ends_upper)
    passed = code.emit("or.b32", code.emit("and.b32", upper, from_upper), code.emit("and.b32", lower, ~from_upper & 0xFFFFFFFF))
    dense = [""] * (2 * QUADS)
    for half in (1, 0):
        indices = [code.emit("shr.u32", index, 16) if half else index for index in (lower, upper, passed)]
        placing = [code.selectors(code.look_up(_LOWER_OF_PAIR, index), code.look_up(_HIGHER_OF_PAIR, index)) for index in indices[:2]]
        sliding = [""] * 4
        if pattern.group > 4:
            sliding = code.selectors(code.look_up(_PAST_FIRST, indices[2]), code.look_up(_PAST_SECOND, indices[2]))
        for nibble in range(4):
            quad = 4 * half + nibble
            window = windows[quad]
            if window is None:
                # 3:4: the upper pair has the first two of three values, the lower one the last two.
                first = (QUADS - 1 - quad) * pattern.keep
                whole, across = f"v{(first + 1) // 2}", code.emit("prmt.b32", f"v{first // 2}", f"v{first // 2 + 1}", 0x5432)
                pair = [across, whole] if first % 2 == 0 else [whole, across]
            else:
                near, far = window[0][0], window[0][-1]
                operands = (near, far) if window[1] else (far, near)
                moved = code.emit("prmt.b32", *operands, sliding[nibble])
                pair = [moved, near] if window[1] else [near, moved]
            for part in range(2):
                dense[2 * quad + part] = code.emit("prmt.b32", pair[part], 0, placing[part][nibble])
    return dense


def _through_memory(code: _Code, keep: int) -> list[str]:
    """Each value goes to its column in shared memory, and the columns come back, less what lay there before.

    Columns 2j and 2j + 1 of a lane are a 32-bit word at ``room`` + 128j: a lane has a memory bank of its own, whatever its mask, and none
    reads what another one wrote. The highest set bit's number p goes to bits 1 and 7 to 10 of the address by a product with 66.
    """
    # In register i, bit i of each byte of the mask is the byte's highest, which a permute can spread over a byte.
    signs = [code.emit("shl.b32", "m", 7 - bit) for bit in range(8)]
    for value in range(keep):
        if value % 2 == 0:
            code.lines.append(f"mov.b32 {{low, high}}, v{value // 2};")
        code.lines += [
            "bfind.u32 p, m;",
            "szext.wrap.u32 m, m, p;",
            "mul.lo.u32 place, p, 66;",
            "lop3.b32 place, place, 0x782, room, 0xEA;",
            f"st.shared.b16 [place], {'high' if value % 2 else 'low'};",
        ]
    found = [code.emit("ld.shared.b32", f"[room+{128 * pair}]") for pair in range(2 * QUADS)]
    for pair, columns in enumerate(found):
        byte, bit = divmod(2 * pair, 8)
        kept = code.emit("prmt.b32", signs[bit], signs[bit + 1], 0x1100 * (4 + byte | 8) + 0x11 * (byte | 8))
        found[pair] = code.emit("and.b32", columns, kept)
    return found


@cache
def room_ptx(size: int) -> str:
    """Inline PTX with the operands ``"=r"``, ``"r"``: a thread's number to where it spreads its words, REACH bytes a warp.

    Args:
        size: Bytes for all warps of a program; with fewer than REACH for each, ``warps.sum_over_warps`` alone may use the address.
    """
    # Addresses are put together bit by bit, for which a warp's bytes begin at a multiple of their number.
    lines = [
        "{",
        f".shared .align 128 .b8 spread[{size + REACH}];",
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
def unfold_ptx(pattern: Pattern, memory: bool) -> str:
    """Inline PTX with the operands ``"=l"`` * 8, ``"r"``, ``"r"``, ``"l"`` * S/4.

    Results are the word's columns, four 16-bit values each, lowest first. Operands are what :func:`room_ptx` gives, the mask word and the S
    values, four each, in descending columns.

    Args:
        pattern: S is 8, 16 or 24.
        memory: Through shared memory.
    """
    values, code = pattern.kept_per_word // 2, _Code()
    if memory:
        dense = _through_memory(code, pattern.kept_per_word)
    elif pattern.group == 4 and pattern.keep < 3:
        dense = _by_nibbles(code, pattern.keep)
    else:
        dense = _by_pairs(code, pattern)
    # Results are written last: an operand and a result may share a register.
    return "\n".join(
        [
            "{",
            f".reg .b32 room, m, p, place, v<{values}>, t<{code.words}>;",
            ".reg .b16 low, high;",
            *([f".reg .pred p<{code.predicates}>;"] if code.predicates else []),
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
