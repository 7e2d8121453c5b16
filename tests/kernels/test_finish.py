"""The epilogues of a product, in the kernel (on a GPU, or in the interpreter) and in torch, against float64."""

import pytest
import torch

from sdbench.calibrate.magnitude import keep_mask
from sdbench.errors import SdbenchError
from sdbench.kernels.finish import Epilogue, finish, finish_reference
from sdbench.kernels.spmv import spmv
from sdbench.packing import pack
from sdbench.pattern import Pattern
from sdbench.timing import relative_error, within

OUT = 262
FEW = 22


def draw(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def wanted(total: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    total, half = total.double(), total.numel() // 2
    if epilogue.bias is not None:
        total = total + epilogue.bias.double()
    if epilogue.gated:
        gate, up = total[:half], total[half:]
        return gate / (1 + torch.exp(-gate)) * up
    return total if epilogue.residual is None else total + epilogue.residual.double()


def epilogues(device: torch.device, out: int = OUT) -> list[Epilogue]:
    bias, residual = draw(out, seed=1, device=device), draw(out, seed=2, device=device)
    return [
        Epilogue(),
        Epilogue(bias=bias),
        Epilogue(residual=residual.bfloat16()),
        Epilogue(bias=bias, residual=residual),
        Epilogue(gated=True),
        Epilogue(bias=bias.bfloat16(), gated=True),
    ]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("splits", [1, 5])
def test_sums_and_epilogues(splits: int, number: int, device: torch.device) -> None:
    epilogue = epilogues(device)[number]
    sums = draw(splits, OUT, seed=0, device=device)
    y = torch.full((epilogue.size(OUT),), float("nan"), device=device)
    want = wanted(sums.double().sum(0), epilogue)
    assert within(relative_error(finish(sums, y, epilogue), want), 1e-5)
    assert within(relative_error(finish_reference(sums, epilogue), want), 1e-5)
    if device.type == "cuda":
        rounded = finish(sums, torch.empty_like(y, dtype=torch.bfloat16), epilogue)
        assert within(relative_error(rounded, want), 5e-3)


@pytest.mark.parametrize("variant", ["auto", "lane_row", "reference"])
@pytest.mark.parametrize("splits", [1, 2])
def test_products_with_epilogues(splits: int, variant: str, device: torch.device) -> None:
    weight = draw(FEW, 128, seed=3, device=device).bfloat16()
    keep = keep_mask(weight, Pattern(2, 4))
    packed, x = pack(weight, keep, Pattern(2, 4)), draw(1, 128, seed=4, device=device)
    config = {"block_out": 8, "block_words": 4, "splits": splits, "depth": 1, "pdl": 0} if variant == "lane_row" else None
    total = torch.where(keep, weight, 0).double() @ x[0].double()
    for epilogue in epilogues(device, FEW):
        y = spmv(packed, x, variant, config, epilogue=epilogue)
        assert y.shape == (1, epilogue.size(FEW))
        assert within(relative_error(y[0], wanted(total, epilogue)), 1e-5)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SdbenchError, match="bias has 3 elements, the matrix 4 rows"):
        Epilogue(bias=torch.ones(3)).size(4)
    with pytest.raises(SdbenchError, match="even number of rows"):
        Epilogue(gated=True).size(5)
    with pytest.raises(SdbenchError, match="no residual"):
        Epilogue(gated=True, residual=torch.ones(4)).size(4)
