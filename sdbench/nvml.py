"""What NVIDIA's management library says about a GPU, or why it says nothing."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def ask(uuid: str, question: Callable[[Any, Any], T]) -> tuple[T | None, str | None]:
    """An answer and None, or None and the reason.

    Args:
        uuid: The GPU's, as torch has it: torch and NVML number GPUs differently.
        question: Takes the library and the GPU's handle.
    """
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed (extra: gpu)"
    try:
        pynvml.nvmlInit()
        return question(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")), None
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
