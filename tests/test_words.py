from sdbench.words import counted, median_of


def test_one_has_no_plural() -> None:
    assert [counted(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
    assert [counted(number, "reply", "replies") for number in (1, 3)] == ["1 reply", "3 replies"]


def test_one_sample_has_no_median() -> None:
    assert (median_of(1), median_of(3)) == ("timed once", "median of 3")
