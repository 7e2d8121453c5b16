"""The lane-per-row SpMV with positions looked up a nibble at a time, for 1:4 and 2:4: see ``nibbles.py`` for the tables."""

from sdbench.kernels.registry import Problem
from sdbench.kernels.spmv import lane_row


def constraint(problem: Problem) -> str | None:
    """Why positions cannot be looked up for a problem."""
    assert problem.pattern is not None
    if (problem.pattern.keep, problem.pattern.group) not in ((1, 4), (2, 4)):
        return f"takes 1:4 and 2:4, not {problem.pattern}"
    return lane_row.constraint(problem)


lane_row.register_both(
    "lane_row_nibble", "lane_row for 1:4 and 2:4: four groups' positions in one byte permute, no bit scan", constraint, nibble=True
)
