"""The arms of an end-to-end run by name. Nothing here needs torch, since reports have them too."""

from dataclasses import dataclass
from typing import Literal

CONTROL = "teacher-forced"
"""Fixed-text calibration: the arm that every chosen source is compared with."""

DENSE = "dense"
INT8 = "int8"
"""What needs no pruning: every linear but the output embedding rounded to 8 bits."""

Weights = Literal["dense", "pruned", "int8", "another model"]


def is_timed(fidelity: str | None, rate_repeats: int | None) -> bool:
    """Whether a run with these arguments times anything, for which it needs its GPU alone."""
    return fidelity != "only" and bool(rate_repeats)


@dataclass(frozen=True)
class Arm:
    """One row of the result.

    Attributes:
        name: ``dense``, a calibration source, a method that needs none, ``int8``, or another model's name.
        source: Calibration source; None where there is nothing to calibrate.
        weights: What it decodes with: those of the model as they are, pruned and packed, or rounded; or those of a model of its own.
    """

    name: str
    source: str | None
    weights: Weights

    @property
    def pruned(self) -> bool:
        """Whether the linears are pruned and packed."""
        return self.weights == "pruned"
