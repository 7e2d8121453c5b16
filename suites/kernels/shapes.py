"""Shapes by a model's name or spelled out."""

import re

from sdbench.architectures import ARCHITECTURES, named_shapes
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
    if not text.strip():
        raise UsageError(f"--shapes is empty: write OUTxIN, for example 4096x2560, or the name of a model: {', '.join(ARCHITECTURES)}")
    parts = [part.strip() for part in text.split(",")]
    if not re.match(r"\d", parts[0]):
        return named_shapes(text)
    shapes = {}
    for part in parts:
        match = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", part)
        if match is None:
            where = f" in {text!r}" if part != text else ""
            raise UsageError(f"--shapes: {part!r}{where} is no shape; write {_meant(part)}")
        shapes[part] = (int(match[1]), int(match[2]))
    return shapes


def _meant(part: str) -> str:
    """What a shape that is none should look like: itself with a small x, where only that is wrong."""
    spelled = re.fullmatch(r"([1-9]\d{0,8})\s*[xX*\u00d7]\s*([1-9]\d{0,8})", part)
    return f"{spelled[1]}x{spelled[2]}" if spelled else "OUTxIN, for example 4096x2560, with commas between several, or one model's name"
