"""Weight-only int8 with a float32 scale an output channel: see ``weights.py`` for the rounding, ``gemv.py`` for the kernel."""

from functools import partial

from sdbench.kernels.quantized import gemv, weights
from sdbench.kernels.registry import Variant, register

register(
    Variant(
        kernel="quantized",
        name="int8",
        summary="weight-only int8, a scale an output channel: Triton GEMV, next tile prefetched",
        launch=gemv.launch,
        space=gemv.space,
        default=gemv.default,
        compile_source=partial(gemv.compile_source, kind="int8"),
        prepare=partial(weights.prepare, kind="int8"),
    )
)
