import math

import pytest
import torch

from sdbench.calibrate.diagnostics import discrepancy, energy_ratio, reconstruction_error, top_directions
from sdbench.errors import SdbenchError


def diagonal(*values: float) -> torch.Tensor:
    return torch.diag(torch.tensor(values))


def test_energy_ratio() -> None:
    ratio = energy_ratio(torch.tensor([4.0, 1.0, 0.0, 2.0, 0.0]), torch.tensor([2.0, 4.0, 3.0, 0.0, 0.0]))
    assert ratio.tolist() == [2.0, 0.25, 0.0, math.inf, 1.0]


@pytest.mark.parametrize(
    ("calibration", "k", "expected"),
    [
        ((4.0, 1.0), 2, 0.0),
        ((8.0, 1.0), 2, 1.0),  # twice the energy in the first direction
        ((4.0, 3.0), 1, 0.0),  # the second is not among the top 1
        ((4.0, 3.0), 2, 2.0),
        ((0.0, 1.0), 2, 1.0),  # missed
        ((2.0, 1.5), 2, 0.5),
    ],
)
def test_discrepancy_by_hand(calibration: tuple[float, ...], k: int, expected: float) -> None:
    assert discrepancy(top_directions(diagonal(4.0, 1.0), k), diagonal(*calibration)) == pytest.approx(expected, abs=1e-6)


def test_discrepancy_sees_correlations() -> None:
    assert discrepancy(top_directions(torch.eye(2), 2), torch.tensor([[1.0, 0.5], [0.5, 1.0]])) == pytest.approx(0.5)
    # H_d = Q diag(4, 1) Q^T, H_c = Q diag(4, 2) Q^T for a rotation by 45 degrees.
    turn = torch.tensor([[1.0, -1.0], [1.0, 1.0]]) / 2**0.5
    decode, calibration = turn @ diagonal(4.0, 1.0) @ turn.T, turn @ diagonal(4.0, 2.0) @ turn.T
    assert discrepancy(top_directions(decode, 2), calibration) == pytest.approx(1.0, abs=1e-5)
    assert discrepancy(top_directions(decode, 1), calibration) == pytest.approx(0.0, abs=1e-5)


def test_directions_stop_at_the_rank() -> None:
    inputs = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    hessian = inputs.T @ inputs / 3
    found = top_directions(hessian, 8)
    assert found.values.shape == (3,) and found.vectors.shape == (16, 3)
    torch.testing.assert_close((found.vectors * found.values) @ found.vectors.T, hessian.double(), atol=1e-5, rtol=1e-5)
    assert discrepancy(found, hessian) < 1e-4
    with pytest.raises(SdbenchError, match="no decode step reached the layer"):
        top_directions(torch.zeros(4, 4), 2)


def test_reconstruction_error_by_hand() -> None:
    # Outputs 1 * x0 + 2 * x1 with energies 1 and 4: 16 of 17 are lost.
    weight, pruned = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0]])
    assert reconstruction_error(weight, pruned, diagonal(1.0, 4.0)) == pytest.approx((16 / 17) ** 0.5)
    assert reconstruction_error(weight, weight, diagonal(1.0, 4.0)) == 0.0
    assert reconstruction_error(weight, weight * 0, torch.ones(2, 2)) == 1.0
    assert reconstruction_error(weight * 0, weight, torch.ones(2, 2)) == math.inf


def test_reconstruction_error_is_that_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs, weight = torch.randn(40, 8, generator=generator), torch.randn(5, 8, generator=generator)
    pruned = weight * (torch.rand(5, 8, generator=generator) > 0.5)
    expected = float((inputs @ (pruned - weight).T).norm() / (inputs @ weight.T).norm())
    assert reconstruction_error(weight, pruned, inputs.T @ inputs / 40) == pytest.approx(expected, rel=1e-4)
    assert reconstruction_error(weight.bfloat16(), weight.bfloat16(), inputs.T @ inputs) == 0.0
