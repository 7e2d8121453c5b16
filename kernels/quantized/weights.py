"""8-bit weights with one float32 scale an output channel, laid out for 16-byte loads.

Four codes fill a 32-bit word, and the four of a word lie a quarter of a row apart: byte j of word c is column ``j * words + c``. So
neighbouring words meet neighbouring elements of x, four times, and no code has to be moved to where its x is.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sdbench.packing import require_finite
from sdbench.pattern import Pattern

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {"int8": 127.0, "fp8": 448.0}
"""Largest code of a kind; int8 leaves -128 out, so that codes are symmetric."""

_ALIGNED = 16
"""Words of a row are a multiple of this, so that every row starts where a 16-byte load may."""


def words_of(in_features: int) -> int:
    """32-bit words of a row of that width, padded."""
    return -(-in_features // (4 * _ALIGNED)) * _ALIGNED


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """W ~ scale[:, None] * codes; make one with :func:`quantize`.

    Attributes:
        values: int8 or float8_e4m3fn ``[out, words, 4]``: (r, c, j) is the code of row r, column ``j * words + c``; 0 past the width.
        scale: float32 ``[out]``.
        in_features: Columns of the matrix, without padding.
    """

    values: Tensor
    scale: Tensor
    in_features: int

    @property
    def shape(self) -> tuple[int, int]:
        """``(out_features, in_features)`` of the matrix."""
        return self.values.shape[0], self.in_features

    @property
    def words(self) -> int:
        """32-bit words of a row, each of four codes."""
        return self.values.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """What the weight is made of."""
        return self.values, self.scale

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the scales: what one product reads of the weight."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def clone(self) -> "QuantizedWeight":
        """A copy in memory of its own (cold-cache timing rotates over copies)."""
        return QuantizedWeight(self.values.clone(), self.scale.clone(), self.in_features)

    def dequantize(self) -> Tensor:
        """The matrix that the codes stand for: float64 ``[out, in]``, in which scale times code is exact."""
        columns = self.values.double().transpose(1, 2).flatten(1)[:, : self.in_features]
        return columns * self.scale.double()[:, None]


def quantize(dense: Tensor, kind: str) -> QuantizedWeight:
    """Rounds each output channel to 8-bit codes of one scale.

    scale[r] = max over k of |W[r, k]| / L and code[r, k] = round(W[r, k] / scale[r]), to the nearest with ties to even: among the integers
    for ``int8`` (L = 127), among the e4m3 numbers for ``fp8`` (L = 448, the largest). A row of zeros has scale 1.

    Args:
        dense: W ``[out, in]``, any float dtype.
        kind: ``"int8"`` or ``"fp8"``.

    Returns:
        The codes and scales, on W's device.

    Raises:
        SdbenchError: A weight is NaN or Inf.
    """
    require_finite(dense, "weight", "weight", "there is no scale for such a row")
    weight = dense.float()
    scale = weight.abs().amax(1) / LARGEST[kind]
    scale = torch.where(scale > 0, scale, 1.0)
    codes = weight / scale[:, None]
    if kind == "int8":
        codes = codes.round()
    codes = codes.clamp(-LARGEST[kind], LARGEST[kind])
    codes = F.pad(codes, (0, 4 * words_of(dense.shape[1]) - dense.shape[1]))
    quarters = codes.view(dense.shape[0], 4, -1).transpose(1, 2).contiguous()
    return QuantizedWeight(quarters.to(DTYPES[kind]), scale, dense.shape[1])


def prepare(dense: Tensor, keep: Tensor | None, pattern: Pattern | None, kind: str) -> tuple[QuantizedWeight, Tensor]:
    """The registry's ``Prepare`` once ``kind`` is bound: every weight is quantised, also those that a mask would drop."""
    quantized = quantize(dense, kind)
    return quantized, quantized.dequantize()
