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
from sdbench.kernels.decode.head import LOWEST, SLOTS, advance, head, pick
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


@pytest.mark.parametrize(("splits", "batch"), [(0, 1), (1, 1), (3, 1), (0, 3), (2, 3)])
def test_norm_adds_sums_and_leaves_its_scalar(runs: str, splits: int, batch: int, device: torch.device) -> None:
    size = 200
    h, gamma = draw(batch, size, seed=0, device=device), draw(size, seed=1, device=device).bfloat16()
    sums = draw(splits, batch, size, seed=2, device=device) if splits else None
    want = h.double() + (0 if sums is None else sums.double().sum(0))
    x, squares = torch.full_like(h, math.nan), torch.full((batch, blocks(size)), math.nan, device=device)
    norm(h, sums, gamma, x, squares, False)
    assert within(relative_error(h, want), 1e-6)
    normed = x.double() / (squares.double().sum(1, keepdim=True) / size + EPS).sqrt()
    assert within(relative_error(normed, want / (want.square().mean(1, keepdim=True) + EPS).sqrt() * gamma.double()), 1e-5)


@pytest.mark.parametrize("tokens", [[3], [4, 0, 3]])
def test_embed_reads_the_tokens_row(runs: str, tokens: list[int], device: torch.device) -> None:
    table, gamma = draw(5, 130, seed=0, device=device).bfloat16(), draw(130, seed=1, device=device)
    h, x, squares = (torch.full((len(tokens), n), math.nan, device=device) for n in (130, 130, blocks(130)))
    embed(torch.tensor(tokens, device=device), table, h, gamma, x, squares, False)
    assert torch.equal(h, table[tokens].float())
    assert within(relative_error(x, table[tokens].double() * gamma.double()), 1e-6)
    assert within(relative_error(squares.sum(1), table[tokens].double().square().sum(1)), 1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_gate(runs: str, batch: int, device: torch.device) -> None:
    sums, squares = draw(3, batch, 2 * 150, seed=0, device=device), draw(batch, 2, seed=1, device=device).square()
    y = torch.full((batch, 150), math.nan, device=device)
    gate(sums, squares, 64, EPS, y, False)
    g, u = (sums.double().sum(0) / (squares.double().sum(1, keepdim=True) / 64 + EPS).sqrt()).chunk(2, -1)
    assert within(relative_error(y, g / (1 + torch.exp(-g)) * u), 1e-5)


class Step:
    """The state that the end of a step works on."""

    def __init__(self, device: torch.device, batch: int = 1):
        self.keys = torch.full((batch, SLOTS), LOWEST, dtype=torch.int64, device=device)
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.full((batch,), 9, dtype=torch.int32, device=device)
        self.ids = torch.zeros(batch, 4, dtype=torch.int64, device=device)
        self.count = torch.ones(batch, dtype=torch.int32, device=device)

    def end(self) -> list[int]:
        advance(self.keys, self.token, self.position, self.ids, self.count, False)
        return [int(ids[count - 1]) for ids, count in zip(self.ids, self.count.tolist(), strict=True)]


def test_head_takes_the_greatest_logit(runs: str, device: torch.device) -> None:
    weight, x = draw(77, 96, seed=0, device=device).bfloat16(), draw(1, 96, seed=1, device=device)
    squares, step = draw(1, 1, seed=2, device=device).square(), Step(device)
    logits = torch.full((1, 77), math.nan, device=device)
    head(weight, x, squares, EPS, step.keys, logits, 4, False)
    products = weight.double() @ x[0].double()
    assert within(relative_error(logits[0], products / (squares.double().sum() / 96 + EPS).sqrt()), 1e-5)
    assert step.end() == [int(products.argmax())]
    assert (int(step.position), int(step.count), int(step.token)) == (10, 2, int(products.argmax()))
    assert (step.keys == LOWEST).all()
    # The next step starts from empty keys: its maximum is smaller than the last one's.
    head(weight, -x.abs() * 1e-3, squares, EPS, step.keys, None, 4, False)
    assert step.end() == [int((weight.double() @ (-x[0].abs() * 1e-3).double()).argmax())]


def test_each_sequence_has_its_greatest_logit(runs: str, device: torch.device) -> None:
    """More logits than a program takes, none of one sequence read for another."""
    products, squares, step = draw(3, 2500, seed=0, device=device), draw(3, 2, seed=1, device=device).square(), Step(device, 3)
    products[1] -= 100
    logits = torch.full_like(products, math.nan)
    pick(products, squares, 96, EPS, step.keys, logits, False)
    assert within(relative_error(logits, products.double() / (squares.double().sum(1, keepdim=True) / 96 + EPS).sqrt()), 1e-6)
    want = products.argmax(1).tolist()
    assert step.end() == want == step.token.tolist()
    assert step.position.tolist() == [10] * 3 and step.count.tolist() == [2] * 3 and (step.keys == LOWEST).all()
    products[2, 7] = math.inf
    pick(products, squares, 96, EPS, step.keys, None, False)
    assert step.end() == [*want[:2], -8]


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([-3.0, -2.0, -5.0], 1), ([1.0, 4.0, 4.0], 1), ([-0.0, 0.0, -1.0], 0), ([0.0, math.nan, 9.0], -2), ([1.0, -math.inf, math.inf], -2)],
)
def test_argmax_by_hand(runs: str, logits: list[float], expected: int, device: torch.device) -> None:
    """Ties take the lowest id, zeros of both signs are equal, and what is not finite is told: -1 - id of the first such logit."""
    step, one = Step(device), torch.ones(1, 1, device=device)
    head(torch.tensor(logits, device=device)[:, None], one, one, EPS, step.keys, None, 2, False)
    assert step.end() == [expected]
    pick(torch.tensor([logits], device=device), one, 1, EPS, step.keys, None, False)
    assert step.end() == [expected]


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
    # A single sequence, and one of three whose positions differ.
    for positions in ([position], [position, 7, 63 - position]):
        batch = len(positions)
        sums, squares = draw(2, batch, heads.rows, seed=4, device=device), draw(batch, 1, seed=5, device=device).square()
        # Positions that are not there yet hold NaN: nothing of them may be read into a result.
        keys, values = (torch.full((batch, 2, length, 32), math.nan, device=device) for _ in range(2))
        for sequence, count in enumerate(positions):
            keys[sequence, :, :count] = draw(2, count, 32, seed=6 + sequence, device=device)
            values[sequence, :, :count] = draw(2, count, 32, seed=16 + sequence, device=device)
        angles = torch.arange(length, device=device)[:, None] * torch.logspace(0, -2, 16, device=device)
        layer = Attention(heads, parts, keys, values, angles.cos(), angles.sin(), slices, tile=16)
        before = keys.clone(), values.clone()
        y = torch.full((batch, heads.query * heads.size), math.nan, device=device)
        layer(sums, squares, hidden, EPS, torch.tensor(positions, dtype=torch.int32, device=device), y)
        for sequence, count in enumerate(positions):
            r = float(1 / (squares[sequence].double().sum() / hidden + EPS).sqrt())
            cached = (cache[sequence, :, :count] for cache in before)
            want = wanted(heads, parts, sums[:, sequence], r, *cached, angles[count].double())
            for got, exact in zip((y[sequence], keys[sequence, :, count], values[sequence, :, count]), want, strict=True):
                assert within(relative_error(got, exact), 1e-5)
            assert keys[sequence, :, count + 1 :].isnan().all()


def test_slices() -> None:
    assert [slices_for(longest, 8, 132, 64) for longest in (64, 256, 1024, 40960)] == [1, 4, 16, 33]
