"""What calibration data miss of the decode steps, and what pruning costs there: pure functions over statistics and weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sdbench.calibrate.numerics import full_float32
from sdbench.errors import SdbenchError


@dataclass(frozen=True, eq=False)
class Directions:
    """The strongest directions of a layer's decode inputs.

    Args:
        values: [k] float64, eigenvalues of the decode Hessian, largest first, all positive.
        vectors: [in, k] float64, their eigenvectors.
    """

    values: Tensor
    vectors: Tensor


def energy_ratio(decode_sum_sq: Tensor, prefill_sum_sq: Tensor) -> Tensor:
    """Energy of each input column in decode steps over that in the prefill.

    Args:
        decode_sum_sq: [in] float32, squares summed over decode rows and divided by their number.
        prefill_sum_sq: The same over the prompt's rows.

    Returns:
        [in]; 1 where neither phase touches a column, Inf where only decode steps do.
    """
    return torch.where((decode_sum_sq == 0) & (prefill_sum_sq == 0), 1.0, decode_sum_sq / prefill_sum_sq)


def top_directions(hessian: Tensor, k: int) -> Directions:
    """The k largest eigenvalues of a Hessian with their eigenvectors; fewer where its rank, as far as float32 can tell, is lower.

    Args:
        hessian: [in, in] float32, ``X^T X`` by any positive factor.
        k: Directions asked for.

    Raises:
        SdbenchError: The Hessian is zero.
    """
    values, vectors = torch.linalg.eigh(hessian.double())
    values, vectors = values.flip(0)[:k], vectors.flip(1)[:, :k]
    # The sums were float32: eigenvalues below its rounding of the largest are noise, and dividing by their roots would blow it up.
    found = int((values > values[0] * len(hessian) * torch.finfo(torch.float32).eps).sum()) if values[0] > 0 else 0
    if not found:
        raise SdbenchError("the decode Hessian is zero: no decode step reached the layer")
    return Directions(values[:found], vectors[:, :found])


def discrepancy(directions: Directions, hessian: Tensor) -> float:
    """How far a calibration Hessian is from the decode one along its strongest directions.

    ``||L^-1/2 U^T H_c U L^-1/2 - I||_2`` with U, L the top eigenpairs of the decode Hessian, as in theorem A.1 of SparseDecoding
    (arXiv 2610.12327): 0 if the calibration data excite those directions as decode steps do, 1 if they miss one of them, large if they
    excite one far more.

    Args:
        directions: Of the decode Hessian, normalised by rows.
        hessian: [in, in] float32, the calibration Hessian, normalised by its rows.
    """
    scaled = directions.vectors / directions.values.sqrt()
    relative = scaled.T @ hessian.double() @ scaled
    return float(torch.linalg.eigvalsh(relative - torch.eye(len(relative), dtype=relative.dtype, device=relative.device)).abs().max())


def reconstruction_error(weight: Tensor, pruned: Tensor, hessian: Tensor) -> float:
    """Relative error of a pruned layer's outputs, ``||X W'^T - X W^T||_F / ||X W^T||_F``, from the inputs' Hessian alone.

    Args:
        weight: [out, in], floating point; computed in float32.
        pruned: [out, in].
        hessian: [in, in] float32, ``X^T X`` of inputs that the pruning has not seen, by any positive factor.

    Returns:
        The error; Inf for a layer whose outputs are all 0.
    """

    def energy(matrix: Tensor) -> float:
        with full_float32():
            # tr(M H M^T); rounding may put a sum that should be 0 below it.
            return max(float(((matrix @ hessian) * matrix).sum(dtype=torch.float64)), 0.0)

    whole = energy(weight.float())
    return (energy(pruned.float() - weight.float()) / whole) ** 0.5 if whole else float("inf")
