import pytest
from torch import nn
from transformers import PreTrainedModel

from sdbench.calibrate.select import select_linears
from sdbench.errors import ExitCode, SdbenchError, UsageError

PER_LAYER = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("fixture", ["tiny_qwen3", "tiny_llama"])
def test_case_16_all_linears_but_the_output_embedding(fixture: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(fixture)
    chosen = select_linears(model)
    assert len(chosen) == 14
    assert {name.rpartition(".")[2] for name in chosen} == PER_LAYER
    assert chosen["model.layers.1.mlp.down_proj"] is model.model.layers[1].mlp.down_proj


def test_a_pattern_matches_the_last_component_or_the_full_name(tiny_llama: PreTrainedModel) -> None:
    assert list(select_linears(tiny_llama, ["down_proj"])) == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    assert len(select_linears(tiny_llama, ["model.layers.0.*"])) == 7
    assert len(select_linears(tiny_llama, ["*mlp*", "[qk]_proj"])) == 10
    assert len(select_linears(tiny_llama, ["*"])) == 14


def test_ignore_narrows_what_targets_took(tiny_llama: PreTrainedModel) -> None:
    assert list(select_linears(tiny_llama, ["*.mlp.*"], ["model.layers.1.*", "up_proj"])) == [
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.down_proj",
    ]


@pytest.mark.parametrize(("targets", "ignore"), [(["dwn_proj"], []), (["*"], ["dwn_proj"]), (["up_proj", "dwn_proj"], [])])
def test_case_22_a_pattern_that_matches_nothing_is_named(tiny_llama: PreTrainedModel, targets: list[str], ignore: list[str]) -> None:
    with pytest.raises(UsageError, match=r"pattern 'dwn_proj' matches no linear layer; did you mean down_proj") as caught:
        select_linears(tiny_llama, targets, ignore)
    assert caught.value.exit_code == ExitCode.USAGE


def test_case_22_a_pattern_like_no_name_lists_the_names(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match=r"'experts' matches no .* known: q_proj, k_proj"):
        select_linears(tiny_llama, ["experts"])


def test_a_norm_is_no_linear(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="input_layernorm"):
        select_linears(tiny_llama, ["input_layernorm"])


@pytest.mark.parametrize("fixture", ["tiny_qwen3", "tiny_llama"])
def test_output_embedding_is_never_taken(fixture: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(fixture)
    with pytest.raises(UsageError, match="'lm_head' matches only lm_head, an embedding matrix"):
        select_linears(model, ["lm_head"])
    # Ignoring what is left out anyway is a habit from other tools, not a mistake.
    assert len(select_linears(model, ignore=["lm_head"])) == 14


def test_a_linear_tied_to_the_input_embedding_stays_dense(tiny_llama: PreTrainedModel) -> None:
    head = nn.Linear(64, 128, bias=False)
    tiny_llama.add_module("extra_head", head)
    assert len(select_linears(tiny_llama)) == 15
    table = tiny_llama.get_input_embeddings()
    assert isinstance(table, nn.Embedding)
    head.weight = table.weight
    assert len(select_linears(tiny_llama)) == 14


def test_nothing_left_has_its_own_exit_code(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(SdbenchError, match="no linear layer to prune") as caught:
        select_linears(tiny_llama, ["up_proj"], ["*.mlp.*"])
    assert caught.value.exit_code == ExitCode.NOTHING_SELECTED
