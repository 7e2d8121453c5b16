"""The kernels of a decode step beside their torch references: on a GPU where there is one, else in the interpreter."""

import math

import pytest
import torch
from torch import Tensor

from sdbench.kernels.decode import attention as attention_module
from sdbench.kernels.decode import gate as gate_module
from sdbench.kernels.decode import head as head_module
from sdbench.kernels.decode import norm as norm_module
from sdbench.kernels.decode.attention import Attention, Heads, Parts, slices_for
from sdbench.kernels.decode.gate import gate
from sdbench.kernels.decode.head import LOWEST, SLOTS, advance, head
from sdbench.kernels.decode.norm import blocks, embed, norm
from sdbench.timing import relative_error, within

EPS = 1e-6


def draw(*shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.fixture(params=["kernel", "reference"])
def runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs each test by the kernels and by the torch references."""
    for module in (norm_module, gate_module, head_module, attention_module):
        monkeypatch.setattr(module, "uses_kernels", lambda device: request.param == "kernel")
    return str(request.param)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_norm_adds_sums_and_leaves_its_scalar(runs: str, splits: int, device: torch.device) -> None:
    size = 200
    h, gamma = draw(size, seed=0, device=device), draw(size, seed=1, device=device).bfloat16()
    sums = draw(splits, size, seed=2, device=device) if splits else None
    want = h.double() + (0 if sums is None else sums.double().sum(0))
    x, squares = torch.full_like(h, math.nan), torch.full((blocks(size),), math.nan, device=device)
    norm(h, sums, gamma, x, squares, False)
    assert within(relative_error(h, want), 1e-6)
    normed = x.double() / (squares.double().sum() / size + EPS).sqrt()
    assert within(relative_error(normed, want / (want.square().mean() + EPS).sqrt() * gamma.double()), 1e-5)


def test_embed_reads_the_tokens_row(runs: str, device: torch.device) -> None:
    table, gamma = draw(5, 130, seed=0, device=device).bfloat16(), draw(130, seed=1, device=device)
    h, x, squares = (torch.full((n,), math.nan, device=device) for n in (130, 130, blocks(130)))
    embed(torch.tensor([3], device=device), table, h, gamma, x, squares, False)
    assert torch.equal(h, table[3].float())
    assert within(relative_error(x, table[3].double() * gamma.double()), 1e-6)
    assert within(relative_error(squares.sum()[None], table[3].double().square().sum()[None]), 1e-5)


def test_gate(runs: str, device: torch.device) -> None:
    sums, squares = draw(3, 2 * 150, seed=0, device=device), draw(2, seed=1, device=device).square()
    y = torch.full((150,), math.nan, device=device)
    gate(sums, squares, 64, EPS, y, False)
    g, u = (sums.double().sum(0) / (squares.double().sum() / 64 + EPS).sqrt()).chunk(2)
    assert within(relative_error(y, g / (1 + torch.exp(-g)) * u), 1e-5)


class Step:
    """The state that the end of a step works on."""

    def __init__(self, device: torch.device):
        self.keys = torch.full((SLOTS,), LOWEST, dtype=torch.int64, device=device)
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.full((1,), 9, dtype=torch.int32, device=device)
        self.ids = torch.zeros(4, dtype=torch.int64, device=device)
        self.count = torch.ones(1, dtype=torch.int32, device=device)

    def end(self) -> int:
        advance(self.keys, self.token, self.position, self.ids, self.count, False)
        return int(self.ids[int(self.count) - 1])


def test_head_takes_the_greatest_logit(runs: str, device: torch.device) -> None:
    weight, x = draw(77, 96, seed=0, device=device).bfloat16(), draw(96, seed=1, device=device)
    squares, step = draw(1, seed=2, device=device).square(), Step(device)
    logits = torch.full((77,), math.nan, device=device)
    head(weight, x, squares, EPS, step.keys, logits, 4, False)
    products = weight.double() @ x.double()
    assert within(relative_error(logits, products / (squares.double().sum() / 96 + EPS).sqrt()), 1e-5)
    assert step.end() == int(products.argmax())
    assert (int(step.position), int(step.count), int(step.token)) == (10, 2, int(products.argmax()))
    assert (step.keys == LOWEST).all()
    # The next step starts from empty keys: its maximum is smaller than the last one's.
    head(weight, -x.abs() * 1e-3, squares, EPS, step.keys, None, 4, False)
    assert step.end() == int((weight.double() @ (-x.abs() * 1e-3).double()).argmax())


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([-3.0, -2.0, -5.0], 1), ([1.0, 4.0, 4.0], 1), ([-0.0, 0.0, -1.0], 0), ([0.0, math.nan, 9.0], -2), ([1.0, -math.inf, math.inf], -2)],
)
def test_argmax_by_hand(runs: str, logits: list[float], expected: int, device: torch.device) -> None:
    """Ties take the lowest id, zeros of both signs are equal, and what is not finite is told: -1 - id of the first such logit."""
    step = Step(device)
    head(
        torch.tensor(logits, device=device)[:, None],
        torch.ones(1, device=device),
        torch.ones(1, device=device),
        EPS,
        step.keys,
        None,
        2,
        False,
    )
    assert step.end() == expected


def wanted(
    heads: Heads, parts: Parts, sums: Tensor, r: float, keys: Tensor, values: Tensor, angles: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """float64: y, and the key and value of the last position, by complex rotation and an explicit loop over heads."""

    def turn(x: Tensor) -> Tensor:
        half = heads.size // 2
        turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag])

    def normed(x: Tensor, gamma: Tensor | None) -> Tensor:
        return x if gamma is None else x / (x.square().mean() + EPS).sqrt() * gamma.double()

    total = sums.double().sum(0) * r + (0 if parts.bias is None else parts.bias.double())
    rows = list(total.view(-1, heads.size))
    queries, new_keys, new_values = (
        rows[: heads.query],
        rows[heads.query : heads.query + heads.key_value],
        rows[heads.query + heads.key_value :],
    )
    y, stored = [], []
    for number, query in enumerate(queries):
        kv = number // (heads.query // heads.key_value)
        key = turn(normed(new_keys[kv], parts.key_gamma))
        stored.append(key)
        all_keys = torch.cat([keys[kv].double(), key[None]])
        all_values = torch.cat([values[kv].double(), new_values[kv][None]])
        weights = torch.softmax(all_keys @ turn(normed(query, parts.query_gamma)) * heads.scale, 0)
        y.append(weights @ all_values)
    return torch.cat(y), torch.stack(stored[:: heads.query // heads.key_value]), torch.stack(new_values)


@pytest.mark.parametrize(
    ("position", "slices", "normed", "biased"),
    # Tiles of 16 in a cache of 64: from four slices on, each is one tile.
    [
        *((0, 1, True, False), (5, 1, False, True), (40, 1, True, True), (40, 2, True, False), (3, 3, False, False)),
        *((0, 4, True, False), (16, 4, False, True), (40, 4, True, True), (63, 5, True, False)),
    ],
)
def test_attention(runs: str, position: int, slices: int, normed: bool, biased: bool, device: torch.device) -> None:
    heads, length, hidden = Heads(4, 2, 32, 0.3), 64, 48
    parts = Parts(
        draw(32, seed=1, device=device) if normed else None,
        draw(32, seed=2, device=device) if normed else None,
        draw(heads.rows, seed=3, device=device) if biased else None,
    )
    sums, squares = draw(2, heads.rows, seed=4, device=device), draw(1, seed=5, device=device).square()
    # Positions that are not there yet hold NaN: nothing of them may be read into a result.
    keys, values = (torch.full((2, length, 32), math.nan, device=device) for _ in range(2))
    keys[:, :position], values[:, :position] = draw(2, position, 32, seed=6, device=device), draw(2, position, 32, seed=7, device=device)
    angles = torch.arange(length, device=device)[:, None] * torch.logspace(0, -2, 16, device=device)
    layer = Attention(heads, parts, keys, values, angles.cos(), angles.sin(), slices, tile=16)
    r = float(1 / (squares.double().sum() / hidden + EPS).sqrt())
    want = wanted(heads, parts, sums, r, keys[:, :position], values[:, :position], angles[position].double())
    y = torch.full((heads.query * heads.size,), math.nan, device=device)
    layer(sums, squares, hidden, EPS, torch.tensor([position], dtype=torch.int32, device=device), y)
    for got, exact in zip((y, keys[:, position], values[:, position]), want, strict=True):
        assert within(relative_error(got, exact), 1e-5)
    assert keys[:, position + 1 :].isnan().all()


def test_slices() -> None:
    assert [slices_for(longest, 8, 132, 64) for longest in (64, 256, 1024, 40960)] == [1, 4, 16, 33]
