"""A packed checkpoint through sdbench.load and through transformers alone: the same bits, or a loud failure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import sdbench
from sdbench.calibrate.magnitude import keep_mask
from sdbench.checkpoint_files import INDEX
from sdbench.checkpoints.linear import CheckpointLinear, _compiled_spmm, _compiled_spmv
from sdbench.checkpoints.write import write_checkpoint
from sdbench.engine.fused import FusedDecoder
from sdbench.engine.greedy import greedy
from sdbench.engine.packed_linear import PackedLinear
from sdbench.errors import CheckFailed, SdbenchError
from sdbench.kernels import launching
from sdbench.kernels.registry import Config, Problem, Variant
from sdbench.kernels.spmm import spmm
from sdbench.packing import PackedWeight, pack
from sdbench.pattern import Pattern
from sdbench.timing import TOLERANCE, relative_error, within

IDS = torch.tensor([[1, 5, 9, 7, 11, 4]])


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


class TestRoundTrip:
    @pytest.mark.parametrize("pattern", ["2:4", "16:32", "3:8"])
    def test_weights_masks_and_logits_are_bit_equal(self, pattern, write, tiny_llama):
        written = write(tiny_llama, pattern)
        model = sdbench.load(written.folder, device="cpu")
        packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
        assert list(packed) == list(written.weights)
        for name, module in packed.items():
            assert torch.equal(module.packed.unpack(), written.weights[name])
            assert torch.equal(module.packed.keep(), written.keep[name])
        assert torch.equal(logits(model), logits(written.pruned_model()))

    def test_bf16_stays_bf16(self, write, tiny_llama):
        model = tiny_llama.to(torch.bfloat16)
        written = write(model)
        loaded = sdbench.load(written.folder, device="cpu", dtype=torch.bfloat16)
        name = next(iter(written.weights))
        assert torch.equal(loaded.get_submodule(name).packed.unpack(), written.weights[name])
        assert loaded.get_submodule(name).packed.dtype == loaded.model.embed_tokens.weight.dtype == torch.bfloat16

    def test_tied_embeddings_stay_tied(self, write, tiny_qwen3):
        """CASES 16: lm_head is skipped and the embedding unchanged."""
        before = tiny_qwen3.model.embed_tokens.weight.clone()
        written = write(tiny_qwen3)
        model = sdbench.load(written.folder, device="cpu")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, before)
        assert not any("lm_head" in name for name in load_file(written.folder / "model.safetensors"))

    def test_several_shards(self, write, tiny_llama):
        written = write(tiny_llama, shard_bytes=60_000)
        index = json.loads((written.folder / INDEX).read_text())
        assert len(set(index["weight_map"].values())) > 2
        assert set(index["weight_map"]) == set(written.provenance.tensors)
        assert max(path.stat().st_size for path in written.folder.glob("*.safetensors")) < 66_000
        assert torch.equal(logits(sdbench.load(written.folder, device="cpu")), logits(written.pruned_model()))

    def test_what_is_written_after_decoding_is_bit_equal(self, write, tiny_qwen3, tmp_path):
        """A decoder makes the packed rows of several layers parts of one stack."""
        written = write(tiny_qwen3)
        model = sdbench.load(written.folder, device="cpu")
        before = logits(model)
        FusedDecoder(model, 32).reply([5, 9, 11], max_new_tokens=4, eos_ids=())
        rows = model.model.layers[0].self_attn.k_proj.packed
        assert rows.pitch > rows.out_features
        write_checkpoint(tmp_path / "again", written.model, None, written.origin, lambda name: model.get_submodule(name).packed.to_stored())
        first, second = (load_file(folder / "model.safetensors") for folder in (written.folder, tmp_path / "again"))
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
        assert torch.equal(logits(model), before)
        assert torch.equal(logits(sdbench.load(tmp_path / "again", device="cpu")), before)
        moved = model.to(torch.bfloat16)
        for name, weight in written.weights.items():
            assert torch.equal(moved.get_submodule(name).packed.unpack(), weight.bfloat16())

    def test_a_dense_export_is_an_ordinary_checkpoint_with_zeros(self, write, tiny_qwen3):
        written = write(tiny_qwen3, kind="dense")
        model = AutoModelForCausalLM.from_pretrained(written.folder)
        assert not any(isinstance(module, PackedLinear) for module in model.modules())
        assert torch.equal(logits(model), logits(written.pruned_model()))
        with pytest.raises(SdbenchError, match="is dense, not a packed checkpoint"):
            sdbench.load(written.folder, device="cpu")

    def test_tokenizer_and_generation_config_come_along(self, write, tiny_qwen3):
        tiny_qwen3.generation_config.top_k = 17
        written = write(tiny_qwen3)
        assert sdbench.load(written.folder, device="cpu").generation_config.top_k == 17
        assert AutoTokenizer.from_pretrained(written.folder).chat_template


class TestPlainTransformers:
    def test_from_pretrained_reads_it_once_sdbench_is_imported(self, write, tiny_qwen3):
        written = write(tiny_qwen3)
        model = AutoModelForCausalLM.from_pretrained(written.folder)
        assert model.hf_quantizer.is_compileable
        assert json.loads(model.config.to_json_string())["quantization_config"]["pattern"] == "2:4"
        assert torch.equal(logits(model), logits(written.pruned_model()))

    def test_transformers_may_be_imported_after_sdbench(self, write, tiny_qwen3):
        """The other order is that of every test here."""
        written = write(tiny_qwen3)
        code = (
            f"import sdbench, transformers\nmodel = transformers.AutoModelForCausalLM.from_pretrained({str(written.folder)!r})\n"
            "print(sum(type(module).__name__ == 'CheckpointLinear' for module in model.modules()))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout == "14\n", done.stderr

    def test_without_sdbench_it_fails(self, write, tiny_qwen3):
        """transformers only warns of a format that it does not know, and would go on with random layers."""
        written = write(tiny_qwen3)
        code = (
            "import sys\nsys.modules['sdbench'] = None\nimport transformers\n"
            f"transformers.AutoModelForCausalLM.from_pretrained({str(written.folder)!r})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "Unknown quantization type, got sdbench" in done.stderr
        assert "RuntimeError" in done.stderr.splitlines()[-1]

    def test_the_loaded_model_cannot_be_saved_as_something_else(self, write, tiny_qwen3, tmp_path, caplog):
        """transformers' error points to warnings: there is one, which says what to do."""
        folder = write(tiny_qwen3).folder
        for model in (sdbench.load(folder, device="cpu"), AutoModelForCausalLM.from_pretrained(folder)):
            caplog.clear()
            with pytest.raises(ValueError, match="not serializable"):
                model.save_pretrained(tmp_path / "again")
            (warning,) = [record.getMessage() for record in caplog.records if record.name == "sdbench"]
            assert f"copy the folder {folder} instead" in warning and "sdbench prune --format dense" in warning
            assert not (tmp_path / "again").exists()


class TestRunning:
    def test_generate_and_our_own_loop_say_the_same(self, write, tiny_llama):
        written = write(tiny_llama)
        model = sdbench.load(written.folder, device="cpu")
        plain = model.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, min_new_tokens=6, do_sample=False, eos_token_id=[2, 3]
        )
        calls = [module.calls for module in model.modules() if isinstance(module, PackedLinear)]
        assert calls == [5] * 14
        (reply,) = greedy(model, [IDS[0].tolist()], max_new_tokens=6, eos_ids=(), ignore_eos=True)
        (want,) = greedy(written.pruned_model(), [IDS[0].tolist()], max_new_tokens=6, eos_ids=(), ignore_eos=True)
        assert reply.ids == want.ids
        assert not {2, 3} & set(reply.ids)
        assert tuple(plain[0, IDS.shape[1] :].tolist()) == reply.ids

    def test_to_another_dtype_packs_anew(self, write, tiny_llama):
        written = write(tiny_llama)
        model = sdbench.load(written.folder, device="cpu").to(torch.bfloat16)
        for name, weight in written.weights.items():
            module = model.get_submodule(name)
            assert torch.equal(module.packed.unpack(), weight.bfloat16())
            assert torch.equal(module.packed.keep(), written.keep[name])
            assert module.spmv.packed is module.packed

    @pytest.mark.parametrize("rows", [1, 3])
    @pytest.mark.parametrize("stacked", [False, True])
    def test_a_layer_compiles_into_one_graph(self, rows, stacked, write, tiny_qwen3):
        written = write(tiny_qwen3)
        model = sdbench.load(written.folder, device="cpu")
        if stacked:
            FusedDecoder(model, 32, verify=False)
        layer = model.model.layers[0].mlp.up_proj
        assert (layer.packed.pitch > layer.out_features) == stacked
        assert isinstance(layer, CheckpointLinear)
        x = torch.randn(1, rows, layer.in_features, generator=torch.Generator().manual_seed(0))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x))
        assert layer.calls == (1 if rows == 1 else 0)


@pytest.fixture
def splits(monkeypatch):
    """K is split in every product that can: partial sums are memory beside the result."""

    def chosen(packed: PackedWeight, variant: Variant, problem: Problem) -> Config:
        default = variant.default(problem)
        return {**default, "splits": 2} if "splits" in default else default

    for kernel in ("spmv", "spmm"):
        monkeypatch.setattr(f"sdbench.kernels.{kernel}.choose", chosen)


def pruned_linear(dtype: torch.dtype, device: torch.device) -> tuple[PackedWeight, torch.Tensor]:
    weight = torch.randn(48, 512, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    keep = keep_mask(weight, Pattern(2, 4))
    return pack(weight, keep, Pattern(2, 4)), weight.masked_fill(~keep, 0)


@pytest.mark.parametrize(("rows", "variant"), [(1, "lane_row"), (1, "portable"), (3, "tile"), (40, "expand")])
def test_a_compiled_product_leaves_no_memory_behind(rows, variant, splits, device, monkeypatch):
    """It may run in a CUDA graph's own pool, where torch allows none but results."""
    monkeypatch.setattr(launching, "_SCRATCH", {})
    monkeypatch.setattr("sdbench.kernels.spmm.auto_variant", lambda packed, tokens: variant)
    packed, pruned = pruned_linear(torch.bfloat16, device)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    for _ in range(2):
        if rows == 1:
            y = _compiled_spmv(x[0], *packed.tensors, [48, 512, 2, 4], variant)
        else:
            y = _compiled_spmm(x, *packed.tensors, [48, 512, 2, 4])
        assert within(relative_error(y.view(rows, 48), x.double() @ pruned.double().T), TOLERANCE[y.dtype])
        assert not launching._SCRATCH
    if rows > 1:
        spmm(packed, x)
        assert launching._SCRATCH, "others keep it"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.bfloat16), (1, torch.float32), (3, torch.bfloat16), (3, torch.float32), (40, torch.bfloat16)]
)
def test_a_captured_layer_leaves_no_memory_behind(rows, dtype, splits):
    """Run once in its graph's pool, captured, and replayed, with another input each time; torch looks into the pool at the first two."""
    packed, pruned = pruned_linear(dtype, torch.device("cuda"))
    layer = CheckpointLinear(packed, None, None)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    counters.clear()
    for seed in range(5):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            y = compiled(x)
        assert within(relative_error(y, x.double() @ pruned.double().T), TOLERANCE[dtype]), seed
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
@pytest.mark.parametrize("prompts", [1, 3])
def test_on_a_gpu_compiled_with_partial_sums_and_dense_rows(prompts, splits, write, tiny_llama):
    """One prompt's steps add partial sums of the SpMV; those of several expand rows, since these weights are float32."""
    written = write(tiny_llama)
    model = sdbench.load(written.folder, device="cuda")
    ids = torch.cat([IDS + row for row in range(prompts)]).cuda()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    want = written.pruned_model().cuda().generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), want)
    assert torch.equal(model.generate(ids, **options, cache_implementation="static"), want)


@pytest.mark.gpu
def test_on_a_gpu_eager_and_compiled(write, tiny_llama):
    """A static cache makes ``generate`` compile the model, the SpMV as one operator of it."""
    written = write(tiny_llama)
    model = sdbench.load(written.folder, device="cuda")
    for name, weight in written.weights.items():
        assert torch.equal(model.get_submodule(name).packed.unpack().cpu(), weight)
    ids = IDS.cuda()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    want = written.pruned_model().cuda().generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), want)
    assert torch.equal(model.generate(ids, **options, cache_implementation="static"), want)


class TestBadInput:
    def test_a_cut_off_file(self, write, tiny_qwen3):
        folder = write(tiny_qwen3).folder
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(CheckFailed, match=r"model\.safetensors is damaged or cut short"):
            sdbench.load(folder, device="cpu")

    def test_a_missing_shard(self, write, tiny_qwen3):
        folder = write(tiny_qwen3, shard_bytes=60_000).folder
        shard = sorted(folder.glob("model-*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(CheckFailed, match=f"the weight file {shard.name} is missing"):
            sdbench.load(folder, device="cpu")

    @pytest.mark.parametrize(
        "name", ["model.layers.1.mlp.up_proj.bitmask", "model.layers.0.self_attn.q_proj.compressed", "model.norm.weight"]
    )
    def test_a_missing_tensor(self, name, write, edit, tiny_qwen3):
        folder = write(tiny_qwen3).folder
        edit(folder, {name: None})
        with pytest.raises(CheckFailed, match=f"tensor {name} is missing"):
            sdbench.load(folder, device="cpu")

    def test_a_missing_tensor_under_plain_transformers(self, write, edit, tiny_qwen3):
        folder = write(tiny_qwen3).folder
        edit(folder, {"model.layers.1.mlp.up_proj.bitmask": None})
        with pytest.raises(CheckFailed, match=r"tensor model\.layers\.1\.mlp\.up_proj\.bitmask is missing"):
            AutoModelForCausalLM.from_pretrained(folder)

    def test_a_mask_that_is_not_exact(self, write, edit, tiny_qwen3):
        folder = write(tiny_qwen3).folder
        name = "model.layers.0.mlp.up_proj"
        mask = load_file(folder / "model.safetensors")[f"{name}.bitmask"]
        mask[3, 1] = 0xFF
        edit(folder, {f"{name}.bitmask": mask})
        with pytest.raises(CheckFailed, match=f"layer {name}: row 3, columns 8 to 11 keep 4 weights"):
            sdbench.load(folder, device="cpu")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"version": 2}, "format version 2, and this sdbench reads version 1"),
            ({"pattern": "4:2"}, "quantization_config.pattern: pattern 4:2"),
            ({"layers": []}, "layers is no list of layer names"),
            ({"layers": ["model.layers.9.mlp.up_proj"]}, "tensor model.layers.9.mlp.up_proj.compressed is missing"),
            ({"layers": ["model.norm"]}, "tensor model.norm.compressed is missing"),
        ],
    )
    def test_a_config_that_does_not_fit(self, changes, message, write, tiny_qwen3):
        folder = write(tiny_qwen3).folder
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= changes
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(SdbenchError, match=message):
            sdbench.load(folder, device="cpu")

    def test_not_a_checkpoint(self, tmp_path: Path):
        with pytest.raises(SdbenchError, match=r"has no config\.json"):
            sdbench.load(tmp_path, device="cpu")
