"""Small pruned checkpoints to read, check and spoil."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from sdbench.calibrate.magnitude import keep_mask
from sdbench.calibrate.select import select_linears
from sdbench.checkpoints.provenance import Calibration, Layer, Origin, Provenance, Source, state_sha256
from sdbench.checkpoints.write import write_checkpoint
from sdbench.demo import MODEL_DIR
from sdbench.packing import StoredWeight, pack
from sdbench.pattern import Pattern
from sdbench.streaming import unique_state


@dataclass
class Written:
    """A checkpoint on disk, and what must come back from it."""

    folder: Path
    pattern: Pattern
    weights: dict[str, Tensor]
    keep: dict[str, Tensor]
    provenance: Provenance
    model: PreTrainedModel
    origin: Origin

    def pruned_model(self) -> PreTrainedModel:
        """The dense model with the pruned weights in it."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                self.model.get_submodule(name).weight.copy_(weight)
        return self.model


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Written]:
    """Prunes a model by magnitude and writes it."""

    def call(model: PreTrainedModel, pattern: str = "2:4", name: str = "pruned", **options: Any) -> Written:
        rule, layers = Pattern.parse(pattern), select_linears(model)
        keep = {layer: keep_mask(linear.weight, rule) for layer, linear in layers.items()}
        for layer, linear in layers.items():
            # A kept weight may be 0: it must come back as kept.
            row, column = (int(n) for n in keep[layer].nonzero()[0])
            linear.weight.data[row, column] = 0.0
        weights = {layer: linear.weight.detach().masked_fill(~keep[layer], 0.0) for layer, linear in layers.items()}

        def load(layer: str) -> StoredWeight:
            return pack(weights[layer], keep[layer], rule).to_stored()

        origin = Origin(
            method="magnitude",
            pattern=pattern,
            seed=0,
            source=Source(model="tiny", kind="folder", revision=None, dtype="float32", sha256=state_sha256([unique_state(model)])),
            calibration=Calibration(source=None, examples=[], rows=None, report={}, arguments={}),
            layers={layer: Layer(shape=tuple(linear.weight.shape), report={}) for layer, linear in layers.items()},
        )
        tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
        folder = tmp_path / name
        provenance = write_checkpoint(folder, model, tokenizer, origin, load, **options)
        return Written(folder, rule, weights, keep, provenance, model, origin)

    return call


@pytest.fixture
def edit() -> Callable[..., None]:
    """Changes the tensors of a one-file checkpoint: ``edit(folder, {name: tensor or None to leave it out})``."""

    def call(folder: Path, changes: dict[str, Tensor | None]) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file) | changes
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, metadata={"format": "pt"})

    return call
