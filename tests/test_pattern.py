import pytest

from sdbench.errors import UsageError
from sdbench.pattern import Pattern


@pytest.mark.parametrize(
    ("text", "keep", "group", "kept"), [("2:4", 2, 4, 16), (" 1:4 ", 1, 4, 8), ("16:32", 16, 32, 16), ("3:8", 3, 8, 12)]
)
def test_parse(text: str, keep: int, group: int, kept: int) -> None:
    pattern = Pattern.parse(text)
    assert (pattern.keep, pattern.group, pattern.kept_per_word) == (keep, group, kept)
    assert pattern.density == keep / group
    assert Pattern.parse(str(pattern)) == pattern


@pytest.mark.parametrize("text", ["5:4", "4:4", "0:4", "2:3", "2:64", "2", "2:4:8", "-2:4", "a:b", "2/4", ""])
def test_refuses_what_is_no_pattern(text: str) -> None:
    with pytest.raises(UsageError, match="pattern"):
        Pattern.parse(text)


def test_width_that_m_does_not_divide_names_layer_width_and_m() -> None:
    """CASES 6: widths 10 and 9 at 2:4."""
    for width in (10, 9, 0):
        with pytest.raises(UsageError, match=rf"q_proj.*{width}.*M=4"):
            Pattern(2, 4).require_width(width, "q_proj")
    Pattern(2, 4).require_width(12, "q_proj")
