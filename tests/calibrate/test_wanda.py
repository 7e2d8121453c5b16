import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdbench.calibrate import mask, wanda
from sdbench.errors import SdbenchError, UsageError
from sdbench.pattern import GROUPS, Pattern

TWO_FOUR = Pattern(2, 4)


def kept(keep: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in keep]


def best_by_sorting(score: Tensor, pattern: Pattern) -> Tensor:
    """The definition, one group at a time: by score from the top, then by column."""
    keep = torch.zeros_like(score, dtype=torch.bool)
    for row, values in enumerate(score.tolist()):
        for start in range(0, len(values), pattern.group):
            ranked = sorted(range(start, start + pattern.group), key=lambda column: (-values[column], column))
            keep[row, ranked[: pattern.keep]] = True
    return keep


def test_case_13_score_uses_the_norm_not_its_square() -> None:
    weight = torch.tensor([[3.0, 2.0, 1.5, 0.4]])
    # Scores 3, 2, 1.5, 1.6; the squared norm would make the last one 6.4.
    assert kept(wanda.keep_mask(weight, torch.tensor([1.0, 1.0, 1.0, 16.0]), TWO_FOUR)) == [[0, 1]]


def test_score_is_the_product() -> None:
    weight = torch.tensor([[3.0, -2.0, 1.5, 0.9], [0.1, 0.2, -5.0, 4.0]])
    # Scores: 3, 4, 1.5, 3.6 and 0.1, 0.4, 5, 16.
    assert kept(wanda.keep_mask(weight, torch.tensor([1.0, 4.0, 1.0, 16.0]), TWO_FOUR)) == [[1, 3], [2, 3]]


def test_case_6_equal_weights_keep_the_lower_columns() -> None:
    assert kept(wanda.keep_mask(torch.full((1, 8), -0.5), torch.ones(8), TWO_FOUR)) == [[0, 1, 4, 5]]


@pytest.mark.parametrize("width", [10, 9])
def test_case_6_width_not_a_multiple_is_refused(width: int) -> None:
    with pytest.raises(UsageError, match=rf"model\.mlp.*in_features {width} .*M=4"):
        wanda.keep_mask(torch.ones(2, width), torch.ones(width), TWO_FOUR, "model.mlp")


def test_zero_weights_and_silent_columns_still_keep_exactly_n() -> None:
    keep = wanda.keep_mask(torch.zeros(3, 32), torch.zeros(32), Pattern(16, 32))
    assert kept(keep) == [list(range(16))] * 3


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(GROUPS), st.data())
def test_mask_equals_the_definition_with_many_ties(group: int, data: st.DataObject) -> None:
    pattern = Pattern(data.draw(st.integers(1, group - 1)), group)
    rows, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    values = data.draw(st.lists(st.integers(-2, 2), min_size=rows * groups * group, max_size=rows * groups * group))
    weight = torch.tensor(values, dtype=torch.float32).view(rows, -1)
    sum_sq = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 1.0, 4.0]), min_size=groups * group, max_size=groups * group)))
    keep = wanda.keep_mask(weight, sum_sq, pattern)
    assert torch.equal(keep, best_by_sorting(weight.abs() * sum_sq.sqrt(), pattern))
    assert bool((keep.view(rows, groups, group).sum(-1) == pattern.keep).all())


def test_rows_are_cut_into_chunks_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    score = torch.randint(0, 4, (7, 64), generator=torch.Generator().manual_seed(0)).float()
    expected = best_by_sorting(score, Pattern(8, 16))
    for chunk in (1, 130, 64 * 7):
        monkeypatch.setattr(mask, "CHUNK", chunk)
        assert torch.equal(mask.best_of_groups(score, Pattern(8, 16)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", [TWO_FOUR, Pattern(16, 32)], ids=str)
def test_mask_of_a_large_matrix_is_the_same_on_the_gpu(pattern: Pattern) -> None:
    """Qwen3-4B's gate and up in bf16, whose few distinct values tie all the time."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(19456, 2560, generator=generator) / 16).bfloat16()
    sum_sq = torch.randint(0, 4, (2560,), generator=generator).float()
    assert torch.equal(wanda.keep_mask(weight.cuda(), sum_sq.cuda(), pattern).cpu(), wanda.keep_mask(weight, sum_sq, pattern))


def test_score_is_float32_whatever_the_weight_is() -> None:
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    # 1.001 and 1.002 are equal in bf16.
    assert kept(wanda.keep_mask(weight, torch.tensor([1.0, 1.001, 1.002, 1.0]), TWO_FOUR)) == [[1, 2]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_case_12_bad_weight_names_layer_and_index(bad: float) -> None:
    weight = torch.ones(3, 4)
    weight[1, 2] = bad
    with pytest.raises(SdbenchError, match=r"layer model\.layers\.0\.q_proj: weight\[1, 2\] is -?(nan|inf)"):
        wanda.keep_mask(weight, torch.ones(4), TWO_FOUR, "model.layers.0.q_proj")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_statistic_names_layer_and_index(bad: float) -> None:
    with pytest.raises(SdbenchError, match=r"layer up: sum_sq\[3\] is (nan|inf)"):
        wanda.keep_mask(torch.ones(1, 4), torch.tensor([1.0, 1.0, 1.0, bad]), TWO_FOUR, "up")


@pytest.mark.parametrize(
    ("weight", "sum_sq", "message"),
    [
        (torch.ones(1, 4), torch.tensor([1.0, -1.0, 1.0, 1.0]), r"sum_sq\[1\] is negative"),
        (torch.ones(1, 4), torch.ones(8), r"sum_sq has shape \[8\], expected \[4\]"),
        (torch.ones(4), torch.ones(4), r"shape \[4\], expected a floating-point \[out, in\] matrix"),
        (torch.ones(1, 4, dtype=torch.int8), torch.ones(4), r"torch\.int8"),
    ],
)
def test_what_does_not_fit_is_refused(weight: Tensor, sum_sq: Tensor, message: str) -> None:
    with pytest.raises(SdbenchError, match=message):
        wanda.keep_mask(weight, sum_sq, TWO_FOUR)


def test_arguments_are_left_alone() -> None:
    weight, sum_sq = torch.randn(4, 8), torch.rand(8)
    before = weight.clone(), sum_sq.clone()
    wanda.keep_mask(weight, sum_sq, TWO_FOUR)
    assert torch.equal(weight, before[0]) and torch.equal(sum_sq, before[1])
