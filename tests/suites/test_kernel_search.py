"""The search keeps every outcome, and nothing wrong ever wins."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
import triton

from sdbench.errors import UsageError
from sdbench.kernels.registry import Config, Variant
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.suites.kernels.operands import make_operand, reduced
from sdbench.suites.kernels.rows import most_telling
from sdbench.suites.kernels.search import LONG, SHORT, Trial, check, finalists, identity, pick, search, subset
from sdbench.suites.kernels.shapes import parse_shapes
from sdbench.suites.kernels.suite import KernelRun, run
from sdbench.timing import Times


def operand() -> Any:
    return make_operand((8, 32), torch.float32, Pattern(2, 4), torch.device("cpu"), 0)


def fake(launch: Any) -> Variant:
    return Variant("spmv", "fake", "for a test", launch, space=lambda p: [{"a": 1}, {"a": 2}], default=lambda p: {"a": 1}, needs="torch")


def right(packed: Any, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:
    return y.copy_(packed.unpack().float() @ x)


def test_a_nan_in_the_output_is_incorrect() -> None:
    """CASES 5."""

    def launch(packed: Any, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:
        right(packed, x, y, config)[3] = math.nan
        return y

    trial = check(fake(launch), operand(), {}, torch.Generator())
    assert trial.outcome == "incorrect"
    assert trial.error is not None and math.isnan(trial.error)


@pytest.mark.parametrize("place", [-1, 32])
def test_a_read_beside_x_is_incorrect_even_times_zero(place: int) -> None:
    """CASES 11."""

    def launch(packed: Any, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:
        beside = x.as_strided((1,), (1,), x.storage_offset() + place)
        return right(packed, x, y, config).add_(0 * beside)

    assert check(fake(launch), operand(), {}, torch.Generator()).outcome == "incorrect"


def test_an_output_that_is_not_written_is_incorrect() -> None:
    trial = check(fake(lambda packed, x, y, config: y), operand(), {}, torch.Generator())
    assert trial.outcome == "incorrect"


def test_what_goes_wrong_on_the_second_call_is_incorrect() -> None:
    """CASES 8: a kernel that accumulates into something it keeps is right once."""
    kept = torch.zeros(8)

    def launch(packed: Any, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:
        return y.copy_(kept.add_(packed.unpack().float() @ x))

    assert check(fake(launch), operand(), {}, torch.Generator()).outcome == "incorrect"


def test_one_bad_config_is_recorded_and_the_good_one_wins() -> None:
    """CASES 10."""

    def launch(packed: Any, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:
        if config["a"] == 1:
            raise triton.CompilationError(None, None, "no such instruction")
        return right(packed, x, y, config)

    variant, generator = fake(launch), torch.Generator()
    winner, trials = search(
        [{"a": 1}, {"a": 2}], lambda configs, replays: (timed(check(variant, operand(), c, generator)) for c in configs)
    )
    assert [trial.outcome for trial in trials] == ["compile_error", "correct"]
    assert "no such instruction" in (trials[0].message or "")
    assert winner is not None and winner.config == {"a": 2}
    assert most_telling(trials[:1]).outcome == "compile_error"


def timed(trial: Trial, p50: float = 1.0, spread: float = 0.01) -> Trial:
    return replace(trial, times=Times(p50 - spread, p50, p50 + spread)) if trial.outcome == "correct" else trial


def runs(short: dict[int, float], long: dict[int, float], wrong: tuple[int, ...] = ()) -> Callable[..., Iterator[Trial]]:
    """A search over {"splits": n} with those times, where the configs in ``wrong`` are right once and wrong when they run again."""

    def run(configs: Sequence[Config], replays: int) -> Iterator[Trial]:
        for config in configs:
            n = config["splits"]
            if replays == LONG and n in wrong:
                yield Trial(config, "incorrect", 1.0)
            else:
                yield timed(Trial(config, "correct", 0.0), (short if replays == SHORT else long)[n])

    return run


def test_the_long_timing_decides_among_the_fastest_of_the_short_one() -> None:
    short = {1: 5.0, 2: 3.0, 3: 2.0, 4: 2.5, 5: 9.0}
    winner, trials = search([{"splits": n} for n in short], runs(short, {2: 2.9, 3: 3.1, 4: 3.0}))
    assert winner is not None and winner.config == {"splits": 2}
    assert [(t.config["splits"], t.times and t.times.p50) for t in trials] == [(1, 5.0), (2, 2.9), (3, 3.1), (4, 3.0), (5, 9.0)]


def test_configs_that_turn_out_wrong_give_way_to_the_next_ones() -> None:
    short = {n: float(n) for n in range(1, 6)}
    winner, trials = search([{"splits": n} for n in short], runs(short, short, wrong=(1, 2, 3)))
    assert winner is not None and winner.config == {"splits": 4}
    assert [t.outcome for t in trials] == ["incorrect"] * 3 + ["correct"] * 2
    assert search([{"splits": 1}], runs({1: 1.0}, {}, wrong=(1,)))[0] is None


def test_as_many_configs_are_timed_at_length_as_the_noise_leaves_level() -> None:
    def field(p50s: list[float]) -> list[int]:
        return [t.config["n"] for t in finalists([timed(Trial({"n": n}, "correct"), p50) for n, p50 in enumerate(p50s)])]

    assert field([9.0, 1.0, 5.0, 3.0, 7.0]) == [1, 3, 2]
    assert field([1.0, 1.001, 1.002, 1.003, 1.004, 2.0]) == [0, 1, 2, 3, 4]
    assert len(field([1.0] * 20)) == 8


def test_ties_within_noise_go_to_the_simplest_config() -> None:
    """In every order of the trials."""
    level = [
        Trial({"splits": 4, "pdl": 0, "block": 1}, "correct", 0.0, Times(0.9, 1.0, 1.1)),
        Trial({"splits": 1, "pdl": 1, "block": 1}, "correct", 0.0, Times(1.0, 1.05, 1.2)),
        Trial({"splits": 1, "pdl": 0, "block": 8}, "correct", 0.0, Times(1.05, 1.1, 1.2)),
        Trial({"splits": 1, "pdl": 0, "block": 4}, "correct", 0.0, Times(1.1, 1.15, 1.2)),
        Trial({"splits": 1, "pdl": 0, "block": 1}, "correct", 0.0, Times(1.11, 1.15, 1.2)),  # past the fastest one's p80
        Trial({"splits": 1, "pdl": 0, "block": 0}, "incorrect", 1.0),
    ]
    for trials in permutations(level):
        winner = pick(trials)
        assert winner is not None and winner.config == {"splits": 1, "pdl": 0, "block": 4}
    assert pick(level[-1:]) is None


def test_a_quick_search_takes_the_same_few_configs_of_every_part_of_a_space() -> None:
    space = [{"block": block, "splits": splits, "pdl": pdl} for block in range(8) for splits in range(6) for pdl in (0, 1)]
    first = [{"block": 99, "splits": 0, "pdl": 0}, space[7], space[7]]
    few = subset(space, first)
    assert few == subset(space, first) and few[:2] == first[:2]
    assert len(few) == 12 == len({identity(config) for config in few})
    assert len({config["block"] for config in few[2:]}) >= 5
    assert len({config["splits"] for config in few[2:]}) >= 4
    assert {config["pdl"] for config in few[2:]} == {0, 1}
    assert subset(space[:3], [space[2]]) == [space[2], space[0], space[1]]
    assert len(subset(space, first, len(space) + 2)) == len(space) + 1


def test_what_the_variant_raises_otherwise_is_no_outcome_of_a_check() -> None:
    """The runner makes it a crash, and ends a process whose device it may have spoilt."""

    def launch(packed: Any, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        check(fake(launch), operand(), {}, torch.Generator())


def test_without_a_gpu_all_is_checked_and_nothing_timed() -> None:
    """CASES 10: right results, timings null with the reason."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    options = KernelRun([Pattern(1, 4)], {"o": (64, 2560)}, torch.bfloat16, torch.device("cpu"), ["reference", "lane_row"], 0)
    rows = run(options, None, Progress())
    assert {row["variant"] for row in rows} >= {"linear", "gemv", "reference", "lane_row"}
    for row in rows:
        if row["kernel"] == "semi_structured":  # refused without a GPU
            continue
        assert row["outcome"] == "correct", row
        assert row["us"] is None and row["us_reason"].startswith("no GPU")
        assert row["config_source"] == "default" and row["configs"] == 1
        assert set(row["speedup"].values()) == {None}
        assert row["of_shape"] == [64, 2560]


def test_unknown_names_and_widths_are_usage_errors() -> None:
    device = torch.device("cpu")
    with pytest.raises(UsageError, match="did you mean 'portable'"):
        run(KernelRun([Pattern(2, 4)], {"o": (8, 32)}, torch.bfloat16, device, ["portabel"], 0), None, Progress())
    with pytest.raises(UsageError, match=r"o: in_features 24.*M=32"):
        run(KernelRun([Pattern(16, 32)], {"o": (8, 24)}, torch.bfloat16, device, [], 0), None, Progress())


def test_shapes() -> None:
    """CASES 16: the fused shapes of Qwen3-4B."""
    assert parse_shapes("qwen3-4b") == {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)}
    assert parse_shapes("8x32, 16x64") == {"8x32": (8, 32), "16x64": (16, 64)}
    for near in ("8*32", "8X32", "8 x 32", "8\u00d732"):
        with pytest.raises(UsageError, match=r"no shape; write 8x32$"):
            parse_shapes(near)
    for bad in ("8x", "8x0", "8x32,", ""):
        with pytest.raises(UsageError, match="OUTxIN"):
            parse_shapes(bad)
    with pytest.raises(UsageError, match="qwen3-4b"):
        parse_shapes("qwen3-4bb")


def test_reduced_shapes_keep_their_odd_width() -> None:
    assert reduced((2560, 9728), Pattern(2, 4)) == (40, 164)
    assert reduced((2560, 9728), Pattern(16, 32)) == (40, 160)
    assert reduced((64, 2560), Pattern(2, 4)) == (40, 68)
    assert reduced((2560, 8), Pattern(2, 4)) == (40, 8)


@pytest.mark.parametrize("shape", [(1, 4), (7, 32), (8, 40), (41, 64), (64, 256)])
@pytest.mark.parametrize("pattern", [None, Pattern(2, 4)])
def test_small_shapes_are_checked_as_they_are(shape: tuple[int, int], pattern: Pattern | None) -> None:
    assert reduced(shape, pattern) == shape


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (8, 40)])
def test_a_check_covers_the_last_row_and_column_of_a_small_shape(shape: tuple[int, int]) -> None:
    small = make_operand(shape, torch.float32, Pattern(2, 4), torch.device("cpu"), 1)
    assert small.dense.shape == shape and small.dense[:, -1].any()

    def without_last_row(packed: Any, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:
        y = right(packed, x, y, config)
        y[-1] = 0
        return y

    def without_last_column(packed: Any, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:
        return y.copy_(packed.unpack()[:, :-1] @ x[:-1])

    found = [check(fake(launch), small, {}, torch.Generator()).outcome for launch in (right, without_last_row, without_last_column)]
    assert found == ["correct", "incorrect", "incorrect"]
