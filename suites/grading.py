r"""Numeric answers: which number a reply gives as its answer, and whether that equals the reference.

The answer is the number after the first ``####`` marker, else the one in the last ``\boxed{...}``, else the last number of the text. Of a
reasoning model's reply only the part after the last ``</think>`` is read, and none of a thought that was cut off. Comparison is exact
(fractions), never in floats.

math-verify 0.9 was tried in its place: of the nine replies of CASES 15 it reads three otherwise (a second box is joined to the first,
``7:30`` is 7, ``2x3`` is 2), a ``#### 7`` that something follows is not taken for the answer, and a reasoning model's thoughts are.
"""

import re
from fractions import Fraction

from sdbench.errors import SdbenchError

MAX_DIGITS = 100
"""A longer number is a model stuck on a digit, not an answer."""

_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![0-9A-Za-z)\]}}-])-)?                # after a digit, a letter or a bracket, '-' is subtraction or a range
    \$?
    (?:
        (?<!/)(?:(?P<whole>[0-9]+)[ ]+)?(?P<top>{_PLAIN})[ ]?/[ ]?(?P<bottom>0*[1-9][0-9]*)(?![0-9]|[/.,:][0-9])
        |
        (?P<decimal>{_PLAIN}(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)
    )
    """,
    re.VERBOSE,
)
# A numbered heading such as "#### 2. Total cost" is no answer marker.
_MARKER = re.compile(rf"(?<!\#)\#\#\#\#[ \t*_$(]*(?P<answer>{_NUMBER.pattern})(?![0-9]|[.,:/][0-9]|[.):][ \t]+\S)", re.VERBOSE)

_LATEX = (
    (re.compile(r"[\u2212\u2013\uFE63\uFF0D]"), "-"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=[0-9])\\[,!](?=[0-9]{3}(?![0-9]))|\\(?=[$%])"), ""),
    (re.compile(r"\\[,!;: ]"), " "),
    (re.compile(r"[€£¥]"), "$"),
    (re.compile(r"\^\s*(?:\{[^{}]*\}|-?[0-9]+)"), " "),
    (re.compile(r"(?<=[0-9])\s*(?=\\[dt]?frac)"), " "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r"\1/\2"),
)
"""Spellings brought to one form: minus signs, thousands separators, spacing, currencies, exponents (those of units too) and fractions."""


def extract_answer(text: str) -> str | None:
    """The number that a reply gives as its answer.

    Args:
        text: The reply, or a reference answer; the reference is never looked at when a reply is read.

    Returns:
        The number without separators, units and trailing zeros ("29", "-5", "3.5") or a fraction in lowest terms ("1/2"); None if there is
        no number, or the last box holds none.
    """
    plain = after_reasoning(text)
    for spelling, form in _LATEX:
        plain = spelling.sub(form, plain)
    marker = _MARKER.search(plain)
    if marker:
        return _last_number(marker["answer"])
    box = _last_box(plain)
    return _last_number(plain if box is None else box)


def is_match(text: str, gold: str) -> bool:
    """Whether a reply's answer equals the reference exactly (3.50 equals 3.5; 1/3 never equals 0.333).

    Args:
        text: The reply.
        gold: A bare number or a full reference answer ("... #### 72").

    Raises:
        SdbenchError: The reference holds no number, so nothing could ever match it.
    """
    expected, answer = require_number(gold), extract_answer(text)
    return answer is not None and Fraction(answer) == Fraction(expected)


def require_number(gold: str, where: str = "") -> str:
    """The number of a reference answer.

    Args:
        gold: A bare number or a full reference answer.
        where: What stands before the message, such as the example's name.

    Raises:
        SdbenchError: There is none, so nothing could ever match it.
    """
    expected = extract_answer(gold)
    if expected is None:
        raise SdbenchError(f"{where}the reference answer {gold[:60]!r} holds no number; answer match needs a numeric reference")
    return expected


def after_reasoning(text: str) -> str:
    """What a reply says once its reasoning is over: all of it, where it has none; nothing, where it was cut off in the midst."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _last_box(text: str) -> str | None:
    r"""Contents of the last ``\boxed{...}`` whose braces are balanced."""
    opened: list[tuple[int, bool]] = []
    boxes = []
    for brace in re.finditer(r"(?P<box>\\f?boxed\s*)?[{}]", text):
        if brace[0].endswith("{"):
            opened.append((brace.end(), brace["box"] is not None))
        elif opened:
            start, is_box = opened.pop()
            if is_box:
                boxes.append((start, brace.start()))
    return text[slice(*max(boxes))] if boxes else None


def _last_number(text: str) -> str | None:
    matches = list(_NUMBER.finditer(text))
    if not matches or len(matches[-1][0]) > MAX_DIGITS:
        return None
    last = matches[-1].groupdict(default="")
    sign = last["sign"]
    if last["bottom"]:
        value = int(last["whole"] or 0) + Fraction(int(last["top"].replace(",", "")), int(last["bottom"]))
        return str(-value if sign else value)
    whole, _, part = last["decimal"].replace(",", "").partition(".")
    number = (whole.lstrip("0") or "0") + f".{part}".rstrip("0").rstrip(".")
    return number if number == "0" else sign + number
