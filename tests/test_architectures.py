import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sdbench.architectures import ARCHITECTURES, find_architecture, fused_shapes, linear_shapes, named_shapes
from sdbench.errors import UsageError


def test_case_16_qwen3_4b_shapes():
    config = ARCHITECTURES["qwen3-4b"].config
    assert linear_shapes(config) == {
        "q_proj": (4096, 2560),
        "k_proj": (1024, 2560),
        "v_proj": (1024, 2560),
        "o_proj": (2560, 4096),
        "gate_proj": (9728, 2560),
        "up_proj": (9728, 2560),
        "down_proj": (2560, 9728),
    }
    assert named_shapes("qwen3-4b") == {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)}
    assert named_shapes("Qwen/Qwen3-4B-Instruct-2507") == named_shapes("Qwen3-4B")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # Published parameter counts, embeddings included.
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.721),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
        ("qwen3-14b", 14.768),
        ("qwen3-32b", 32.762),
        ("llama-3.1-8b", 8.030),
        ("llama-3.3-70b", 70.554),
        ("smollm2-135m", 0.1345),
    ],
)
def test_parameter_count_and_shapes_of_the_real_model(name, billions):
    fields = dict(ARCHITECTURES[name].config)
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        config.num_hidden_layers = 1
        one = AutoModelForCausalLM.from_config(config)
    layer = one.model.layers[0]
    per_layer = sum(p.numel() for p in layer.parameters())
    total = sum(p.numel() for p in one.parameters()) + per_layer * (fields["num_hidden_layers"] - 1)
    assert total / 1e9 == pytest.approx(billions, rel=1e-3)
    linears = {path.split(".")[-1]: tuple(m.weight.shape) for path, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linears == linear_shapes(fields) == linear_shapes(config.to_dict())


def test_widths_without_head_dim_or_grouped_heads():
    config = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3}
    assert fused_shapes(config) == {"qkv": (288, 96), "o": (96, 96), "gate_up": (320, 96), "down": (96, 160)}


def test_every_hub_id_leads_to_its_architecture():
    for known in ARCHITECTURES.values():
        assert find_architecture(known.name) is known
        for hub_id in known.hub_ids:
            assert find_architecture(hub_id) is known
    assert find_architecture("Qwen/Qwen3-4B-Instruct-2507-FP8") is None


def test_unknown_name_is_answered_with_the_closest():
    with pytest.raises(UsageError, match="unknown architecture 'qwen-4b': did you mean 'qwen3-4b'"):
        named_shapes("qwen-4b")
    with pytest.raises(UsageError, match="did you mean 'qwen3-4b'"):
        named_shapes("Qwen/Qwen3-4B-Instruct")
    with pytest.raises(UsageError, match=r"^unknown architecture 'xyz': known: qwen3-0\.6b"):
        named_shapes("xyz")


def test_the_table_needs_neither_torch_nor_transformers():
    code = "import sys, sdbench.architectures; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
