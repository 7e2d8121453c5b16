"""Other weights in a live model's linears, for as long as a ``with`` block lasts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def weights_in_place(linears: Mapping[str, nn.Linear], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the linears multiply by other weights of the same shape; afterwards by their own.

    Args:
        linears: Layers by name.
        weights: [out, in] by the same names, or by some of them.
    """
    originals = {name: linears[name].weight.data for name in weights}
    try:
        for name, weight in weights.items():
            linears[name].weight.data = weight
        yield
    finally:
        for name, original in originals.items():
            linears[name].weight.data = original
