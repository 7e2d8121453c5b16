"""The fused decode step of models built like Qwen3, Qwen2, Llama and Mistral; dense and pruned weights run between the same kernels."""

from sdbench.engine.fused.decoder import FusedDecoder
from sdbench.engine.fused.plan import Unfusable

__all__ = ["FusedDecoder", "Unfusable"]
