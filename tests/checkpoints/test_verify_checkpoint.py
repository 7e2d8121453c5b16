"""What `verify` finds: nothing in what we write, and each planted fault by tensor and index."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from sdbench.checkpoint_files import CheckpointFiles
from sdbench.checkpoints.provenance import PROVENANCE_FILE, file_sha256, read_provenance
from sdbench.checkpoints.verify import Findings, verify
from sdbench.errors import CheckFailed, SdbenchError, UsageError
from sdbench.pattern import Pattern
from sdbench.progress import Progress

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
TWO_FOUR = Pattern(2, 4)


def find(folder: Path, pattern: Pattern | None = None) -> Findings:
    return verify(CheckpointFiles.open(folder), pattern, Progress(Console(quiet=True)))


def failures(
    folder: Path, pattern: Pattern | None = None, ignore: tuple[str, ...] = ("hash",)
) -> list[tuple[str, str, tuple[int, ...] | None]]:
    return [(failure.tensor, failure.check, failure.index) for failure in find(folder, pattern).failures if failure.check not in ignore]


def spoil(folder: Path, edit: Callable[..., None], change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    edit(folder, {name: tensor for name, tensor in tensors.items() if not torch.equal(tensor, before[name])})


class TestWhole:
    @pytest.mark.parametrize("kind", ["packed", "dense"])
    @pytest.mark.parametrize("pattern", ["2:4", "3:8", "16:32"])
    def test_what_we_write_is_right(self, kind, pattern, write, tiny_qwen3):
        written = write(tiny_qwen3, pattern, kind=kind)
        found = find(written.folder)
        assert found.failures == []
        assert (found.kind, found.pattern, found.provenance) == (kind, Pattern.parse(pattern), written.provenance)
        assert [layer.name for layer in found.layers] == list(written.weights)
        assert all(layer.pruned and set(layer.checks.values()) == {"ok"} and len(layer.checks) == 5 for layer in found.layers)

    def test_a_dense_checkpoint_of_unknown_origin_needs_a_pattern(self, write, tiny_llama):
        folder = write(tiny_llama, kind="dense").folder
        (folder / PROVENANCE_FILE).unlink()
        with pytest.raises(UsageError, match="say which pattern it should hold, such as --pattern 2:4"):
            find(folder)
        found = find(folder, TWO_FOUR)
        assert found.failures == [] and all(layer.pruned and "hash" not in layer.checks for layer in found.layers)
        assert {check for _, check, _ in failures(folder, Pattern(1, 4))} == {"exact"}

    def test_layers_that_were_left_out_are_no_failure(self, write, edit, tiny_llama):
        written = write(tiny_llama, kind="dense")
        (written.folder / PROVENANCE_FILE).unlink()
        edit(written.folder, {f"{UP}.weight": torch.randn(128, 64)})
        found = find(written.folder, TWO_FOUR)
        assert found.failures == []
        assert [layer.name for layer in found.layers if not layer.pruned] == [UP]

    def test_a_dense_model_holds_no_pattern(self, tiny_llama, tmp_path):
        tiny_llama.save_pretrained(tmp_path / "dense")
        found = find(tmp_path / "dense", TWO_FOUR)
        assert [str(failure) for failure in found.failures] == ["config.json: no layer holds the pattern 2:4"]


class TestPlanted:
    @pytest.mark.parametrize("kept", [False, True])
    def test_a_flipped_mask_bit(self, kept, write, edit, tiny_qwen3):
        written = write(tiny_qwen3)
        column = int((written.keep[UP][5, 12:16] == kept).nonzero()[0]) + 12

        def change(tensors: dict[str, Tensor]) -> None:
            tensors[f"{UP}.bitmask"][5, column // 8] ^= 1 << column % 8

        spoil(written.folder, edit, change)
        assert failures(written.folder) == [(f"{UP}.bitmask", "exact", (5, 12)), (f"{UP}.compressed", "values", None)]
        (finding,) = (layer for layer in find(written.folder).layers if "FAILED" in layer.checks.values())
        assert finding.name == UP
        assert finding.checks == {"shape": "ok", "axis": "ok", "exact": "FAILED", "values": "FAILED", "hash": "FAILED"}

    def test_a_nonzero_outside_the_mask_of_a_dense_export(self, write, edit, tiny_qwen3):
        written = write(tiny_qwen3, kind="dense")
        row, column = (int(n) for n in (~written.keep[DOWN]).nonzero()[40])

        def change(tensors: dict[str, Tensor]) -> None:
            tensors[f"{DOWN}.weight"][row, column] = 1e-30

        spoil(written.folder, edit, change)
        assert failures(written.folder) == [(f"{DOWN}.weight", "exact", (row, column - column % 4))]

    @pytest.mark.parametrize("kind", ["packed", "dense"])
    def test_a_transposed_2_4_is_called_that(self, kind, write, edit, tiny_qwen3):
        """Groups of 4 along out_features: rows 0 and 1 of four keep columns 0-3 of eight, rows 2 and 3 the others."""
        written = write(tiny_qwen3, kind=kind)
        keep = ((torch.arange(64)[:, None] % 4 < 2) == (torch.arange(128) % 8 < 4)).contiguous()
        if kind == "dense":
            edit(written.folder, {f"{DOWN}.weight": torch.ones(64, 128) * keep})
            tensor = f"{DOWN}.weight"
        else:
            bits = (keep.view(64, 16, 8).long() << torch.arange(8)).sum(-1).to(torch.uint8)
            edit(written.folder, {f"{DOWN}.bitmask": bits, f"{DOWN}.compressed": torch.ones(64, 64)})
            tensor = f"{DOWN}.bitmask"
        (failure,) = (failure for failure in find(written.folder).failures if failure.check != "hash")
        assert (failure.tensor, failure.check) == (tensor, "axis")
        assert failure.message == "is transposed: its 2:4 groups run along out_features instead of in_features"
        (finding,) = (layer for layer in find(written.folder).layers if layer.name == DOWN)
        assert finding.checks["axis"] == "FAILED" and "exact" not in finding.checks

    def test_padding_bits(self, write, edit, tiny_llama):
        """Width 12 at 2:4: the second byte holds columns 8 to 11, its upper half nothing."""
        folder = narrow(write, tiny_llama)
        assert failures(folder) == []

        def change(tensors: dict[str, Tensor]) -> None:
            tensors[f"{DOWN}.bitmask"][7, 1] |= 0b01000000

        spoil(folder, edit, change)
        assert failures(folder) == [(f"{DOWN}.bitmask", "values", (7, 1))]

    @pytest.mark.parametrize("value", [float("nan"), float("-inf")])
    def test_nan_and_inf(self, value, write, edit, tiny_qwen3):
        folder = write(tiny_qwen3).folder

        def change(tensors: dict[str, Tensor]) -> None:
            tensors[f"{UP}.compressed"][3, 9] = value

        spoil(folder, edit, change)
        assert failures(folder) == [(f"{UP}.compressed", "values", (3, 9))]

    def test_sizes_against_the_config(self, write, edit, tiny_qwen3):
        folder = write(tiny_qwen3).folder
        edit(folder, {f"{UP}.compressed": torch.ones(128, 31), f"{DOWN}.shape": torch.tensor([[128], [64]])})
        assert failures(folder) == [(f"{UP}.compressed", "shape", None), (f"{DOWN}.bitmask", "shape", None)]

    def test_a_missing_tensor(self, write, edit, tiny_qwen3):
        folder = write(tiny_qwen3).folder
        edit(folder, {f"{UP}.bitmask": None, "model.norm.weight": None})
        assert failures(folder) == [(f"{UP}.bitmask", "shape", None)]
        assert ("model.norm.weight", "hash", None) in failures(folder, ignore=())

    def test_another_tensor_of_the_right_size(self, write, edit, tiny_qwen3):
        """Of every kind of tensor: norm, embedding, packed values."""
        folder = write(tiny_qwen3).folder

        def change(tensors: dict[str, Tensor]) -> None:
            for name in ("model.norm.weight", "model.embed_tokens.weight", f"{UP}.compressed"):
                tensors[name] *= 2

        spoil(folder, edit, change)
        assert {tensor for tensor, _, _ in failures(folder, ignore=())} == {
            "model.norm.weight",
            "model.embed_tokens.weight",
            f"{UP}.compressed",
            "model.safetensors",
        }

    def test_a_pruned_embedding(self, write, edit, tiny_qwen3):
        written = write(tiny_qwen3, kind="dense")
        (written.folder / PROVENANCE_FILE).unlink()
        table = load_file(written.folder / "model.safetensors")["model.embed_tokens.weight"]
        table.view(-1, 4)[:, 2:] = 0
        edit(written.folder, {"model.embed_tokens.weight": table})
        assert failures(written.folder, TWO_FOUR) == [("model.embed_tokens.weight", "values", None)]

    def test_tied_weights_that_differ(self, write, edit, tiny_qwen3):
        written = write(tiny_qwen3)
        edit(written.folder, {"lm_head.weight": tiny_qwen3.lm_head.weight.detach() + 1})
        assert failures(written.folder) == [("lm_head.weight", "values", None)]


class TestProvenance:
    def test_an_edited_record(self, write, tiny_qwen3):
        folder = write(tiny_qwen3).folder
        file = folder / PROVENANCE_FILE
        file.write_text(file.read_text().replace('"method": "magnitude"', '"method": "wanda"'))
        with pytest.raises(CheckFailed, match=r"sdbench\.json was changed after it was written"):
            find(folder)

    def test_not_a_record(self, write, tiny_qwen3):
        folder = write(tiny_qwen3).folder
        (folder / PROVENANCE_FILE).write_text("{}")
        with pytest.raises(CheckFailed, match=r"is no sdbench\.checkpoint/1 record \(method: Field required\)"):
            find(folder)

    def test_a_changed_and_a_missing_file(self, write, tiny_qwen3):
        folder = write(tiny_qwen3).folder
        (folder / "generation_config.json").write_text("{}")
        (folder / "chat_template.jinja").unlink()
        found = [(failure.tensor, failure.check) for failure in find(folder).failures]
        assert sorted(found) == [("chat_template.jinja", "hash"), ("generation_config.json", "hash")]

    def test_it_says_where_the_checkpoint_comes_from(self, write, tiny_qwen3):
        written = write(tiny_qwen3)
        found = read_provenance(written.folder)
        assert found is not None and found.versions["torch"] == torch.__version__
        assert found.tensors.keys() == load_file(written.folder / "model.safetensors").keys()
        assert found.files["config.json"] == file_sha256(written.folder / "config.json")
        assert PROVENANCE_FILE not in found.files


def test_another_quantisation_cannot_be_checked(tiny_qwen3, tmp_path):
    tiny_qwen3.save_pretrained(tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SdbenchError, match="quantised by gptq: no format whose masks"):
        find(tmp_path / "q")


def narrow(write: Callable[..., Any], model: Any) -> Path:
    """A checkpoint whose first down_proj is 12 wide, as its config would have it."""
    for layer in model.model.layers:
        for name, sizes in (("gate_proj", (64, 12)), ("up_proj", (64, 12)), ("down_proj", (12, 64))):
            setattr(layer.mlp, name, torch.nn.Linear(*sizes, bias=False))
    model.config.intermediate_size = 12
    return write(model).folder
