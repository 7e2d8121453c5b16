"""The int8 alternative: a live model's linears rounded to 8 bits, as the fused step's int8 products round them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sdbench.calibrate.select import select_linears
from sdbench.kernels.quantized.weights import quantize


@dataclass(frozen=True, eq=False)
class Rounded:
    """One rounded weight.

    Attributes:
        matrix: ``[out, in]``, what its codes stand for, in the model's dtype.
        nbytes: Bytes of codes and scales.
    """

    matrix: Tensor
    nbytes: int

    def unpack(self) -> Tensor:
        """The matrix, as a packed weight gives its own."""
        return self.matrix


def round_linears(model: Any) -> dict[str, Rounded]:
    """Every linear but the output embedding, whatever a run prunes: what a user would run instead leaves none of them in 16 bits.

    Args:
        model: A transformers causal language model; it stays as it is.
    """
    rounded = {}
    for name, linear in select_linears(model).items():
        weight = linear.weight.detach()
        codes = quantize(weight, "int8")
        rounded[name] = Rounded(codes.dequantize().to(weight.dtype), codes.nbytes)
    return rounded
