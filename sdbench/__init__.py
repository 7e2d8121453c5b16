"""sdbench: do N:M pruned weights pay at decode time, on your own GPU and model?

Importing this package stays light: torch and transformers load only with the parts that need them. It tells transformers, whenever that
is imported, how to read packed checkpoints.
"""

from typing import TYPE_CHECKING, Any

from sdbench.checkpoints.registration import register

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__version__ = "0.1.0"

register()


def load(
    path: "str | Path", *, revision: str | None = None, device: "str | torch.device" = "auto", dtype: "torch.dtype | None" = None
) -> Any:
    """Loads a packed checkpoint as a transformers model whose pruned linears run through the SpMV.

    Args:
        path: Folder or hub id of a packed checkpoint, or of an old compressed-tensors one (``sparse-24-bitmask``, ``sparse-bitmask``).
        revision: Revision of a hub id.
        device: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: Dtype of the weights; None for the checkpoint's own.

    Returns:
        The causal language model in eval mode.

    Raises:
        SdbenchError: Not such a checkpoint, or a damaged one; says what is wrong and where.
    """
    from sdbench.checkpoints.load import load

    return load(path, revision=revision, device=device, dtype=dtype)
