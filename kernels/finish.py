"""What follows a product: partial sums become one y, always added in the same order, and an epilogue that a decode step needs is applied.

    t = sum over splits of sums[split] + bias;   y = silu(t[:out/2]) * t[out/2:] (gated), or t + residual, or t

A second small kernel instead of a last program that waits for the others: a counter and its fence cost 2 us on an H200, this launch about 1
where it overlaps the product's tail (see the log in ``spmv/README.md``), and nothing is left behind for the next call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdbench.errors import SdbenchError
from sdbench.kernels.launching import Repeat, repeatable, runs_triton, scratch
from sdbench.kernels.registry import Config

_BLOCK = 128


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What is done to a product before it is written.

    Attributes:
        bias: ``[out]``, added first.
        residual: ``[out]``, added last; not together with ``gated``.
        gated: The matrix holds gate rows above as many up rows; y is ``silu(gate) * up``, ``[out/2]``.
    """

    bias: Tensor | None = None
    residual: Tensor | None = None
    gated: bool = False

    def size(self, out_features: int) -> int:
        """Elements of y for a matrix of ``out_features`` rows.

        Raises:
            SdbenchError: The parts do not fit the matrix or each other.
        """
        if self.gated and (out_features % 2 or self.residual is not None):
            raise SdbenchError(f"a gated epilogue halves an even number of rows and takes no residual; the matrix has {out_features} rows")
        for name, part in (("bias", self.bias), ("residual", self.residual)):
            if part is not None and part.numel() != out_features:
                raise SdbenchError(f"the epilogue's {name} has {part.numel()} elements, the matrix {out_features} rows")
        return out_features // 2 if self.gated else out_features


NOTHING = Epilogue()


@triton.jit
def _summed(sums_ptr, bias_ptr, rows, inside, OUT: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, BIAS: tl.constexpr):
    split = tl.arange(0, SPLIT_BLOCK)
    some = (split < SPLITS)[:, None] & inside[None, :]
    total = tl.sum(tl.load(sums_ptr + split[:, None] * OUT + rows[None, :], mask=some, other=0.0), 0)
    if BIAS:
        total += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def finish_kernel(
    sums_ptr, bias_ptr, residual_ptr, y_ptr,
    OUT: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y from float32 sums ``[SPLITS, OUT]``; a program writes BLOCK elements."""
    SIZE: tl.constexpr = OUT // 2 if GATED else OUT
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < SIZE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = _summed(sums_ptr, bias_ptr, rows, inside, OUT, SPLITS, SPLIT_BLOCK, BIAS)
    if GATED:
        total = total * tl.sigmoid(total) * _summed(sums_ptr, bias_ptr, rows + SIZE, inside, OUT, SPLITS, SPLIT_BLOCK, BIAS)
    if RESIDUAL:
        total += tl.load(residual_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, total.to(y_ptr.dtype.element_ty), mask=inside)


def finish(sums: Tensor, y: Tensor, epilogue: Epilogue = NOTHING, dependent: bool = False) -> Tensor:
    """Fills and returns y.

    Args:
        sums: float32 ``[splits, out]``, contiguous; added in the order of the splits.
        y: ``[epilogue.size(out)]``, contiguous.
        epilogue: What to apply.
        dependent: Launch while the kernel that writes the sums still runs (programmatic dependent launch).
    """
    if not runs_triton(sums.device):
        return y.copy_(finish_reference(sums, epilogue))
    _launch(sums, y, epilogue, dependent)
    return y


def finish_again(sums: Tensor, y: Tensor, dependent: bool) -> Repeat | None:
    """Fills y without an epilogue, and gives what does the same, without Triton's look-up, at other addresses of sums and y."""
    repeat = _launch(sums, y, NOTHING, dependent)
    return repeat and (lambda sums_at, y_at, stream: repeat(sums_at, y_at, y_at, y_at, stream=stream))


def _launch(sums: Tensor, y: Tensor, epilogue: Epilogue, dependent: bool) -> Repeat | None:
    splits, out = sums.shape
    grid = triton.cdiv(y.numel(), _BLOCK), 1, 1
    constexprs = (
        out, splits, triton.next_power_of_2(splits), _BLOCK,
        epilogue.bias is not None, epilogue.residual is not None, epilogue.gated, dependent,
    )  # fmt: skip
    compiled = finish_kernel[grid](
        sums, y if epilogue.bias is None else epilogue.bias, y if epilogue.residual is None else epilogue.residual, y,
        *constexprs, launch_pdl=dependent,
    )  # fmt: skip
    return repeatable(compiled, grid, constexprs, y.device)


def finish_reference(sums: Tensor, epilogue: Epilogue) -> Tensor:
    """The same in torch: float32 y from sums ``[splits, out]``."""
    total = sums.float().sum(0)
    if epilogue.bias is not None:
        total = total + epilogue.bias.float()
    if epilogue.gated:
        gate, up = total.chunk(2)
        total = torch.nn.functional.silu(gate) * up
    if epilogue.residual is not None:
        total = total + epilogue.residual.float()
    return total


def whole(parts: Callable[[Any, Tensor, Tensor, Config], None], operand: Any, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """Fills and returns y by a kernel that leaves parts of a product, and adds them where there are several.

    Args:
        parts: ``parts(operand, x, sums, config)`` fills ``[splits, tokens, out]``.
        operand: What it multiplies.
        x: ``[tokens, in]``.
        y: ``[tokens, out]``, contiguous, any float dtype.
        config: With ``splits`` and ``pdl``.
    """
    if config["splits"] == 1:
        parts(operand, x, y, config)
        return y
    sums = workspace(y.view(-1), config["splits"])
    parts(operand, x, sums, config)
    return finish(sums, y.view(-1), dependent=bool(config["pdl"])).view(y.shape)


def workspace(y: Tensor, splits: int) -> Tensor:
    """Partial sums of one launch.

    Args:
        y: Output ``[out]`` of the launch.
        splits: Programs along K.

    Returns:
        float32 ``[splits, out]``, uninitialised.
    """
    return scratch("sums", (splits, y.numel()), torch.float32, y.device)
