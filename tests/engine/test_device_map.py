"""A model spread over several devices: where its parts go, what can decode it, and the same replies as on one."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import AutoTokenizer, PreTrainedModel

from sdbench import devices
from sdbench.architectures import ARCHITECTURES, Architecture
from sdbench.calibrate.magnitude import keep_mask
from sdbench.calibrate.replay import collect_sums
from sdbench.calibrate.select import select_linears
from sdbench.calibrate.sources import CalibrationText
from sdbench.demo import MODEL_DIR
from sdbench.engine.decoders import fastest
from sdbench.engine.fused.plan import Unfusable, plan
from sdbench.engine.graph import GraphForward
from sdbench.engine.greedy import greedy
from sdbench.engine.packed_linear import packed_linears
from sdbench.engine.paths import EAGER, FUSED
from sdbench.errors import SdbenchError, UsageError
from sdbench.models import load_model, open_model, resolve_model
from sdbench.packing import pack
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.suites.decode.options import DecodeOptions
from sdbench.suites.decode.suite import run

CPU = torch.device("cpu")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
FIRST = ("model.embed_tokens", "model.layers.0", "model.layers.1")
SECOND = ("model.layers.2", "model.layers.3", "model.norm", "model.rotary_emb", "lm_head")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    fields = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 7}
    fields |= {"tie_word_embeddings": False, "head_dim": 32}
    monkeypatch.setitem(ARCHITECTURES, "tiny", Architecture("tiny", (), fields))


def loaded(device: torch.device, **options: Any) -> PreTrainedModel:
    return load_model(resolve_model("random:tiny", None, device), device, torch.float32, **options).model


@pytest.mark.parametrize("place", [{"": CPU}, {"model": CPU, "lm_head": CPU}])
def test_a_map_gives_the_weights_of_one_device(place):
    whole, spread = loaded(CPU).state_dict(), loaded(CPU, device_map=place).state_dict()
    assert whole.keys() == spread.keys() and all(torch.equal(whole[name], spread[name]) for name in whole)


def test_linears_inside_a_part_have_no_hook():
    """A packed linear has none: what a hook costs would be charged to the dense model alone."""
    model = loaded(CPU)
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    devices.unhook_linears(model, {"model": CPU, "lm_head": CPU})
    hooked = {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    assert {"model", "lm_head", "model.layers.0.mlp"} <= hooked and not hooked & set(select_linears(model))


def test_a_checkpoint_takes_the_same_map(tiny_llama, tmp_path, monkeypatch):
    tiny_llama.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(tmp_path)
    monkeypatch.setattr("sdbench.models.map_devices", lambda model, strategy: {"": CPU})
    model = load_model(resolve_model(str(tmp_path), None, CPU), CPU, torch.float32, device_map="auto").model
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tiny_llama.state_dict().items())


def test_blocks_are_not_split(monkeypatch):
    model = open_model(resolve_model("random:tiny", None, CPU), CPU, torch.float32).model
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    outside = model.model.embed_tokens.weight.nbytes
    # accelerate leaves room for one more block on the first GPU.
    room = {0: outside + 7 * block // 2, 1: 10 * block}
    monkeypatch.setattr("accelerate.utils.get_balanced_memory", lambda model, **options: room)
    found = devices.map_devices(model, "balanced")
    assert found == {name: torch.device("cuda", index) for index, names in enumerate((FIRST, SECOND)) for name in names}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is room on a GPU")
def test_too_little_room_is_refused_and_never_offloaded():
    with pytest.raises(SdbenchError, match="--device-map sequential: the model and 0 more parts find no room on the 0 GPUs; use more"):
        loaded(CPU, device_map="sequential")


def test_a_gguf_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"--device-map: m\.gguf is converted as a whole"):
        load_model(resolve_model(str(tmp_path / "m.gguf"), None, CPU), CPU, torch.float32, device_map="auto")


def test_what_needs_one_device_says_so(tiny_llama):
    tiny_llama.model.layers[1].to("meta")
    with pytest.raises(Unfusable, match="it is spread over cpu, meta"):
        plan(tiny_llama)
    with pytest.raises(SdbenchError, match="no CUDA graph for LlamaForCausalLM: it is spread over cpu, meta"):
        GraphForward(tiny_llama, 16, capture=False)
    _, path, reason = fastest(tiny_llama, {}, 16)
    assert path == EAGER and "it is spread over cpu, meta" in str(reason)


def test_decode_times_the_eager_loop():
    options = DecodeOptions(
        spec=resolve_model("random:tiny", None, CPU),
        device=CPU,
        dtype=torch.float32,
        patterns=(Pattern(2, 4),),
        contexts=(4, 8),
        tokens=3,
        repeats=1,
        warmup_tokens=1,
        baselines=True,
        profiled=False,
        targets=(),
        ignore=(),
        seed=0,
        device_map={"": CPU},  # type: ignore[arg-type]  # a map in place of a strategy's name
    )
    rows = run(options, None, Progress())
    ways = [("dense", FUSED, 4), ("dense", EAGER, 4), ("dense", EAGER, 8), ("2:4", EAGER, 4), ("2:4", EAGER, 8)]
    assert [(row["arm"], row["path"], row["context"]) for row in rows] == ways
    assert [(row["outcome"], row["reason"]) for row in rows] == [("correct", None)] * 5
    assert {row["devices"] for row in rows} == {1}


@pytest.mark.parametrize(("on_gpu", "current", "switched"), [(False, 0, False), (True, 1, False), (True, 0, True)])
def test_a_gpu_is_switched_to_only_where_it_is_another(on_gpu, current, switched, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext(seen.append(tensor)))
    tensor: Any = SimpleNamespace(is_cuda=on_gpu, get_device=lambda: 1)
    with devices.at_device_of(tensor):
        assert seen == [tensor] * switched


@pytest.mark.gpu
@TWO
class TestTwoGpus:
    @pytest.fixture
    def pair(self) -> tuple[Any, Any]:
        gpu = torch.device("cuda", 0)
        places = {name: torch.device("cuda", index) for index, names in enumerate((FIRST, SECOND)) for name in names}
        return loaded(gpu), loaded(gpu, device_map=places)

    def test_the_same_replies_dense_and_pruned(self, pair):
        request = {"max_new_tokens": 16, "eos_ids": (), "ignore_eos": True}
        prompts = [[5, 6, 7, 8], [9, 10]]
        replies = []
        for model in pair:
            weights = {
                name: pack(linear.weight.detach(), keep_mask(linear.weight, Pattern(2, 4), layer=name), Pattern(2, 4), name)
                for name, linear in select_linears(model).items()
            }
            dense = greedy(model, prompts, **request)
            with packed_linears(model, weights, "pruned") as modules:
                pruned = greedy(model, prompts, **request)
                assert all(module.packed.device == weights[name].device for name, module in modules.items())
                assert all(module.calls for module in modules.values())
            replies.append([reply.ids for reply in (*dense, *pruned)])
        assert replies[0] == replies[1]
        assert {str(weight.device) for weight in weights.values()} == {"cuda:0", "cuda:1"}

    def test_the_same_statistics(self, pair):
        texts = [CalibrationText(tuple(range(20)), tuple(range(5, 20))), CalibrationText(tuple(range(9)), (3, 4))]
        one, two = (collect_sums(model, select_linears(model), texts, "hessian") for model in pair)
        for name, sums in one.items():
            torch.testing.assert_close(two[name].total.cpu(), sums.total.cpu(), rtol=1e-4, atol=1e-4)
