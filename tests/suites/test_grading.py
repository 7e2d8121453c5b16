"""Answers out of replies: CASES row 15 and the kinds behind it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdbench.errors import SdbenchError
from sdbench.suites.grading import extract_answer, is_match

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A shared machine is slow at times; these tests are about values."""

CASES_15 = [
    ("$29.00", "29"),
    ("#### 1,234", "1234"),
    ("18.", "18"),
    ("#### -5", "-5"),
    (r"\boxed{8,000}", "8000"),
    (r"\boxed{2} ... \boxed{3}", "3"),
    ("at 7:30", "30"),
    ("2x3", "3"),
]

KINDS = [
    # the marker
    ("She pays 3 + 4.\n#### 7\nI checked 2 times.", "7"),
    ("####72", "72"),
    ("#### **$1,234.50**", "1234.5"),
    ("#### 18 dollars", "18"),
    ("#### 7\n\nQuestion: and now?\n#### 9", "7"),
    (r"#### 5, also \boxed{6}", "5"),
    ("#### 1. Add the parts\n3 + 4 = 7\n#### 2. Double it\nThe total is 14.", "14"),
    ("#### 18. Find the rest\nIt is 4", "4"),
    ("##### 3\nso 8", "8"),
    ("#### Answer: 18", "18"),
    ("It costs 18 dollars.\n####", "18"),
    # the box
    (r"\boxed{\frac{1}{2}}", "1/2"),
    (r"\boxed{\dfrac{ 6 }{ 4 }}", "3/2"),
    (r"\boxed{-\frac12}", "-1/2"),
    (r"\boxed{1\frac{1}{2}}", "3/2"),
    (r"\boxed{\text{18 dollars}} for 3 days", "18"),
    (r"\boxed{\$18} and 4 more", "18"),
    (r"\boxed{25\%} of 80", "25"),
    (r"\boxed{5\,\text{m}^2} of 80", "5"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1\,234}", "1234"),
    (r"\boxed{x = 12}, 3 steps", "12"),
    (r"\boxed{2} and \boxed{3", "2"),
    (r"\boxed{none}", None),
    (r"\boxed{\boxed{4}} of 9", "4"),
    (r"{ \boxed{5} and 9", "5"),
    (r"\boxed{" * 3000, None),
    # the last number
    ("10 - 4 = 6", "6"),
    ("between 2-3", "3"),
    ("pages 3–5", "5"),
    ("it is −5", "-5"),
    ("x = -5", "-5"),
    ("$-5", "-5"),
    ("-$5", "-5"),
    ("(-5)", "-5"),
    ("-0", "0"),
    ("007", "7"),
    ("3.50", "3.5"),
    (".5", "0.5"),
    ("so... it is ...5", "5"),
    ("5 m^2", "5"),
    ("5 m²", "5"),
    ("25 %", "25"),
    ("€1,234,567.", "1234567"),
    ("(2, 3)", "3"),
    ("1,2", "2"),
    ("half, 1/2", "1/2"),
    ("2 1/2 cups", "5/2"),
    ("on 3/4/2024", "2024"),
    ("5/0", "0"),
    ("\\(\\dfrac{3}{4}\\) kg", "3/4"),
    ("**18**", "18"),
    ("no number", None),
    ("", None),
    ("9" * 5000, None),
    # reasoning
    ("<think>maybe 5, \\boxed{5}</think>It is 6.", "6"),
    ("maybe 5</think>or 7</think>It is 6.", "6"),
    ("<think>#### 5</think>", None),
    ("<think>5 is my guess", None),
    ("<think>2 + 3</think>It is 6. <think>Or 7?", "6"),
    ("It is 6. <think>Or 7", "6"),
]


@pytest.mark.parametrize(("text", "answer"), CASES_15 + KINDS)
def test_extracts_the_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(("text", "answer"), CASES_15)
def test_cases_15_match_their_answer_and_no_other(text: str, answer: str) -> None:
    assert is_match(text, answer)
    assert is_match(text, f"Some steps with 77 in them.\n#### {answer}")
    assert not is_match(text, f"{answer}1")


@pytest.mark.parametrize(
    ("text", "gold", "match"),
    [
        (r"\boxed{\frac{1}{2}}", "1/3", False),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        ("3.50", "3.5", True),
        ("0.333", "1/3", False),
        ("9007199254740993", "9007199254740992", False),
        ("0.1000000000000000055511151231257827", "0.1", False),
        ("I can't tell", "5", False),
        ("18", "Natalia sold 48/2 = <<48/2=24>>24.\n#### 18", True),
        ("24", "Natalia sold 48/2 = <<48/2=24>>24.\n#### 18", False),
    ],
)
def test_comparison_is_exact(text: str, gold: str, match: bool) -> None:
    assert is_match(text, gold) is match


def test_reference_without_a_number_is_an_error() -> None:
    with pytest.raises(SdbenchError, match="'blue' holds no number"):
        is_match("5", "blue")


@UNHURRIED
@given(value=st.integers(-(10**12), 10**12), before=st.sampled_from(["", "It costs $", "so 12 + 3 = ", "#### ", "**"]))
def test_an_integer_survives_every_spelling(value: int, before: str) -> None:
    for spelling in (f"{value}", f"{value:,}", f"{value:,}.00", f"{value}."):
        assert extract_answer(before + spelling) == str(value)


@UNHURRIED
@given(st.text(alphabet="0123456789.,-/$ \\{}#^boxedfrac:x\n", max_size=60))
def test_any_text_gives_a_number_or_nothing(text: str) -> None:
    answer = extract_answer(text)
    assert answer is None or is_match(answer, answer)
