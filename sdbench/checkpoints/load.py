"""``sdbench.load``: a packed checkpoint, ours or an old compressed-tensors one, as a transformers model."""

from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig

from sdbench.checkpoint_files import CheckpointFiles
from sdbench.checkpoints import bitmask
from sdbench.checkpoints.layout import QUANT_METHOD, quantization_config
from sdbench.devices import resolve_device
from sdbench.errors import CheckFailed, UsageError
from sdbench.models import locate_model, resolve_model
from sdbench.words import counted


def load(path: str | Path, *, revision: str | None = None, device: str | torch.device = "auto", dtype: torch.dtype | None = None) -> Any:
    """Loads a packed checkpoint; see :func:`sdbench.load`."""
    target = resolve_device(str(device))
    folder, _ = locate_model(resolve_model(str(path), revision, target), tell=lambda line: None)
    files = CheckpointFiles.open(folder)
    loaded: Any
    options: dict[str, Any] = {"dtype": dtype or "auto", "device_map": target, "output_loading_info": True}
    method = files.config.get("quantization_config", {}).get("quant_method")
    if method == QUANT_METHOD:
        loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options)
    elif bitmask.format_of(files.config):
        loaded = _load_bitmask(files, options)
    else:
        what = f"quantised by {method}" if method else "dense"
        raise UsageError(f"{folder} is {what}, not a packed checkpoint; 'sdbench prune' makes one, and transformers loads dense ones")
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise CheckFailed(f"{folder}: tensor {missing[0]} is missing ({counted(len(missing), 'such tensor')})")
    return model.eval()


def _load_bitmask(files: CheckpointFiles, options: dict[str, Any]) -> tuple[Any, Any]:
    """An old checkpoint, read into our storage form layer by layer."""
    config = AutoConfig.from_pretrained(files.folder, trust_remote_code=False)
    pattern, layers, state = bitmask.read(files)
    config.quantization_config = quantization_config(pattern, layers)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded = model_class.from_pretrained(None, config=config, state_dict=state, **options)
    if (files.folder / "generation_config.json").is_file():
        loaded[0].generation_config = GenerationConfig.from_pretrained(files.folder)
    return loaded
