"""The arms of an end-to-end run by name. Nothing here needs torch, since reports have them too."""

from dataclasses import dataclass

CONTROL = "teacher-forced"
"""Fixed-text calibration: the arm that every chosen source is compared with."""

DENSE = "dense"


@dataclass(frozen=True)
class Arm:
    """One row of the result.

    Attributes:
        name: ``dense``, a calibration source, or a method that needs none.
        source: Calibration source; None where there is nothing to calibrate.
        pruned: Whether the linears are pruned and packed.
    """

    name: str
    source: str | None
    pruned: bool
