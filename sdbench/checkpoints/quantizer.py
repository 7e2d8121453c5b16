"""The format as transformers knows it: what makes ``AutoModelForCausalLM.from_pretrained`` read packed checkpoints."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from sdbench.checkpoints.layout import GUARD, PARTS, QUANT_METHOD, quantization_config, read_quantization_config
from sdbench.errors import CheckFailed, SdbenchError

log = logging.getLogger("sdbench")


@register_quantization_config(QUANT_METHOD)
class PackedConfig(QuantizationConfigMixin):
    """``quantization_config`` of a packed checkpoint.

    Args:
        entry: Its fields, as `quantization_config` makes them.
    """

    quant_method: Any

    def __init__(self, **entry: Any):
        self.quant_method = QUANT_METHOD
        self.pattern, self.layers = read_quantization_config(entry)

    def to_dict(self) -> dict[str, Any]:
        """The fields as ``config.json`` holds them."""
        return quantization_config(self.pattern, self.layers)


@register_quantizer(QUANT_METHOD)
class PackedQuantizer(HfQuantizer):
    """Puts modules for the packed layers into the empty model, and packs what the loader has filled them with."""

    quantization_config: PackedConfig
    requires_calibration = True
    folder: Path | None = None
    """Where the checkpoint lies, once its weights are being loaded."""

    def is_serializable(self, *arguments: Any, **keywords: Any) -> bool:
        """False: the packed weights lie outside of the state that ``save_pretrained`` would write; its error refers to the warning."""
        log.warning(
            "save_pretrained cannot write a packed model, whose weights lie outside of its state: copy the folder %s instead, or prune "
            "again with 'sdbench prune --format dense' for an ordinary checkpoint",
            self.folder or "that the checkpoint was loaded from",
        )
        return False

    @property
    def is_trainable(self) -> bool:
        """False: there is no gradient through the SpMV."""
        return False

    @property
    def is_compileable(self) -> bool:
        """True: see `sdbench.checkpoints.linear.CheckpointLinear`."""
        return True

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **keywords: Any
    ) -> nn.Module:
        # Here and not above: transformers alone should not bring in Triton.
        from sdbench.checkpoints.linear import StoredLinear

        layers = self.quantization_config.layers
        if checkpoint_files:
            self.folder = Path(checkpoint_files[0]).parent
            _require_tensors(layers, checkpoint_files)
        for name in layers:
            parent, _, child = name.rpartition(".")
            try:
                linear = model.get_submodule(name)
            except AttributeError:
                linear = None
            if not isinstance(linear, nn.Linear):
                raise SdbenchError(f"layer {name}: packed in the checkpoint, but {type(model).__name__} has no such linear")
            setattr(model.get_submodule(parent), child, StoredLinear(linear, self.quantization_config.pattern))
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **keywords: Any) -> nn.Module:
        for name in self.quantization_config.layers:
            parent, _, child = name.rpartition(".")
            stored: Any = model.get_submodule(name)
            setattr(model.get_submodule(parent), child, stored.packed(name))
        return model


def _require_tensors(layers: Sequence[str], checkpoint_files: Sequence[str]) -> None:
    """A missing tensor would come out as whatever was in memory: transformers does no more than warn."""
    there: set[str] = set()
    for path in checkpoint_files:
        with safe_open(path, "pt") as file:
            there |= set(file.keys())
    for name in layers:
        for part in (*PARTS, GUARD):
            if f"{name}.{part}" not in there:
                raise CheckFailed(f"tensor {name}.{part} is missing from {Path(checkpoint_files[0]).parent}")
