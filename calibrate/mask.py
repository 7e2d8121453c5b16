"""From scores to a keep mask: exactly N of every M columns, ties to the lower column. Every method ends here."""

import torch
from torch import Tensor

from sdbench.pattern import Pattern

CHUNK = 1 << 24
"""Scores sorted at a time: the sort's int64 indices and copies cost some 30 bytes each, so half a GB at most."""


def best_of_groups(score: Tensor, pattern: Pattern) -> Tensor:
    """Keeps the N best scores of every group of M columns.

    Args:
        score: [rows, columns], float32, no NaN; columns a multiple of M, groups from column 0.
        pattern: N:M.

    Returns:
        Bool [rows, columns], exactly N true in each group; among equal scores the lower columns are kept.
    """
    rows, columns = score.shape
    keep = torch.zeros(rows, columns // pattern.group, pattern.group, dtype=torch.bool, device=score.device)
    step = max(1, CHUNK // columns)
    for part, part_keep in zip(score.split(step), keep.split(step), strict=True):
        # Only the stable sort is exact about ties: topk leaves their order open.
        order = part.reshape(part_keep.shape).sort(dim=-1, descending=True, stable=True).indices
        part_keep.scatter_(-1, order[..., : pattern.keep], True)
    return keep.view(rows, columns)
