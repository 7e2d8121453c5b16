"""Old compressed-tensors checkpoints of sparse weights, written here by hand after the layout that DESIGN section 3 gives."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import sdbench
from sdbench.calibrate.magnitude import keep_mask
from sdbench.calibrate.select import select_linears
from sdbench.checkpoint_files import CheckpointFiles
from sdbench.checkpoints.bitmask import fill_up, fits, pattern_of
from sdbench.checkpoints.verify import verify
from sdbench.engine.packed_linear import PackedLinear
from sdbench.errors import CheckFailed, SdbenchError
from sdbench.pattern import Pattern
from sdbench.progress import Progress

IDS = torch.tensor([[1, 5, 9, 7]])
TWO_FOUR = Pattern(2, 4)
OLD = Callable[..., tuple[Path, dict[str, Tensor]]]


@pytest.fixture
def old(tmp_path: Path, tiny_qwen3: PreTrainedModel) -> OLD:
    """Prunes the tiny model to 2:4 in place and writes it in one of the old formats; returns the folder and the keep masks."""

    def call(form: str, spelling: str = "{name}", everything: bool = False, **entry: Any) -> tuple[Path, dict[str, Tensor]]:
        folder, keep = tmp_path / form, {}
        for name, linear in select_linears(tiny_qwen3).items():
            keep[name] = keep_mask(linear.weight, TWO_FOUR)
            linear.weight.data.masked_fill_(~keep[name], 0.0)
            if form == "sparse-24-bitmask":
                # A kept value of 0: the bitmask marks it, and only the bitmask tells it from a pruned one.
                linear.weight.data[0, int(keep[name][0].nonzero()[0])] = 0.0
        tiny_qwen3.save_pretrained(folder)
        tensors = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            module = name.removesuffix(".weight")
            if module not in keep and not everything:
                tensors[name] = tensor
                continue
            mask = keep[module] if form == "sparse-24-bitmask" else tensor != 0
            stem = spelling.format(name=module)
            values, bits = tensor.numpy()[mask.numpy()], np.packbits(mask.numpy(), axis=-1, bitorder="little")
            tensors[f"{stem}.bitmask"] = torch.from_numpy(bits)
            if form == "sparse-24-bitmask":
                tensors[f"{stem}.compressed"] = torch.from_numpy(values.reshape(len(mask), -1))
                tensors[f"{stem}.shape"] = torch.tensor([[n] for n in mask.shape])
            else:
                counts = mask.sum(-1)
                tensors[f"{stem}.compressed"] = torch.from_numpy(values)
                tensors[f"{stem}.shape"] = torch.tensor(mask.shape)
                tensors[f"{stem}.row_offsets"] = counts.cumsum(0) - counts if counts.ndim else torch.zeros(1, dtype=torch.int64)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        sparsity = {"format": form, "sparsity_structure": "2:4", "targets": ["Linear"], "ignore": ["lm_head"], "global_sparsity": 0.4}
        config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": sparsity} | entry
        (folder / "config.json").write_text(json.dumps(config))
        return folder, keep

    return call


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("form", ["sparse-24-bitmask", "sparse-bitmask"])
@pytest.mark.parametrize("spelling", ["{name}", "{name}.weight"])
def test_an_old_2_4_model_runs_again(form, spelling, old, tiny_qwen3):
    folder, keep = old(form, spelling)
    model = sdbench.load(folder, device="cpu")
    packed = {name: module.packed for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert packed.keys() == keep.keys()
    for name, weight in packed.items():
        assert weight.pattern == TWO_FOUR
        assert torch.equal(weight.unpack(), tiny_qwen3.get_submodule(name).weight)
        assert form == "sparse-bitmask" or torch.equal(weight.keep(), keep[name])
    assert torch.equal(logits(model), logits(tiny_qwen3))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == [2, 3]


@pytest.mark.parametrize("form", ["sparse-24-bitmask", "sparse-bitmask"])
def test_verify_reads_them_too(form, old, edit):
    folder, keep = old(form)
    found = verify(CheckpointFiles.open(folder), None, Progress(Console(quiet=True)))
    assert (found.kind, found.pattern, found.failures) == (form, TWO_FOUR, [])
    assert [layer.name for layer in found.layers if layer.pruned] == list(keep)
    name = "model.layers.1.mlp.up_proj"
    values = load_file(folder / "model.safetensors")[f"{name}.compressed"]
    values.view(-1)[7] = float("nan")
    edit(folder, {f"{name}.compressed": values})
    (failure,) = verify(CheckpointFiles.open(folder), None, Progress(Console(quiet=True))).failures
    assert (failure.tensor, failure.check, failure.index) == (f"{name}.compressed", "values", (0, 7) if "24" in form else (7,))


def test_early_files_compress_every_weight_and_what_is_not_2_4_stays_dense(old, tiny_qwen3, caplog):
    folder, keep = old("sparse-bitmask", "{name}.weight", everything=True)
    assert "model.norm.weight.bitmask" in load_file(folder / "model.safetensors")
    model = sdbench.load(folder, device="cpu")
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == len(keep) == 14
    assert torch.equal(logits(model), logits(tiny_qwen3))
    assert "10 layers hold no 2:4 pattern and stay dense, model.embed_tokens the first" in caplog.text


def test_the_config_entry_under_its_first_name(old, tiny_qwen3):
    folder, _ = old("sparse-bitmask")
    config = json.loads((folder / "config.json").read_text())
    config["compression_config"] = {"sparsity_config": config.pop("quantization_config")["sparsity_config"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(sdbench.load(folder, device="cpu")), logits(tiny_qwen3))


def test_a_layer_of_24_bitmask_that_is_not_2_4(old, edit):
    folder, _ = old("sparse-24-bitmask")
    name = "model.layers.0.mlp.down_proj"
    mask = load_file(folder / "model.safetensors")[f"{name}.bitmask"]
    # 3 + 5 columns instead of 4 + 4: as many values as before.
    mask[2, 0], mask[2, 1] = 0b00000111, 0b00011111
    edit(folder, {f"{name}.bitmask": mask})
    with pytest.raises(CheckFailed, match=f"layer {name}: row 2, columns 0 to 3 keep 3 weights"):
        sdbench.load(folder, device="cpu")


def test_values_that_do_not_fit_the_mask(old, edit):
    folder, _ = old("sparse-bitmask")
    name = "model.layers.0.mlp.down_proj.compressed"
    values = load_file(folder / "model.safetensors")[name]
    edit(folder, {name: values[:-1].clone()})
    with pytest.raises(CheckFailed, match=rf"{name} has {len(values) - 1} values, but .*bitmask marks {len(values)}"):
        sdbench.load(folder, device="cpu")


def test_quantised_sparse_weights_are_refused(old):
    folder, _ = old("sparse-24-bitmask", config_groups={"group_0": {"weights": {"num_bits": 8}}})
    with pytest.raises(SdbenchError, match="only unquantised ones can be read"):
        sdbench.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("structure", "pattern"), [("2:4", "2:4"), ("1:4", "3:4"), ("6:8", "2:8"), ("unstructured", "2:4"), ("0:0", "2:4"), (None, "2:4")]
)
def test_there_the_pattern_counts_zeros(structure, pattern):
    config = {"quantization_config": {"sparsity_config": {"format": "sparse-bitmask", "sparsity_structure": structure}}}
    assert pattern_of(config) == Pattern.parse(pattern)


def test_a_mask_with_fewer_columns_is_filled_up_from_the_left():
    keep = torch.tensor([[0, 0, 0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 1, 0, 1]]).bool()
    assert fill_up(keep, TWO_FOUR).int().tolist() == [[1, 0, 0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 1, 0, 1]]
    assert fits(keep, TWO_FOUR)
    assert not fits(keep, Pattern(1, 8))
    assert not fits(keep[:, :6], TWO_FOUR)
