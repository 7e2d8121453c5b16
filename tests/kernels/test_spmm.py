"""Every SpMM variant against the float64 product: on a GPU where there is one, else in Triton's interpreter."""

import math
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sdbench.errors import SdbenchError, UsageError
from sdbench.kernels import registry
from sdbench.kernels.launching import scratch
from sdbench.kernels.spmm import auto_variant, config_for, spmm
from sdbench.kernels.spmm.expand import Expanded, _constexprs, default, expand, expand_kernel, space, words_kernel
from sdbench.kernels.spmm.tile import MOST_TOKENS
from sdbench.kernels.spmm.tokens import arrange_kernel
from sdbench.kernels.spmv import problem_of
from sdbench.packing import stack_rows
from sdbench.pattern import Pattern
from sdbench.timing import relative_error, within

from .launches import Launches
from .problems import problem

VARIANTS = [variant.name for variant in registry.variants("spmm")]


def poisoned(tokens: int, in_features: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """x as rows in the middle of memory that holds NaN."""
    memory = torch.full((tokens + 2, in_features), math.nan, dtype=dtype, device=device)
    memory[1:-1] = torch.randn(tokens, in_features, generator=torch.Generator().manual_seed(tokens)).to(device, dtype)
    return memory[1:-1]


def tolerance(variant: str, dtype: torch.dtype) -> float:
    """torch rounds Y to its inputs' dtype; tiles keep float32."""
    return 1e-5 if variant == "tile" or dtype == torch.float32 else {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (7, 40), (33, 96), (20, 320)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_odd_shapes(variant: str, out_features: int, in_features: int, tokens: int, device: torch.device) -> None:
    packed, pruned = problem(out_features, in_features, Pattern(2, 4), torch.bfloat16, device)
    x = poisoned(tokens, in_features, torch.bfloat16, device)
    y = spmm(packed, x, variant, out_dtype=torch.float32)
    assert y.shape == (tokens, out_features)
    assert within(relative_error(y, x.double() @ pruned.double().T), tolerance(variant, torch.bfloat16))


@pytest.mark.parametrize("text", ["1:4", "3:4", "3:8", "4:8", "16:32", "5:32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_patterns(variant: str, text: str, device: torch.device) -> None:
    packed, pruned = problem(9, 64, Pattern.parse(text), torch.bfloat16, device)
    x = poisoned(3, 64, torch.bfloat16, device)
    refusal = registry.find("spmm", variant).constraint(problem_of(packed, 3))
    if refusal:
        with pytest.raises(SdbenchError, match="mask word"):
            spmm(packed, x, variant)
    else:
        want = x.double() @ pruned.double().T
        assert within(relative_error(spmm(packed, x, variant, out_dtype=torch.float32), want), tolerance(variant, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("variant", ["expand", "reference"])
def test_dtypes(variant: str, dtype: torch.dtype, device: torch.device) -> None:
    packed, pruned = problem(5, 64, Pattern(2, 4), dtype, device)
    x = poisoned(20, 64, dtype, device)
    assert within(relative_error(spmm(packed, x, variant), x.double() @ pruned.double().T), tolerance(variant, dtype))


@pytest.mark.parametrize("text", ["2:4", "4:8", "16:32", "1:4", "7:8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_expanded_rows_are_the_packed_ones_bit_for_bit(text: str, dtype: torch.dtype, device: torch.device) -> None:
    packed, pruned = problem(37, 96, Pattern.parse(text), dtype, device)
    tiles = {(config["words"], config["block_out"], config["block_in"]): config for config in space(problem_of(packed, 40))}
    assert {words for words, *_ in tiles} == ({0, 1} if dtype == torch.bfloat16 and text != "7:8" else {0})
    for config in tiles.values():
        dense = torch.full((20, 96), math.nan, dtype=dtype, device=device)
        expand(packed, slice(11, 31), dense, config)
        assert torch.equal(dense, pruned[11:31])


def test_rows_of_a_stack_unfold_as_their_own(device: torch.device) -> None:
    parts = [problem(rows, 96, Pattern(16, 32), torch.bfloat16, device) for rows in (8, 24)]
    stack_rows([packed for packed, _ in parts])
    for packed, pruned in parts:
        dense = torch.full((5, 96), math.nan, dtype=torch.bfloat16, device=device)
        expand(packed, slice(2, 7), dense, {"words": 1, "block_out": 16, "block_in": 128, "num_warps": 2})
        assert packed.pitch == 32 and torch.equal(dense, pruned[2:7])


@pytest.mark.parametrize("words", [0, 1])
def test_a_kernel_that_is_not_looked_up_again_gets_the_same_arguments(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of its parameters, and only where they are what it was compiled for: on the current GPU, of weights that lie so."""
    current: list[int | None] = [None]
    kernel = Launches()
    monkeypatch.setattr("sdbench.kernels.spmm.expand." + ("words_kernel" if words else "expand_kernel"), kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    packed, _ = problem(32, 96, Pattern(2, 4), torch.bfloat16, torch.device("cpu"))
    config = {"words": words, "block_out": 16, "block_in": 128, "num_warps": 2, "piece": 24}
    names = (words_kernel if words else expand_kernel).arg_names
    assert names[5:] == list(_constexprs(problem_of(packed), config, False))
    x, product = torch.zeros(40, 96, dtype=torch.bfloat16), Expanded(packed, config)

    def looked_up() -> int:
        before = kernel.looked_up
        product.multiply(x, x.dtype)
        return kernel.looked_up - before

    current[0] = 1
    assert [looked_up() for _ in range(2)] == [2, 2], "compiled for another GPU"
    current[0] = None
    assert [looked_up() for _ in range(3)] == [2, 0, 0]
    # Two pieces a product, each a launch.
    assert kernel.seen[4:6] == kernel.seen[6:8] == kernel.seen[8:10] and kernel.seen[4] != kernel.seen[5]
    others, _ = problem(16, 96, Pattern(2, 4), torch.bfloat16, torch.device("cpu"))
    stack_rows([packed, others])
    assert [looked_up() for _ in range(2)] == [2, 0], "steps of another length"
    packed.values.data = packed.values.new_empty_strided(packed.values.shape, packed.values.stride()).copy_(packed.values)
    assert [looked_up() for _ in range(2)] == [2, 0], "moved"


def test_scratch_grows_by_giving_back_what_became_too_small() -> None:
    """On the default stream, which no CUDA graph captures; of one memory are all views."""
    device, use = torch.device("cpu"), "growing"
    small = scratch(use, (2, 8), torch.float32, device)
    memory = StorageWeakRef(small.untyped_storage())
    assert scratch(use, (2, 8), torch.float32, device) is small
    del small
    large = scratch(use, (4, 8), torch.float32, device)
    assert memory.expired() and large.shape == (4, 8)
    for shape in ((3, 5), (2, 8)):
        assert scratch(use, shape, torch.float32, device).data_ptr() == large.data_ptr()
    assert scratch("another", (2, 8), torch.float32, device).data_ptr() != large.data_ptr()


def test_an_input_that_wants_a_gradient(device: torch.device) -> None:
    """As in a loaded model that is called outside of no_grad: its embedding wants one."""
    packed, pruned = problem(37, 64, Pattern(2, 4), torch.float32, device)
    x = poisoned(5, 64, torch.float32, device).requires_grad_()
    assert within(relative_error(spmm(packed, x, "expand").detach(), x.double() @ pruned.double().T), 1e-5)


def test_pieces_give_what_the_whole_gives(device: torch.device) -> None:
    packed, _ = problem(37, 64, Pattern(2, 4), torch.float32, device)
    x = poisoned(5, 64, torch.float32, device)
    variant = registry.find("spmm", "expand")
    config = default(problem_of(packed, 5))
    whole = variant.launch(packed, x, x.new_empty(5, 37), config)
    pieces = variant.launch(packed, x, x.new_empty(5, 37), {**config, "piece": 16})
    assert within(relative_error(pieces, whole.double()), 1e-6)


@pytest.mark.parametrize(("tokens", "in_features"), [(8, 128), (3, 160), (20, 72)])
def test_arranged_tokens_lie_as_warps_read_them(tokens: int, in_features: int, device: torch.device) -> None:
    x = torch.randn(tokens, in_features, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    words, tiles = -(-in_features // 32), -(-tokens // 8)
    fragments = torch.full((tiles, -(-words // 4), 4, 32, 8), math.nan, dtype=torch.bfloat16, device=device)
    arrange_kernel[fragments.shape[1], tiles](
        x.view(torch.int64), fragments.view(torch.int64), tokens, in_features, bool(in_features % 128), 0, num_warps=4
    )
    whole = torch.zeros(tiles * 8, fragments.shape[1] * 128, dtype=torch.bfloat16, device=device)
    whole[:tokens, :in_features] = x
    # Token 8 tile + g, column 128 quad + 32 word + 8 piece + i.
    want = whole.view(tiles, 8, -1, 4, 4, 8).permute(0, 2, 4, 1, 3, 5).reshape(fragments.shape)
    assert torch.equal(fragments, want)


@pytest.mark.parametrize(
    ("block_out", "block_words", "warp_rows", "splits"),
    [(16, 4, 16, 1), (16, 8, 16, 2), (32, 4, 16, 3), (32, 8, 32, 1), (64, 16, 32, 2), (16, 32, 16, 1)],
)
@pytest.mark.parametrize(("tokens", "block_tokens"), [(3, 8), (11, 8), (16, 16), (20, 32)])
@pytest.mark.parametrize(
    ("arranged", "ahead"), [(0, 1), *(pytest.param(*both, marks=pytest.mark.gpu) for both in ((0, 0), (1, 0), (1, 1)))]
)
def test_configs_of_the_tiles(block_out: int, block_words: int, warp_rows: int, splits: int, tokens: int, block_tokens: int,
                              arranged: int, ahead: int, device: torch.device) -> None:  # fmt: skip
    """Warps side by side along rows and along words (more of them than a thread has sums), splits and steps that do not divide the
    words, several blocks of tokens. In the interpreter neither the order of x nor that of loads is another.
    """
    packed, pruned = problem(53, 360, Pattern(4, 8), torch.bfloat16, device)
    x = poisoned(tokens, 360, torch.bfloat16, device)
    y = torch.full((tokens, 53), math.nan, device=device)
    config = {"block_out": block_out, "block_words": block_words, "warp_rows": warp_rows, "block_tokens": block_tokens}
    config |= {"splits": splits, "arranged": arranged, "pdl": 0, "memory_rows": 0, "ahead": ahead}
    registry.find("spmm", "tile").launch(packed, x, y, config)
    assert within(relative_error(y, x.double() @ pruned.double().T), 1e-5)


@pytest.mark.parametrize("text", ["2:4", "16:32"])
@pytest.mark.parametrize("memory_rows", [0, 1, 2])
def test_rows_of_tiles_through_memory_and_by_permutes(text: str, memory_rows: int, device: torch.device) -> None:
    packed, pruned = problem(53, 352, Pattern.parse(text), torch.bfloat16, device)
    x = poisoned(11, 352, torch.bfloat16, device)
    y = torch.full((11, 53), math.nan, device=device)
    tile = registry.find("spmm", "tile")
    tile.launch(packed, x, y, {**tile.default(problem_of(packed, 11)), "memory_rows": memory_rows})
    assert within(relative_error(y, x.double() @ pruned.double().T), 1e-5)


@pytest.mark.parametrize("text", ["2:8", "6:8", "4:16", "12:16", "8:32", "24:32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_and_rows_of_every_pattern_with_whole_chunks(text: str, dtype: torch.dtype, device: torch.device) -> None:
    packed, pruned = problem(18, 160, Pattern.parse(text), dtype, device)
    x = poisoned(5, 160, dtype, device)
    assert within(relative_error(spmm(packed, x, "tile", out_dtype=torch.float32), x.double() @ pruned.double().T), 1e-5)
    dense = torch.full((18, 160), math.nan, dtype=dtype, device=device)
    assert torch.equal(expand(packed, slice(0, 18), dense, default(problem_of(packed, 5))), pruned)


def test_what_is_not_finite_stays_in_its_token(device: torch.device) -> None:
    """Tokens and words past an edge are never read; a token that holds NaN spoils its own products alone."""
    packed, pruned = problem(20, 72, Pattern(2, 4), torch.bfloat16, device)
    x = poisoned(3, 72, torch.bfloat16, device).clone()
    x[1, 40] = math.nan
    y = spmm(packed, x, "tile", out_dtype=torch.float32)
    assert y[1].isnan().all()
    assert within(relative_error(y[::2], x[::2].double() @ pruned.double().T), 1e-5)


def test_leading_dimensions_and_no_tokens(device: torch.device) -> None:
    packed, pruned = problem(6, 32, Pattern(2, 4), torch.float32, device)
    x = torch.randn(2, 3, 32, device=device)
    assert within(relative_error(spmm(packed, x), x.double() @ pruned.double().T), 1e-5)
    assert spmm(packed, x[:0]).shape == (0, 3, 6)


def test_refusals(device: torch.device) -> None:
    packed, _ = problem(6, 32, Pattern(2, 4), torch.bfloat16, device)
    with pytest.raises(SdbenchError, match="rows of 32 elements"):
        spmm(packed, torch.zeros(2, 31, device=device))
    with pytest.raises(SdbenchError, match=f"{MOST_TOKENS} tokens at most, not 65"):
        spmm(packed, torch.zeros(65, 32, device=device), "tile")
    with pytest.raises(UsageError, match="did you mean 'tile'"):
        spmm(packed, torch.zeros(2, 32, device=device), "tlie")


def test_tiles_need_matrix_instructions(device: torch.device) -> None:
    packed, _ = problem(6, 32, Pattern(2, 4), torch.bfloat16, device)
    constraint = registry.find("spmm", "tile").constraint
    assert "8.0, and this is 7.5" in str(constraint(replace(problem_of(packed, 4), capability=75)))
    assert [constraint(replace(problem_of(packed, 4), capability=capability)) for capability in (0, 80, 90)] == [None] * 3


def test_which_variant(device: torch.device) -> None:
    packed, _ = problem(6, 32, Pattern(2, 4), torch.bfloat16, device)
    wide, _ = problem(6, 32, Pattern(2, 4), torch.float32, device)
    on_gpu = device.type == "cuda"
    assert [auto_variant(packed, tokens) for tokens in (2, 32, 33)] == (["tile", "tile", "expand"] if on_gpu else ["reference"] * 3)
    assert auto_variant(wide, 2) == ("expand" if on_gpu else "reference")


def test_configs_are_looked_up_for_the_next_larger_number_of_tokens(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = problem(6, 32, Pattern(2, 4), torch.bfloat16, device)
    asked: list[int] = []
    monkeypatch.setattr("sdbench.kernels.spmm.choose", lambda packed, variant, problem: asked.append(problem.tokens) or {"found": 1})
    tile = registry.find("spmm", "tile")
    found = [config_for(packed, tile, tokens) for tokens in (1, 2, 3, 8, 9, 32, 33)]
    assert asked == [2, 2, 4, 8, 16, 32]
    assert found == [{"found": 1}] * 6 + [tile.default(problem_of(packed, 33))]
    assert config_for(packed, registry.find("spmm", "reference"), 2) == {}


@pytest.mark.parametrize("tokens", [2, 5, 32])
@pytest.mark.parametrize(("out_features", "in_features", "splits"), [(7, 40, 1), (33, 300, 1), (33, 300, 2), (7, 300, 4)])
def test_the_dense_baseline_of_a_few_tokens(tokens: int, out_features: int, in_features: int, splits: int, device: torch.device) -> None:
    """The last of four splits of 300 columns has none."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(device, torch.bfloat16)
    x, y = poisoned(tokens, in_features, torch.bfloat16, device), torch.full((tokens, out_features), math.nan, device=device)
    gemm = registry.find("dense", "gemm")
    gemm.launch(weight, x, y, {"block_out": 16, "block_k": 128, "num_warps": 4, "stages": 3, "splits": splits, "pdl": 0})
    assert within(relative_error(y, x.double() @ weight.double().T), 1e-5)
    assert [gemm.serves(count) for count in (1, 2, 32, 33)] == [False, True, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 4, 8, 16, 32, 50, 100])
@pytest.mark.parametrize("text", ["2:4", "16:32"])
def test_configs_all_over_the_space_are_right(text: str, tokens: int, device: torch.device) -> None:
    """On real sizes, few rows and many, ragged rows and a padded last word, with and without dependent launch."""
    generator = torch.Generator(device).manual_seed(tokens)
    for out_features, in_features in ((2560, 4096), (6144, 2560), (4239, 2592), (1003, 2592)):
        packed, pruned = problem(out_features, in_features, Pattern.parse(text), torch.bfloat16, device)
        described = problem_of(packed, tokens)
        dense = pruned.clone()
        products = (("spmm", "tile", packed), ("spmm", "expand", packed), ("dense", "gemm", dense))
        for kernel, name, weight in products:
            variant = registry.find(kernel, name)
            if not variant.serves(tokens):
                continue
            # Every inner loop of a space has one to three values, so that a step of 11 meets all of them.
            for config in variant.space(described)[::11]:
                x = torch.randn(tokens, in_features, generator=generator, device=device).bfloat16()
                y = torch.full((tokens, out_features), math.nan, device=device)
                got = variant.launch(weight, x, y, config)
                error = relative_error(got, x.double() @ pruned.double().T)
                assert within(error, 5e-3 if got.dtype == torch.bfloat16 else 1e-5), (name, config, error)
