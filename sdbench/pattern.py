"""The N:M pattern: N weights *kept* in every group of M along ``in_features``."""

import re
from dataclasses import dataclass

from sdbench.errors import UsageError

WORD = 32
"""Columns covered by one mask word of the kernel form."""

GROUPS = (4, 8, 16, 32)


@dataclass(frozen=True, order=True)
class Pattern:
    """N:M sparsity, N kept of M (NVIDIA's usage; wanda, sparsegpt and llm-compressor count the pruned ones).

    Args:
        keep: Weights kept in a group, 1 <= keep < group.
        group: Group size along ``in_features``: 4, 8, 16 or 32; groups start at column 0.

    Raises:
        UsageError: The numbers are no such pattern.
    """

    keep: int
    group: int

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise UsageError(f"pattern {self.keep}:{self.group}: the group size must be one of 4, 8, 16, 32 (N:M keeps N of M)")
        if not 1 <= self.keep < self.group:
            raise UsageError(f"pattern {self.keep}:{self.group}: N:M keeps N of M, so N must lie between 1 and {self.group - 1}")

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """Reads ``"2:4"``.

        Raises:
            UsageError: The text is not N:M, or not a pattern that the packed form holds.
        """
        match = re.fullmatch(r"\s*(\d{1,4})\s*:\s*(\d{1,4})\s*", text)
        if match is None:
            raise UsageError(f"pattern {text!r}: write it as N:M with N kept of M, for example 2:4 or 16:32")
        return cls(int(match[1]), int(match[2]))

    @property
    def density(self) -> float:
        """Kept fraction of the weights, 0 to 1."""
        return self.keep / self.group

    @property
    def kept_per_word(self) -> int:
        """Values stored for one 32-column mask word."""
        return WORD * self.keep // self.group

    def require_width(self, in_features: int, layer: str) -> None:
        """Refuses a matrix whose rows do not divide into whole groups.

        Args:
            in_features: Row length of the weight.
            layer: Name for the message.

        Raises:
            UsageError: ``in_features`` is not a multiple of the group size.
        """
        if in_features <= 0 or in_features % self.group:
            raise UsageError(
                f"layer {layer}: in_features {in_features} is not a multiple of M={self.group} (pattern {self}); "
                "choose a smaller group or leave the layer out"
            )

    def __str__(self) -> str:
        return f"{self.keep}:{self.group}"
