import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sdbench.architectures import ARCHITECTURES, Architecture
from sdbench.devices import resolve_device, resolve_dtype
from sdbench.engine.greedy import greedy
from sdbench.errors import SdbenchError, UsageError
from sdbench.models import DEFAULT_HUB_ID, DEFAULT_REVISION, ModelSpec, load_model, resolve_model
from sdbench.prompts import encode_question, encode_reference

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
FP32 = torch.float32
Q8_0 = gguf.GGMLQuantizationType.Q8_0
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
WORDS = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "how", "many", "?", "four"]
QUESTION, ANSWER = "how many?", "four"
PROMPT_IDS = [3, 5, 6, 7, 2, 4]
EXCHANGE_IDS = [3, 5, 6, 7, 2, 4, 8, 2]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[^>]*>|\w+|\?"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)


@pytest.fixture
def checkpoint(tiny_qwen3, tokenizer, tmp_path) -> Path:
    """A tiny Qwen3 checkpoint in two shards, EOS ids 2 and 3 in its generation config."""
    folder = tmp_path / "tiny"
    tiny_qwen3.save_pretrained(folder, max_shard_size="200KB")
    tokenizer.save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


def load(text: str, dtype: torch.dtype = FP32, revision: str | None = None):
    return load_model(resolve_model(text, revision, CPU), CPU, dtype)


def refuse(match: str, text: str, kind: type[SdbenchError] = SdbenchError, **options):
    with pytest.raises(kind, match=match) as caught:
        load(text, **options)
    assert "\n" not in str(caught.value)


class TestResolve:
    def test_default_depends_on_cuda_and_says_why(self):
        with_cuda, without = resolve_model(None, None, CUDA), resolve_model(None, None, CPU)
        assert (with_cuda.kind, with_cuda.source, with_cuda.revision) == ("hub", DEFAULT_HUB_ID, DEFAULT_REVISION)
        assert DEFAULT_REVISION == "cdbee75f17c01a7cc42f958dc650907174af0554"
        assert (without.kind, without.revision) == ("demo", None)
        assert "with a CUDA device" in with_cuda.reason and "without a CUDA device" in without.reason
        assert resolve_model(None, "main", CUDA).revision == "main"

    def test_each_kind(self, checkpoint, tmp_path):
        (tmp_path / "m.gguf").touch()
        assert resolve_model("demo", None, CUDA).kind == "demo"
        assert resolve_model(str(checkpoint), None, CUDA).kind == "folder"
        assert resolve_model(str(tmp_path / "m.gguf"), None, CPU).kind == "gguf"
        assert resolve_model("Qwen/Qwen3-8B", "v1", CPU) == ModelSpec("hub", "Qwen/Qwen3-8B", "v1", "--model Qwen/Qwen3-8B")
        for source in ("qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", "someone/unknown", str(checkpoint)):
            spec = resolve_model(f"random:{source}", None, CPU)
            assert (spec.kind, spec.source) == ("random", source)

    @pytest.mark.parametrize("text", [None, "demo", "random:qwen3-4b", "{folder}", "random:{folder}", "{folder}/m.gguf"])
    def test_a_revision_needs_a_hub_id(self, text, checkpoint):
        (checkpoint / "m.gguf").touch()
        with pytest.raises(UsageError, match="--revision main: only a hub id has revisions"):
            resolve_model(text and text.format(folder=checkpoint), "main", CPU)

    def test_missing_paths(self, tmp_path):
        (tmp_path / "weights.bin").touch()
        refuse("no such file", str(tmp_path / "none.gguf"))
        refuse("no such folder or file, and not a hub id", str(tmp_path / "none"), UsageError)
        refuse("name an architecture, a hub id or a folder", "random:", UsageError)
        refuse("the folder has no config.json", str(tmp_path))
        refuse("the folder has no config.json", f"random:{tmp_path}")
        refuse(r"a file, but not a \.gguf one", str(tmp_path / "weights.bin"))

    def test_device(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert resolve_device(None) == resolve_device("auto") == resolve_device("cpu") == CPU
        with pytest.raises(SdbenchError, match="finds no CUDA GPU"):
            resolve_device("cuda")
        with pytest.raises(UsageError, match="device 'tpu': use auto"):
            resolve_device("tpu")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_device", (chosen := []).append)
        assert resolve_device(None) == resolve_device("cuda") == CUDA
        assert (resolve_device("cuda:1"), chosen) == (torch.device("cuda", 1), [0, 0, 1])
        with pytest.raises(SdbenchError, match="the last of 2 CUDA GPUs is cuda:1"):
            resolve_device("cuda:2")

    def test_dtype(self):
        assert [resolve_dtype(None, CPU), resolve_dtype("auto", CUDA)] == [torch.float32, torch.bfloat16]
        assert [resolve_dtype(name, CPU) for name in ("bf16", "fp16", "fp32")] == [torch.bfloat16, torch.float16, torch.float32]
        with pytest.raises(UsageError, match="dtype 'int8': use auto, bf16, fp16, fp32"):
            resolve_dtype("int8", CPU)


class TestFolder:
    def test_loads_what_was_saved(self, checkpoint, tiny_qwen3, capfd):
        loaded = load(str(checkpoint))
        assert (loaded.name, loaded.eos_ids, loaded.model.training) == ("tiny", {2, 3}, False)
        ours = loaded.model.state_dict()
        assert all(torch.equal(ours[name], weight) for name, weight in tiny_qwen3.state_dict().items())
        assert encode_question(loaded.tokenizer, QUESTION) == PROMPT_IDS
        assert capfd.readouterr() == ("", "")

    def test_bf16_leaves_the_rotary_frequencies_alone(self, checkpoint, tiny_qwen3):
        model = load(str(checkpoint), torch.bfloat16).model
        assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
        assert torch.equal(model.model.rotary_emb.inv_freq, tiny_qwen3.model.rotary_emb.inv_freq)
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32

    def test_missing_shard(self, checkpoint):
        sorted(checkpoint.glob("model-*.safetensors"))[-1].unlink()
        refuse(r"the weight file model-.*\.safetensors is missing", str(checkpoint))

    def test_no_weights_at_all(self, checkpoint):
        for file in checkpoint.glob("model*"):
            file.unlink()
        refuse(r"the weight file model\.safetensors is missing", str(checkpoint))

    def test_truncated_weights(self, checkpoint):
        shard = sorted(checkpoint.glob("model-*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:-100])
        refuse(f"{shard.name} is damaged or cut short", str(checkpoint))

    def test_a_missing_weight_is_never_filled_with_random_numbers(self, tiny_qwen3, tokenizer, tmp_path):
        weights = tiny_qwen3.state_dict()
        del weights["model.layers.1.mlp.up_proj.weight"], weights["lm_head.weight"]  # the second is tied to the embeddings
        tiny_qwen3.save_pretrained(tmp_path, state_dict=weights)
        tokenizer.save_pretrained(tmp_path)
        refuse(r"lacks 1 weight, model\.layers\.1\.mlp\.up_proj\.weight the first", str(tmp_path))

    def test_a_weight_of_the_wrong_size_is_named(self, checkpoint):
        config = checkpoint / "config.json"
        config.write_text(config.read_text().replace('"intermediate_size": 128', '"intermediate_size": 160'))
        refuse(r"model\.layers\.0\.mlp\.down_proj\.weight is \(64, 128\), but the config asks for \(64, 160\)", str(checkpoint))

    def test_unknown_kind_of_model(self, checkpoint):
        config = checkpoint / "config.json"
        config.write_text(config.read_text().replace('"qwen3"', '"no_such_model"').replace("Qwen3ForCausalLM", "NoSuchModel"))
        refuse("cannot be loaded: .*no_such_model", str(checkpoint))

    def test_config_that_is_not_json(self, checkpoint):
        (checkpoint / "config.json").write_text("{")
        refuse("cannot be loaded", str(checkpoint))

    def test_no_tokenizer(self, checkpoint):
        for file in checkpoint.glob("tokenizer*"):
            file.unlink()
        refuse(r"has no tokenizer \(none of tokenizer\.json", str(checkpoint))
        assert load(f"random:{checkpoint}").tokenizer is None

    def test_quantised_weights(self, checkpoint):
        config = checkpoint / "config.json"
        config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
        refuse("is quantised; pruning needs the unquantised checkpoint", str(checkpoint))

    @pytest.mark.gpu
    def test_on_the_gpu(self, checkpoint, tiny_qwen3):
        model = load_model(resolve_model(str(checkpoint), None, CUDA), CUDA, FP32).model
        assert {p.device for p in model.parameters()} == {CUDA}
        assert all(torch.equal(model.state_dict()[name].cpu(), weight) for name, weight in tiny_qwen3.state_dict().items())


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch):
        """Replaces the download: returns the folder it is given, or raises the error, and keeps the arguments."""

        def answer(result: Path | Exception):
            def snapshot_download(repo_id, **options):
                calls.append((repo_id, options))
                if isinstance(result, Exception):
                    raise result
                return str(result)

            calls: list[tuple] = []
            monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
            return calls

        return answer

    def test_downloads_the_revision_and_records_its_commit(self, hub, checkpoint):
        calls = hub(checkpoint)
        loaded = load("someone/tiny", revision="main")
        assert (loaded.name, loaded.spec.kind, loaded.spec.revision) == ("someone/tiny", "hub", "tiny")  # the snapshot folder's name
        assert (calls[0][0], calls[0][1]["revision"]) == ("someone/tiny", "main")
        assert "*.safetensors" in calls[0][1]["allow_patterns"]

    @pytest.mark.parametrize("missing", ["config.json", "model-00001-of-*.safetensors"])
    def test_an_incomplete_repository_is_named_by_its_id(self, hub, checkpoint, missing):
        next(checkpoint.glob(missing)).unlink()
        hub(checkpoint)
        refuse(r"^model 'someone/tiny'.*(no config\.json|model-00001-of-\d+\.safetensors is missing)", "someone/tiny")

    def test_random_of_an_unknown_hub_id_downloads_no_weights(self, hub, checkpoint):
        calls = hub(checkpoint)
        loaded = load("random:someone/tiny")
        assert "*.safetensors" not in calls[0][1]["allow_patterns"]
        assert (loaded.name, loaded.model.config.hidden_size) == ("random:someone/tiny", 64)

    @pytest.mark.parametrize(
        ("kind", "match"),
        [
            (hub_errors.RepositoryNotFoundError, r"'a/b' at revision v1: no such folder here, and no such \(public\) model"),
            (hub_errors.RevisionNotFoundError, "'a/b' at revision v1: the hub has the model, but not this revision"),
            (hub_errors.GatedRepoError, "accept its licence"),
            (hub_errors.LocalEntryNotFoundError, "no such folder here, not in the hub cache, and the hub cannot be reached"),
            (ConnectionError, "the download failed: first line"),
        ],
    )
    def test_errors_are_one_line(self, hub, kind, match):
        hub(kind.__new__(kind, "first line\nsecond line"))  # the hub's own want a response object
        refuse(match, "a/b", revision="v1")

    def test_unreachable_hub_for_real(self, monkeypatch, tmp_path):
        """The hub's own offline mode and an empty cache: no request leaves the machine."""
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        refuse("model 'nobody/nothing': no such folder here, not in the hub cache, and the hub cannot be reached", "nobody/nothing")


class TestRandom:
    @pytest.fixture(autouse=True)
    def known(self, monkeypatch, tiny_llama):
        """A tiny architecture in the table, 64 wide, with two EOS ids."""
        fields = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
        fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": [7, 9]}
        monkeypatch.setitem(ARCHITECTURES, "tiny", Architecture("tiny", ("someone/tiny",), fields))

    def test_weights_are_the_same_every_time_and_normal(self):
        state = torch.get_rng_state()
        first = load("random:tiny")
        torch.manual_seed(123)
        second = load("random:someone/tiny").model.state_dict()
        assert (first.tokenizer, first.eos_ids, first.name) == (None, {7, 9}, "random:tiny")
        assert all(torch.equal(second[name], weight) for name, weight in first.model.state_dict().items())
        weight = first.model.model.layers[1].mlp.up_proj.weight
        assert weight.mean().item() == pytest.approx(0, abs=5e-4)
        assert weight.std().item() == pytest.approx(0.02, rel=0.03)
        torch.set_rng_state(state)

    def test_loading_leaves_the_random_state_alone(self):
        state = torch.get_rng_state()
        load("random:tiny")
        assert torch.equal(torch.get_rng_state(), state)

    def test_bf16_keeps_the_rotary_frequencies_and_decodes(self):
        loaded = load("random:tiny", torch.bfloat16)
        assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
        inv_freq = loaded.model.model.rotary_emb.inv_freq
        assert inv_freq.dtype == torch.float32
        assert torch.allclose(inv_freq, 10000.0 ** (-torch.arange(0, 16, 2).float() / 16), rtol=1e-6)
        [reply] = greedy(loaded.model, [[1, 2, 3]], max_new_tokens=4, eos_ids=loaded.eos_ids, ignore_eos=True)
        assert len(reply.ids) == 4

    @pytest.mark.gpu
    def test_on_the_gpu(self):
        first, second = (load_model(resolve_model("random:tiny", None, CUDA), CUDA, torch.bfloat16).model for _ in range(2))
        assert all(torch.equal(second.state_dict()[name], weight) for name, weight in first.state_dict().items())
        assert {p.device for p in first.parameters()} == {CUDA}
        assert (first.model.rotary_emb.inv_freq.dtype, first.model.rotary_emb.inv_freq.device) == (FP32, CUDA)
        assert len(greedy(first, [[1, 2], [3, 4, 5]], max_new_tokens=4, eos_ids={7, 9}, ignore_eos=True)[1].ids) == 4

    def test_folder_gives_architecture_tokenizer_and_generation_config(self, checkpoint, tiny_qwen3):
        for file in checkpoint.glob("model*"):
            file.unlink()
        loaded = load(f"random:{checkpoint}")
        assert (loaded.name, loaded.eos_ids) == ("random:tiny", {2, 3})
        assert encode_question(loaded.tokenizer, QUESTION) == PROMPT_IDS
        ours, saved = loaded.model.model.embed_tokens.weight, tiny_qwen3.model.embed_tokens.weight
        assert ours.shape == saved.shape and not torch.equal(ours, saved)


class TestGguf:
    @pytest.fixture
    def file(self, tiny_llama, tmp_path) -> Path:
        """The tiny Llama with its matrices in Q8_0, and a byte-level vocabulary."""
        config, file = tiny_llama.config, tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: config.vocab_size - 5]
        merges = [letters[:2], letters[2:4]]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["<unk>", "<s>", "</s>", *(left + right for left, right in merges), *letters])
        writer.add_token_types([3, 3, 3] + [1] * (2 + len(letters)))
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        for name, weight in tiny_llama.state_dict().items():
            target = names.get_name(name, try_suffixes=(".weight",))
            if weight.ndim == 1:
                writer.add_tensor(target, weight.numpy())
                continue
            if "q_proj" in name or "k_proj" in name:  # GGUF keeps the two halves that RoPE rotates side by side
                weight = weight.reshape(-1, 2, config.head_dim // 2, config.hidden_size).swapaxes(1, 2).reshape(weight.shape)
            writer.add_tensor(target, gguf.quants.quantize(weight.numpy(), Q8_0), raw_dtype=Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    def test_dequantised_to_an_ordinary_model(self, file, tiny_llama, capfd):
        loaded = load(str(file))
        assert (loaded.name, loaded.eos_ids, loaded.tokenizer.chat_template) == ("tiny.gguf", {2}, TEMPLATE)
        assert type(loaded.model.model.layers[0].mlp.up_proj) is torch.nn.Linear
        for name, weight in tiny_llama.state_dict().items():
            # Q8_0 works row by row in blocks of 32, so the order of the rows doesn't matter.
            stored = (
                weight if weight.ndim == 1 else torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), Q8_0), Q8_0))
            )
            assert torch.equal(loaded.model.state_dict()[name], stored), name
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("kept", [0.02, 0.5, 0.95])
    def test_truncated_file(self, file, kept):
        assert load(str(file)).name == "tiny.gguf"
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
        refuse("cannot be loaded: damaged, cut short, or of a kind that transformers cannot convert", str(file))

    def test_not_a_gguf_file(self, tmp_path):
        (tmp_path / "not.gguf").write_bytes(b"PK\x03\x04 a zip archive")
        refuse("not.gguf' is not a GGUF file", str(tmp_path / "not.gguf"))

    @pytest.mark.slow
    @pytest.mark.skipif("SDBENCH_TEST_GGUF" not in os.environ, reason="SDBENCH_TEST_GGUF names no GGUF file of a chat model")
    def test_a_real_file_answers(self):
        loaded = load(os.environ["SDBENCH_TEST_GGUF"])
        prompt = encode_question(loaded.tokenizer, "What is the capital of France? Answer in one short sentence.")
        [reply] = greedy(loaded.model, [prompt], max_new_tokens=32, eos_ids=loaded.eos_ids)
        assert reply.eos
        assert "Paris" in loaded.tokenizer.decode(reply.ids)


class TestEncode:
    def test_question_stops_where_the_answer_begins(self, tokenizer):
        assert encode_question(tokenizer, QUESTION) == PROMPT_IDS
        assert encode_reference(tokenizer, QUESTION, ANSWER) == EXCHANGE_IDS

    def test_no_template_or_no_tokenizer(self, tokenizer):
        tokenizer.chat_template = None
        for encode in (lambda t: encode_question(t, "x"), lambda t: encode_reference(t, "x", "y")):
            with pytest.raises(SdbenchError, match="has no chat template"):
                encode(tokenizer)
            with pytest.raises(SdbenchError, match="no tokenizer"):
                encode(None)


def test_out_of_gpu_memory_is_one_line(monkeypatch, checkpoint):
    def exhausted(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore lines")

    monkeypatch.setattr("sdbench.models.AutoModelForCausalLM", SimpleNamespace(from_pretrained=exhausted))
    refuse("out of GPU memory while loading", str(checkpoint))


def test_progress_says_what_takes_time(checkpoint):
    lines: list[str] = []
    with contextlib.suppress(SdbenchError):
        load_model(resolve_model(str(checkpoint), None, CPU), CPU, FP32, progress=lines.append)
    assert lines == [f"loading {checkpoint}"]
