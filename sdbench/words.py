"""Numbers in sentences."""


def counted(count: int, one: str, many: str | None = None) -> str:
    """``1 run``, ``2 runs``.

    Args:
        count: How many there are.
        one: What is counted, of one.
        many: Of any other number; None to append an s.
    """
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def median_of(repeats: int) -> str:
    """What a figure of so many repeats is."""
    return "timed once" if repeats == 1 else f"median of {repeats}"
