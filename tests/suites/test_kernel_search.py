"""The search keeps every outcome, and nothing wrong ever wins."""

import math

import pytest
import torch
import triton

from sdbench.errors import UsageError
from sdbench.kernels.registry import Config, Variant
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.suites.kernels.operands import make_operand, reduced
from sdbench.suites.kernels.search import check, search
from sdbench.suites.kernels.shapes import parse_shapes
from sdbench.suites.kernels.suite import KernelRun, _best, run


def operand():  # type: ignore[no-untyped-def]
    return make_operand((8, 32), torch.float32, Pattern(2, 4), torch.device("cpu"), 0)


def fake(launch) -> Variant:  # type: ignore[no-untyped-def]
    return Variant("spmv", "fake", "for a test", launch, space=lambda p: [{"a": 1}, {"a": 2}], default=lambda p: {"a": 1}, needs="torch")


def right(packed, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return y.copy_(packed.unpack().float() @ x)


def test_a_nan_in_the_output_is_incorrect() -> None:
    """CASES 5."""

    def launch(packed, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:  # type: ignore[no-untyped-def]
        right(packed, x, y, config)[3] = math.nan
        return y

    trial = check(fake(launch), operand(), {}, torch.Generator())
    assert trial.outcome == "incorrect"
    assert trial.error is not None and math.isnan(trial.error)


def test_an_output_that_is_not_written_is_incorrect() -> None:
    trial = check(fake(lambda packed, x, y, config: y), operand(), {}, torch.Generator())
    assert trial.outcome == "incorrect"


def test_what_goes_wrong_on_the_second_call_is_incorrect() -> None:
    """CASES 8: a kernel that accumulates into something it keeps is right once."""
    kept = torch.zeros(8)

    def launch(packed, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return y.copy_(kept.add_(packed.unpack().float() @ x))

    assert check(fake(launch), operand(), {}, torch.Generator()).outcome == "incorrect"


def test_one_bad_config_is_recorded_and_the_good_one_wins() -> None:
    """CASES 10."""

    def launch(packed, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:  # type: ignore[no-untyped-def]
        if config["a"] == 1:
            raise triton.CompilationError(None, None, "no such instruction")
        return right(packed, x, y, config)

    variant, generator = fake(launch), torch.Generator()
    trials = [check(variant, operand(), config, generator) for config in ({"a": 1}, {"a": 2})]
    assert [trial.outcome for trial in trials] == ["compile_error", "correct"]
    assert "no such instruction" in (trials[0].message or "")
    assert _best(trials).config == {"a": 2}
    assert _best(trials[:1]).outcome == "compile_error"


def test_a_problem_outside_a_variants_reach_is_a_constraint() -> None:
    variant = Variant(
        "spmv",
        "picky",
        "for a test",
        right,
        space=lambda p: [{}],
        default=lambda p: {},
        constraint=lambda p: "only on Sundays",
        needs="torch",
    )
    (trial,) = search(variant, operand(), torch.Generator())
    assert (trial.outcome, trial.message) == ("constraint", "only on Sundays")


def test_without_a_gpu_all_is_checked_and_nothing_timed() -> None:
    """CASES 10: right results, timings null with the reason."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    options = KernelRun([Pattern(1, 4)], {"o": (64, 2560)}, torch.bfloat16, torch.device("cpu"), ["reference", "lane_row"], 0)
    rows = run(options, None, Progress())
    assert {row["variant"] for row in rows} == {"linear", "gemv", "reference", "lane_row"}
    for row in rows:
        assert row["outcome"] == "correct", row
        assert row["us"] is None and row["us_reason"].startswith("no GPU")
        assert row["speedup"] == dict.fromkeys(("linear", "dense", "int8", "fp8"))
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
    for bad in ("8x", "8x0", "8x32,", "8*32"):
        with pytest.raises(UsageError, match="OUTxIN"):
            parse_shapes(bad)
    with pytest.raises(UsageError, match="qwen3-4b"):
        parse_shapes("qwen3-4bb")


def test_reduced_shapes_keep_their_odd_width() -> None:
    assert reduced((2560, 9728), Pattern(2, 4)) == (40, 164)
    assert reduced((2560, 9728), Pattern(16, 32)) == (40, 160)
    assert reduced((7, 32), Pattern(2, 4)) == (7, 32)
    assert reduced((64, 2560), Pattern(2, 4)) == (40, 68)
