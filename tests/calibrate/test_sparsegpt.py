import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdbench.calibrate.sparsegpt import DampBy, prune, prune_together, prune_with_report
from sdbench.errors import SdbenchError, UsageError
from sdbench.pattern import Pattern

TWO_FOUR = Pattern(2, 4)


def problem(rows: int, columns: int, seed: int, tokens: int = 200) -> tuple[Tensor, Tensor]:
    """A weight, and the Hessian of inputs whose columns are correlated and of very different size; float32."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.5 * torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = (
        torch.randn(tokens, columns, generator=generator)
        @ mix
        * torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]
    )
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs / tokens


def optimal_brain_surgeon(
    weight: Tensor, hessian: Tensor, pattern: Pattern, damp: float, damp_by: DampBy = "mean"
) -> tuple[Tensor, Tensor]:
    """Column by column in float64, with an explicit inverse of the Hessian of the columns that remain; no Cholesky, no blocks."""
    weight, hessian = weight.double().clone(), hessian.double()
    unit = hessian.diagonal().mean() if damp_by == "mean" else hessian.diagonal().median()
    hessian = hessian + damp * unit * torch.eye(len(hessian), dtype=torch.float64)
    columns = len(hessian)
    keep = torch.ones_like(weight, dtype=torch.bool)
    inverses = [torch.linalg.inv(hessian[column:, column:]) for column in range(columns)]
    for column in range(columns):
        if column % pattern.group == 0:
            cost = torch.stack([weight[:, c] ** 2 / inverses[c][0, 0] for c in range(column, column + pattern.group)], dim=1)
            keep[:, column : column + pattern.group].scatter_(1, cost.argsort(dim=1)[:, : pattern.group - pattern.keep], False)
        inverse = inverses[column]
        for row in range(len(weight)):
            if not keep[row, column]:
                weight[row, column:] -= weight[row, column] / inverse[0, 0] * inverse[0]
                weight[row, column] = 0.0
    return weight, keep


@pytest.mark.parametrize("pattern", [Pattern(2, 4), Pattern(1, 4), Pattern(3, 8), Pattern(8, 16), Pattern(16, 32)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_optimal_brain_surgery(pattern: Pattern, seed: int) -> None:
    weight, hessian = problem(6, 64, seed)
    expected, expected_keep = optimal_brain_surgeon(weight, hessian, pattern, damp=0.01)
    pruned, keep = prune(weight, hessian, pattern, damp=0.01, block=32)
    assert torch.equal(keep, expected_keep)
    assert (pruned - expected).norm() / expected.norm() < 1e-4
    assert bool((pruned[~keep] == 0).all())
    assert bool((keep.view(6, -1, pattern.group).sum(-1) == pattern.keep).all())


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", [TWO_FOUR, Pattern(16, 32)], ids=str)
def test_equals_optimal_brain_surgery_on_the_gpu(pattern: Pattern) -> None:
    """Wider than a block of 128 columns, several matrices of one input at once."""
    weight, hessian = problem(12, 256, seed=3, tokens=600)
    expected, expected_keep = optimal_brain_surgeon(weight, hessian, pattern, damp=0.01)
    results = prune_together({"q": weight[:8].cuda(), "k": weight[8:].cuda()}, hessian.cuda(), pattern)
    found = torch.cat([result.weight.cpu() for result in results.values()])
    keep = torch.cat([result.keep.cpu() for result in results.values()])
    assert torch.equal(keep, expected_keep)
    assert (found - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("damp", [0.001, 0.1])
def test_equals_optimal_brain_surgery_damped_by_the_median(damp: float) -> None:
    """One row of inputs is huge in a few columns, as the first position of a model is: the two units are far apart."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(200, 32, generator=generator)
    inputs[0, :2] = torch.tensor([300.0, -200.0])
    weight, hessian = torch.randn(5, 32, generator=generator), inputs.T @ inputs / 200
    assert hessian.diagonal().mean() > 5 * hessian.diagonal().median()
    results: dict[DampBy, Tensor] = {}
    for damp_by in ("mean", "median"):
        expected, expected_keep = optimal_brain_surgeon(weight, hessian, TWO_FOUR, damp, damp_by)
        found = prune_with_report(weight, hessian, TWO_FOUR, damp=damp, damp_by=damp_by)
        assert torch.equal(found.keep, expected_keep) and found.damp_used == damp
        assert (found.weight - expected).norm() / expected.norm() < 1e-4
        results[damp_by] = found.weight
    assert not torch.allclose(results["mean"], results["median"], rtol=1e-3)


@pytest.mark.parametrize("block", [1, 4, 10, 24, 128])
def test_block_changes_nothing_and_never_splits_a_group(block: int) -> None:
    weight, hessian = problem(5, 96, seed=3)
    expected, expected_keep = prune(weight, hessian, Pattern(4, 8), block=96)
    pruned, keep = prune(weight, hessian, Pattern(4, 8), block=block)
    assert torch.equal(keep, expected_keep)
    torch.testing.assert_close(pruned, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [8, 128])
def test_matrices_of_one_input_come_out_as_alone(block: int) -> None:
    weight, hessian = problem(17, 64, seed=6)
    weights = {"q": weight[:8], "k": weight[8:13].bfloat16(), "v": weight[13:]}
    for name, result in prune_together(weights, hessian, TWO_FOUR, block=block).items():
        alone = prune_with_report(weights[name], hessian, TWO_FOUR, block=block)
        assert result.weight.dtype == weights[name].dtype
        assert torch.equal(result.weight, alone.weight) and torch.equal(result.keep, alone.keep)


def test_one_factorisation_serves_all_matrices_of_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    factor = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: calls.append(len(matrix)) or factor(matrix))
    weight, hessian = problem(6, 32, seed=6)
    prune_together({"q": weight[:2], "k": weight[2:4], "v": weight[4:]}, hessian, TWO_FOUR)
    assert calls == [32]


def test_bad_weights_among_several_are_named() -> None:
    weights = {"q": torch.ones(1, 4), "k": torch.tensor([[1.0, float("nan"), 1.0, 1.0]])}
    with pytest.raises(SdbenchError, match=r"layer k: weight\[0, 1\] is nan"):
        prune_together(weights, torch.eye(4), TWO_FOUR)
    with pytest.raises(SdbenchError, match=r"layer k: the Hessian has shape \[4, 4\], expected \[8, 8\]"):
        prune_together({"q": torch.ones(1, 4), "k": torch.ones(1, 8)}, torch.eye(4), TWO_FOUR)


class Operators(TorchDispatchMode):
    """Counts operators that do work on the device; views cost nothing there."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.count += not function.is_view
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(("pattern", "most"), [(TWO_FOUR, 5.1), (Pattern(16, 32), 3.4)], ids=str)
def test_a_column_costs_few_operators(pattern: Pattern, most: float) -> None:
    """A Qwen3-4B has 680,000 columns to sweep, and launching a kernel takes longer than running it."""
    counts = []
    for columns in (256, 512):
        weight, hessian = problem(4, columns, seed=0)
        with Operators() as seen:
            prune(weight, hessian, pattern)
        counts.append(seen.count)
    assert (counts[1] - counts[0]) / 256 <= most


def test_case_13_cost_is_squared_weight_over_squared_factor() -> None:
    hessian = torch.diag(torch.tensor([1.0, 1.0, 1.0, 16.0]))
    pruned, keep = prune(torch.tensor([[3.0, 2.0, 1.5, 0.9]]), hessian, TWO_FOUR, damp=0.0)
    # Costs 9, 4, 2.25 and 0.81 * 16 = 12.96.
    assert keep.tolist() == [[True, False, False, True]]
    torch.testing.assert_close(pruned, torch.tensor([[3.0, 0.0, 0.0, 0.9]]))


def test_mask_comes_from_compensated_weights() -> None:
    """Columns 0 and 4 are twins: pruning 0 moves its weight to 4, which its own small weight would never have saved."""
    hessian = torch.eye(8)
    hessian[0, 4] = hessian[4, 0] = 0.99
    weight = torch.tensor([[1.0, 9.0, 9.0, 0.5, 0.1, 0.5, 0.9, 0.4]])
    pruned, keep = prune(weight, hessian, TWO_FOUR, damp=0.0)
    assert keep.tolist() == [[False, True, True, False, True, False, True, False]]
    assert pruned[0, 4].item() == pytest.approx(0.1 + 0.99, rel=1e-5)


def test_compensation_lowers_the_output_error() -> None:
    # Fewer tokens than columns: much of what a pruned column did can be done by others.
    weight, hessian = problem(16, 64, seed=5, tokens=40)
    pruned, keep = prune(weight, hessian, TWO_FOUR)

    def error(candidate: Tensor) -> float:
        difference = candidate - weight
        return float((difference @ hessian * difference).sum())

    assert error(pruned) < 0.5 * error(weight * keep)


def test_case_12_singular_hessian_raises_the_damping_and_records_it(caplog: pytest.LogCaptureFixture) -> None:
    direction = torch.tensor([1.0, 2.0, 3.0, 4.0])
    hessian = torch.outer(direction, direction)
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    with caplog.at_level(logging.WARNING):
        result = prune_with_report(weight, hessian, TWO_FOUR, damp=0.0, layer="layers.7.down_proj")
    assert result.damp == 0.0 and result.damp_used == pytest.approx(1e-4)
    assert "layers.7.down_proj" in caplog.text and "0.0001" in caplog.text
    assert result.keep.sum() == 2
    # Rank 1: the two kept weights can take over all of the output, 1 + 2 + 3 + 4 = 10, which no plain mask keeps.
    assert float(result.weight @ direction) == pytest.approx(10.0, rel=1e-2)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_case_12_a_singular_hessian_never_passes_by_rounding(rank: int) -> None:
    """A plain float32 Cholesky accepts half of those of rank 3, and here and there one of lower rank."""
    generator = torch.Generator().manual_seed(0)
    for inputs in torch.randn(300, rank, 4, generator=generator):
        assert prune_with_report(torch.ones(1, 4), inputs.T @ inputs / rank, TWO_FOUR, damp=0.0).damp_used > 0.0


def test_huge_columns_do_not_pass_for_a_singular_hessian() -> None:
    """The first position as models have it: one row of four hundred with a few columns thousands of times larger than the rest."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 256, generator=generator)
    inputs[0, :3] = torch.tensor([3000.0, -2000.0, 1000.0])
    assert prune_with_report(torch.ones(1, 256), inputs.T @ inputs / 400, TWO_FOUR).damp_used == 0.01


def test_damping_stays_where_it_was_asked_for_if_it_works() -> None:
    weight, hessian = problem(4, 32, seed=0)
    result = prune_with_report(weight, hessian, TWO_FOUR, damp=0.05)
    assert (result.damp, result.damp_used, result.damp_by, result.dead_columns) == (0.05, 0.05, "mean", 0)


@pytest.mark.parametrize(("damp_by", "unit"), [("mean", 26.0), ("median", 2.0)])
def test_damping_unit(damp_by: DampBy, unit: float) -> None:
    hessian = torch.diag(torch.tensor([1.0, 2.0, 2.0, 99.0]))
    hessian[0, 1] = hessian[1, 0] = 0.5
    weight = torch.tensor([[0.1, 1.0, 0.2, 1.0]])
    pruned, keep = prune_with_report(weight, hessian, TWO_FOUR, damp=0.1, damp_by=damp_by).weight, [False, True, False, True]
    # Column 0 is pruned; column 1 takes 0.1 * H_01 / (H_11 + damping) of it.
    assert (pruned != 0).tolist() == [keep]
    assert pruned[0, 1].item() == pytest.approx(1.0 + 0.1 * 0.5 / (2.0 + 0.1 * unit), rel=1e-5)


def test_dead_columns_are_pruned_first_and_disturb_nothing() -> None:
    weight, hessian = problem(6, 32, seed=2)
    dead = [1, 8, 9, 10]
    hessian[dead] = 0.0
    hessian[:, dead] = 0.0
    weight[:, dead] = 100.0
    result = prune_with_report(weight, hessian, TWO_FOUR)
    assert result.dead_columns == 4
    assert not result.keep[:, 1].any()
    # Three of the group 8..11 are dead: the live one stays, and of the dead the lowest, with its weight untouched.
    assert result.keep[:, 8:12].tolist() == [[True, False, False, True]] * 6
    assert bool((result.weight[:, 8] == 100.0).all())
    # The others come out as if the dead columns' weights had been anything else.
    other = weight.clone()
    other[:, dead] = -3.0
    alive = [column for column in range(32) if column not in dead]
    assert torch.equal(prune(other, hessian, TWO_FOUR)[0][:, alive], result.weight[:, alive])


@pytest.mark.parametrize("damp_by", ["mean", "median"])
def test_damping_unit_leaves_dead_columns_out(damp_by: DampBy) -> None:
    hessian = torch.diag(torch.tensor([4.0, 0.0, 4.0, 0.0]))
    hessian[0, 2] = hessian[2, 0] = 1.0
    pruned = prune_with_report(torch.tensor([[0.1, 5.0, 1.0, 5.0]]), hessian, Pattern(1, 4), damp=0.5, damp_by=damp_by).weight
    torch.testing.assert_close(pruned, torch.tensor([[0.0, 0.0, 1.0 + 0.1 * 1.0 / (4.0 + 0.5 * 4.0), 0.0]]))


def test_dtype_of_the_weight_is_kept_and_arguments_are_left_alone() -> None:
    weight, hessian = problem(4, 32, seed=1)
    weight = weight.bfloat16()
    before = weight.clone(), hessian.clone()
    pruned, keep = prune(weight, hessian, TWO_FOUR)
    assert pruned.dtype == torch.bfloat16 and keep.dtype == torch.bool
    assert torch.equal(weight, before[0]) and torch.equal(hessian, before[1])


def test_reduced_precision_products_are_switched_off_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    factor = torch.linalg.cholesky_ex

    def spy(matrix: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return factor(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", spy)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        prune(*problem(2, 8, seed=0), TWO_FOUR)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert seen == ["ieee"]


def bad_hessian(row: int, column: int, value: float) -> Tensor:
    hessian = torch.eye(4)
    hessian[row, column] = value
    return hessian


@pytest.mark.parametrize(
    ("weight", "hessian", "message"),
    [
        (torch.tensor([[float("nan"), 1.0, 2.0, 3.0]]), torch.eye(4), r"layer v: weight\[0, 0\] is nan"),
        (torch.ones(1, 4), bad_hessian(1, 3, float("inf")), r"layer v: hessian\[1, 3\] is inf"),
        (torch.ones(1, 4), bad_hessian(2, 2, -1.0), r"layer v: hessian\[2\].*negative"),
        (torch.ones(1, 4), torch.zeros(4, 4), "layer v: .*no token reached"),
        (torch.ones(1, 4), torch.eye(8), r"layer v: the Hessian has shape \[8, 8\], expected \[4, 4\]"),
        (torch.ones(1, 4), torch.eye(4) - 9.0 * (1 - torch.eye(4)), "layer v: .*no Cholesky factor"),
    ],
)
def test_bad_input_names_the_layer(weight: Tensor, hessian: Tensor, message: str) -> None:
    with pytest.raises(SdbenchError, match=message):
        prune_with_report(weight, hessian, TWO_FOUR, layer="v")


def test_a_compensated_weight_past_the_dtype_is_an_error() -> None:
    """Column 4 takes over column 0's weight and passes 65504, the largest fp16 number."""
    hessian = torch.eye(8)
    hessian[0, 4] = hessian[4, 0] = 0.99
    weight = torch.tensor([[5e4, 6e4, 6e4, 1.0, 5e4, 1.0, 1.0, 1.0]], dtype=torch.float16)
    with pytest.raises(SdbenchError, match=r"layer v: compensated weight\[0, 4\] is inf"):
        prune_with_report(weight, hessian, TWO_FOUR, damp=0.0, layer="v")


@pytest.mark.parametrize(("damp", "block"), [(-0.1, 128), (float("nan"), 128), (float("inf"), 128), (0.01, 0)])
def test_senseless_settings_are_refused(damp: float, block: int) -> None:
    with pytest.raises(UsageError, match=r"damp|block"):
        prune(torch.ones(1, 4), torch.eye(4), TWO_FOUR, damp=damp, block=block)


def test_case_6_width_is_refused() -> None:
    with pytest.raises(UsageError, match=r"in_features 10 .*M=4"):
        prune(torch.ones(1, 10), torch.eye(10), TWO_FOUR)
