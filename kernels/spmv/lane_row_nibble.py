"""The lane-per-row SpMV with positions looked up a nibble at a time, for 1:4 and 2:4: see ``nibbles.py`` for the tables."""

from functools import partial

from sdbench.kernels.registry import Problem, Variant, register
from sdbench.kernels.spmv import lane_row


def constraint(problem: Problem) -> str | None:
    """Why positions cannot be looked up for a problem."""
    assert problem.pattern is not None
    if (problem.pattern.keep, problem.pattern.group) not in ((1, 4), (2, 4)):
        return f"takes 1:4 and 2:4, not {problem.pattern}"
    return lane_row.constraint(problem)


register(
    Variant(
        kernel="spmv",
        name="lane_row_nibble",
        summary="lane_row for 1:4 and 2:4: four groups' positions in one byte permute, no bit scan",
        launch=partial(lane_row.launch, nibble=True),
        space=lane_row.space,
        default=lane_row.default,
        constraint=constraint,
        compile_source=partial(lane_row.compile_source, nibble=True),
    )
)
