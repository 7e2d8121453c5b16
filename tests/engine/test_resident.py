"""Memory of a pruned model: every weight once, dense ones out of the way, and the same replies as before a decoder was made."""

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from sdbench import memory
from sdbench.calibrate.magnitude import keep_mask
from sdbench.engine.decoders import named
from sdbench.engine.fused import FusedDecoder
from sdbench.engine.greedy import greedy
from sdbench.engine.packed_linear import packed_linears
from sdbench.engine.paths import EAGER
from sdbench.engine.resident import weights_memory
from sdbench.memory import InUse, in_use, storage_bytes
from sdbench.models import LoadedModel, resolve_model
from sdbench.packing import PackedWeight, pack
from sdbench.pattern import Pattern

PROMPT = [5, 9, 11, 40, 7]
PATTERN = Pattern(2, 4)
LINEARS = 2 * (64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 128)
"""Weights of the tiny Qwen3's linears: q, k and v, o, gate, up and down."""


def packed(model: PreTrainedModel, *without: str) -> dict[str, PackedWeight]:
    linears = {n: m for n, m in model.named_modules() if n.endswith("_proj") and not n.endswith(without or ("none",))}
    return {name: pack(linear.weight.detach(), keep_mask(linear.weight, PATTERN), PATTERN) for name, linear in linears.items()}


def loaded(model: PreTrainedModel) -> LoadedModel:
    return LoadedModel(model, None, resolve_model("demo", None, model.device), frozenset(), "tiny", in_use(model.device))


def places(*tensors: torch.Tensor) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def ids(model: PreTrainedModel) -> tuple[int, ...]:
    return greedy(model, [PROMPT], max_new_tokens=10, eos_ids=())[0].ids


def test_a_step_reads_the_rows_that_the_modules_hold(tiny_qwen3: PreTrainedModel, device: torch.device) -> None:
    model = tiny_qwen3.to(device)
    weights = packed(model)
    alone = storage_bytes(tensor for weight in weights.values() for tensor in weight.tensors)
    with packed_linears(model, weights, "pruned") as modules:
        before = ids(model)
        decoder = FusedDecoder(model, 32)
        layer = model.model.layers[0]
        for product, names in zip(list(decoder.step.products())[:4], (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)), strict=True):
            block = layer.self_attn if names[0] in "qo" else layer.mlp
            ours = [getattr(block, f"{name}_proj").packed for name in names]
            for part in ("mask_words", "values"):
                assert places(*(getattr(weight, part) for weight in ours)) == places(getattr(product.weight, part))
            assert ours[0].values.data_ptr() == product.weight.values.data_ptr()
        # Those of the mapping too, or the copies would stay for as long as a caller has it.
        held = [*weights.values(), *(module.packed for module in modules.values()), *(p.weight for p in decoder.step.products())]
        assert storage_bytes(tensor for weight in held for tensor in weight.tensors) == alone
        stacks = places(*(product.weight.values for product in decoder.step.products()))
        again = FusedDecoder(model, 16)
        assert places(*(product.weight.values for product in again.step.products())) == stacks
        assert decoder.reply(PROMPT, max_new_tokens=10, eos_ids=()).ids == before
        del decoder, again
        gc.collect()
        assert ids(model) == before


def test_weights_are_counted_once_and_give_the_ratio_of_the_config(tiny_qwen3: PreTrainedModel, device: torch.device) -> None:
    model = loaded(tiny_qwen3.to(device))
    dense = weights_memory(model, {}, FusedDecoder(model.model, 32))
    others = 4 * (128 * 64 + 64 + 2 * (2 * 64 + 2 * 32))  # fp32: tied embedding, norms of layers and heads
    assert (dense["weights"], dense["parameters"], dense["packed"]) == (others + 4 * LINEARS, others + 4 * LINEARS, 0)
    assert dense["originals"] is None
    found: dict[str, dict[str, Any]] = {}
    for prefill in ("pruned", "dense"):
        # One of both, mypy takes it for any str.
        with packed_linears(model.model, packed(model.model), prefill) as modules:  # type: ignore[arg-type]
            found[prefill] = weights_memory(model, modules, FusedDecoder(model.model, 32))
            eager = weights_memory(model, modules, named(EAGER, model.model, modules, 32))
        assert eager["cache"] is None and eager["weights"] == found[prefill]["weights"]
    # Half of the fp32 values, and a bit a column.
    assert found["pruned"]["weights"] == others + 4 * LINEARS * 17 // 32
    assert found["pruned"]["parameters"] == others
    assert found["dense"]["weights"] == others + 4 * LINEARS * (32 + 17) // 32
    assert found["dense"]["originals"] == "in use"
    assert found["pruned"]["originals"] == ("main memory" if device.type == "cuda" else "kept")
    eight = weights_memory(model, {}, FusedDecoder(model.model, 32, int8=True), rounded=True)
    assert eight["parameters"] == dense["parameters"] and 0 < eight["packed"] < LINEARS * 1.5 and eight["originals"] == "kept"


def test_without_a_gpu_accounts_are_null_with_a_reason(tiny_qwen3: PreTrainedModel) -> None:
    found = weights_memory(loaded(tiny_qwen3), {}, FusedDecoder(tiny_qwen3, 32))
    for name in ("allocated", "process", "gpu"):
        assert found[name] is None and "no GPU" in found[f"{name}_reason"]


def test_one_gpu_s_accounts_are_not_those_of_a_spread_model(tiny_qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdbench.engine.resident.devices_of", lambda model: [torch.device("cuda", 0), torch.device("cuda", 1)])
    monkeypatch.setattr("sdbench.engine.resident.in_use", lambda device: InUse(900, 900, None, 900))
    one = LoadedModel(tiny_qwen3, None, resolve_model("demo", None, tiny_qwen3.device), frozenset(), "tiny", InUse(1, 1, None, 1))
    found = weights_memory(one, {}, named(EAGER, tiny_qwen3, {}, 32))
    assert found["weights"] > 0
    for name in ("allocated", "process", "gpu"):
        assert found[name] is None and "spread over several GPUs" in found[f"{name}_reason"]


def test_accounts_are_what_was_added_and_not_the_cache(tiny_qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model, moments = tiny_qwen3, iter([InUse(100, 5_000, None, 9_000), InUse(900_100, None, "NVML is out", 909_000)])
    monkeypatch.setattr("sdbench.engine.resident.in_use", lambda device: next(moments))
    one = LoadedModel(model, None, resolve_model("demo", None, model.device), frozenset(), "tiny", next(moments))
    decoder = FusedDecoder(model, 32)
    found = weights_memory(one, {}, decoder)
    assert found["cache"] == 2 * 2 * 64 * 32 * 4
    assert (found["allocated"], found["gpu"]) == (900_000 - found["cache"],) * 2
    assert (found["process"], found["process_reason"], found["allocated_reason"]) == (None, "NVML is out", None)


def test_a_tied_output_embedding_stays_and_a_part_of_a_shared_matrix_is_set_free(tiny_qwen3: PreTrainedModel) -> None:
    """q, k and v share a matrix once a dense decoder was made: v alone must not keep all of it."""
    model = tiny_qwen3
    want = ids(model)
    FusedDecoder(model, 32)
    projection = model.model.layers[0].self_attn.v_proj
    assert projection.weight.untyped_storage().nbytes() == 4 * 256 * 64
    table = model.model.embed_tokens.weight
    place = table.data_ptr()
    lm_head = {"lm_head": pack(model.lm_head.weight.detach(), keep_mask(model.lm_head.weight, PATTERN), PATTERN)}
    with packed_linears(model, packed(model, "v_proj") | lm_head, "pruned"):
        assert projection.weight.untyped_storage().nbytes() == projection.weight.nbytes
        assert table.data_ptr() == place
    assert model.lm_head.weight is table
    assert ids(model) == want


def test_without_pruned_linears_shared_matrices_stay(tiny_qwen3: PreTrainedModel) -> None:
    """A dense or rounded arm takes none apart: its decoder would have to put them together again."""
    decoder = FusedDecoder(tiny_qwen3, 32)
    projection = tiny_qwen3.model.layers[0].self_attn.v_proj.weight
    place = projection.data_ptr()
    with packed_linears(tiny_qwen3, {}, "pruned"):
        assert projection.data_ptr() == place
    # Nor does a pruned one where none of the rows' neighbours leaves.
    with packed_linears(tiny_qwen3, {name: w for name, w in packed(tiny_qwen3).items() if "layers.1" in name}, "pruned"):
        assert projection.data_ptr() == place
    del decoder
    # Another decoder finds them together already.
    FusedDecoder(tiny_qwen3, 16)
    assert projection.data_ptr() == place


def running(*processes: tuple[int, int | None]) -> Any:
    class Nvml:
        class NVMLError(Exception):
            pass

        def nvmlInit(self) -> None:
            pass

        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
            return uuid

        def nvmlDeviceGetComputeRunningProcesses(self, gpu: str) -> list[SimpleNamespace]:
            assert gpu == "GPU-1234"
            return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]

    return Nvml()


@pytest.mark.parametrize(
    ("processes", "want"),
    [
        ([(1, 10), (77, 20)], 20),
        ([(1, 10)], 10),  # alone in its container
        ([(1, 10), (2, 20)], None),
        ([], None),
        ([(77, None)], None),
        (None, None),
    ],
)
def test_memory_of_this_process_by_nvml(processes: list[tuple[int, int | None]] | None, want: int | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(memory.os, "getpid", lambda: 77)
    monkeypatch.setitem(sys.modules, "pynvml", None if processes is None else running(*processes))
    for name, value in (("synchronize", None), ("mem_get_info", (300, 1000)), ("memory_allocated", 500)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    found = in_use(torch.device("cuda", 0))
    assert (found.allocated, found.process, found.gpu, emptied) == (500, want, 700, [True])
    assert (found.process_reason is None) == (want is not None)


def test_views_count_once() -> None:
    whole = torch.zeros(8, 4)
    assert storage_bytes([whole, whole[:2], nn.Parameter(whole[3:]), torch.zeros(2)]) == 8 * 4 * 4 + 8
