"""Products of several threads on one stream: what one writes first and reads afterwards, none of the others may write over."""

import math
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sdbench.kernels import registry
from sdbench.kernels.launching import scratch, unkept_scratch
from sdbench.kernels.spmm.expand import Expanded
from sdbench.kernels.spmv import problem_of
from sdbench.packing import pack
from sdbench.pattern import Pattern
from sdbench.timing import relative_error, within

from .launches import Launches
from .problems import problem

LANE_ROW = {"block_out": 16, "block_words": 4, "splits": 4, "depth": 1, "pdl": 0}


def test_memory_is_of_a_thread() -> None:
    """Also where the other one asks for less, and gets a view of a memory of its own."""
    ask = ("of a thread", torch.float32, torch.device("cpu"))

    def place(*shape: int) -> int:
        return scratch(ask[0], shape, *ask[1:]).untyped_storage().data_ptr()  # type: ignore[arg-type]  # two numbers

    with ThreadPoolExecutor(1) as other:
        mine, its = place(4, 8), other.submit(place, 4, 8).result()
        assert mine != its
        assert [place(2, 8), other.submit(place, 2, 8).result()] == [mine, its] == [place(4, 8), other.submit(place, 4, 8).result()]


def test_memory_that_is_not_kept_is_new_in_one_thread_alone() -> None:
    ask = ("not kept", (4, 8), torch.float32, torch.device("cpu"))
    with ThreadPoolExecutor(1) as other:
        kept = scratch(*ask), other.submit(scratch, *ask).result()
        with unkept_scratch():
            with unkept_scratch():
                new = [scratch(*ask)]
            new.append(scratch(*ask))
            assert other.submit(scratch, *ask).result() is kept[1]
        assert len({memory.data_ptr() for memory in (*kept, *new)}) == 4
        assert scratch(*ask) is kept[0]


@pytest.mark.parametrize(
    ("kernel", "name", "reader", "config"),
    [
        ("spmv", "lane_row", "finish", LANE_ROW),
        ("spmv", "portable", "finish", {"block_out": 32, "block_words": 4, "splits": 4}),
        ("spmm", "tile", "finish", {"splits": 2}),
        ("spmm", "expand", "F", {}),
    ],
)
def test_a_product_between_anothers_writing_and_reading(
    kernel: str, name: str, reader: str, config: dict[str, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those of several tokens add the splits by a piece that they share.
    file = import_module("sdbench.kernels.finish" if name == "tile" else f"sdbench.kernels.{kernel}.{name}")
    variant, tokens = registry.find(kernel, name), 1 if kernel == "spmv" else 3
    packed, pruned = problem(48, 512, Pattern(2, 4), torch.bfloat16, device)
    doubled = pack(2 * pruned, packed.keep(), packed.pattern)
    config = {**variant.default(problem_of(packed, tokens)), **config}
    x = torch.randn(*([tokens] * (tokens > 1)), 512, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    read, others = F.linear if reader == "F" else getattr(file, reader), []

    def product(weight: Any) -> torch.Tensor:
        return variant.launch(weight, x, torch.full((*x.shape[:-1], 48), math.nan, device=device), config)

    def between(*arguments: Any, **options: Any) -> torch.Tensor:
        if not others:
            others.append(None)
            others[0] = thread.submit(product, doubled).result()
        return read(*arguments, **options)

    monkeypatch.setattr(file, reader, SimpleNamespace(linear=between) if reader == "F" else between)
    with ThreadPoolExecutor(1) as thread:
        mine = product(packed)
    want = x.double() @ pruned.double().T
    for found, scale in ((mine, 1), (others[0], 2)):
        assert within(relative_error(found, scale * want), 5e-3 if name == "expand" else 1e-5)


def test_a_launch_is_repeated_in_its_own_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the address of that thread's dense rows."""
    kernel = Launches()
    monkeypatch.setattr("sdbench.kernels.spmm.expand.words_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    packed, _ = problem(32, 96, Pattern(2, 4), torch.bfloat16, torch.device("cpu"))
    product = Expanded(packed, {"words": 1, "block_out": 16, "block_in": 128, "num_warps": 2, "piece": 32})

    def rows() -> int:
        product.multiply(torch.zeros(40, 96, dtype=torch.bfloat16), torch.bfloat16)
        return kernel.seen[-1][3]

    with ThreadPoolExecutor(1) as other:
        first = [(rows(), other.submit(rows).result()) for _ in range(3)]
    assert kernel.looked_up == 2
    assert len(set(first)) == 1 and first[0][0] != first[0][1]
