"""Weight-only fp8 (e4m3) with a float32 scale an output channel: see ``weights.py`` for the rounding, ``gemv.py`` for the kernel."""

from functools import partial

from sdbench.kernels.quantized import gemv, weights
from sdbench.kernels.registry import Variant, register

register(
    Variant(
        kernel="quantized",
        name="fp8",
        summary="weight-only fp8 (e4m3), a scale an output channel: Triton GEMV, next tile prefetched",
        launch=gemv.launch,
        space=gemv.space,
        default=gemv.default,
        compile_source=partial(gemv.compile_source, kind="fp8"),
        prepare=partial(weights.prepare, kind="fp8"),
    )
)
