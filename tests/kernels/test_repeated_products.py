"""A bound SpMV multiplies again and again: what it keeps of its first product must serve the later ones, whatever came in between."""

from importlib import import_module

import pytest
import torch

from sdbench.kernels.spmv import bind, problem_of
from sdbench.kernels.spmv import lane_row as lane_row_file
from sdbench.kernels.spmv.lane_row import Bound, _constexprs, lane_row_kernel
from sdbench.packing import stack_rows
from sdbench.pattern import Pattern
from sdbench.timing import relative_error, within

from .launches import Launches
from .problems import problem

finish_file = import_module("sdbench.kernels.finish")


@pytest.mark.parametrize("variant", ["lane_row", "lane_row_nibble"])
@pytest.mark.parametrize("splits", [1, 4])
def test_products_one_after_the_other(variant: str, splits: int, device: torch.device) -> None:
    """Of other x, other dtypes, x that is not aligned, and a weight that has become rows of a stack."""
    packed, pruned = problem(48, 512, Pattern(2, 4), torch.bfloat16, device)
    config = {"block_out": 16, "block_words": 4, "splits": splits, "depth": 1, "pdl": 0}
    bound = bind(packed, variant, config)
    memory = torch.randn(8, 1, 1, 520, device=device, generator=torch.Generator(device).manual_seed(0))
    for turn in range(8):
        if turn == 5:
            stack_rows([packed, problem(16, 512, Pattern(2, 4), torch.bfloat16, device)[0]])
        x = memory[turn, ..., 4:516] if turn == 3 else memory[turn, ..., :512].clone()
        x = x.to(torch.bfloat16) if turn % 2 else x
        y = bound(x, torch.float32)
        assert y.shape == (1, 1, 48)
        assert within(relative_error(y.view(-1), pruned.double() @ x.view(-1).double()), 1e-5), turn


@pytest.mark.parametrize("splits", [1, 4])
def test_repeated_launches_get_the_same_arguments(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the kernels' parameters, with the addresses of this product's x and y."""
    product, adding = Launches(), Launches()
    monkeypatch.setattr(lane_row_file, "lane_row_kernel", product)
    monkeypatch.setattr(finish_file, "finish_kernel", adding)
    monkeypatch.setattr(finish_file, "runs_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(lane_row_file, "ALIGNMENT", 4)
    packed, _ = problem(32, 512, Pattern(2, 4), torch.bfloat16, torch.device("cpu"))
    config = {"block_out": 16, "block_words": 4, "splits": splits, "depth": 1, "pdl": 0}
    assert lane_row_kernel.arg_names[4:] == list(_constexprs(problem_of(packed), packed.pitch, config, False, True, True))
    bound = Bound(packed, config, nibble=True)
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    y = [bound.multiply(x, torch.float32) for _ in range(3)]
    assert (product.looked_up, adding.looked_up) == (1, 0) and len(product.seen) == 3
    assert len(adding.seen) == (3 if splits > 1 else 0)
    weight = packed.mask_words.data_ptr(), packed.values.data_ptr(), x.data_ptr()
    for turn, seen in enumerate(product.seen):
        assert seen[1:4] == weight and (splits > 1 or seen[4] == y[turn].data_ptr())
        assert seen[5:] == product.seen[0][5:] and seen[0] == (2, splits, 1)
    for turn, seen in enumerate(adding.seen):
        assert seen[1] == product.seen[turn][4] and seen[4] == y[turn].data_ptr()
        assert seen[5:] == adding.seen[0][5:]
    bound.multiply(x.float(), torch.float32)
    assert product.looked_up == 2, "another dtype is another kernel"
    packed.values.data = packed.values.clone()
    bound.multiply(x, torch.float32)
    assert product.looked_up == 3, "moved"
