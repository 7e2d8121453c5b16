import pytest
import torch

from sdbench.calibrate.magnitude import keep_mask
from sdbench.errors import SdbenchError, UsageError
from sdbench.pattern import Pattern


def test_largest_absolute_values_stay_and_ties_go_to_the_lower_column() -> None:
    weight = torch.tensor([[3.0, -4.0, 1.5, 0.4, 1.0, -1.0, 1.0, 1.0]])
    assert keep_mask(weight, Pattern(2, 4)).nonzero()[:, 1].tolist() == [0, 1, 4, 5]


def test_case_6_width_is_refused() -> None:
    with pytest.raises(UsageError, match=r"layer gate: in_features 10 .*M=4"):
        keep_mask(torch.ones(1, 10), Pattern(2, 4), "gate")


def test_case_12_nan_names_layer_and_index() -> None:
    with pytest.raises(SdbenchError, match=r"layer gate: weight\[0, 0\] is nan"):
        keep_mask(torch.tensor([[float("nan"), 1.0, 2.0, 3.0]]), Pattern(2, 4), "gate")
