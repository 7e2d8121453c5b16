"""Shapes by a model's name or spelled out."""

import re

from sdbench.architectures import named_shapes
from sdbench.errors import UsageError
from sdbench.suites.kernels.operands import Shape


def parse_shapes(text: str) -> dict[str, Shape]:
    """Reads ``--shapes``.

    Args:
        text: A known architecture (its fused shapes), or ``OUTxIN,OUTxIN,...``.

    Returns:
        Layer name -> (out_features, in_features).

    Raises:
        UsageError: Neither of the two.
    """
    parts = [part.strip() for part in text.split(",")]
    if not re.match(r"\d", parts[0]):
        return named_shapes(text)
    shapes = {}
    for part in parts:
        match = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", part)
        if match is None:
            raise UsageError(f"shape {part!r}: write OUTxIN, for example 4096x2560, or the name of a model")
        shapes[part] = (int(match[1]), int(match[2]))
    return shapes
