"""What competes with pruning, in the same table: int8 weights and another dense model; and arms that memory does not reach for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from triton.runtime.errors import PTXASError

from sdbench.calibrate.select import select_linears
from sdbench.demo import MODEL_DIR
from sdbench.engine.fused import FusedDecoder, Unfusable
from sdbench.engine.packed_linear import PackedLinear
from sdbench.engine.paths import EAGER, FUSED, FUSED_GRAPH, FUSED_INT8
from sdbench.errors import SdbenchError, UsageError
from sdbench.kernels.quantized.weights import quantize
from sdbench.models import resolve_model
from sdbench.progress import Progress
from sdbench.results import RunDirectory, read_jsonl
from sdbench.suites.e2e import runner
from sdbench.suites.e2e.data import load
from sdbench.suites.e2e.failures import put_back
from sdbench.suites.e2e.options import E2EOptions
from sdbench.suites.e2e.report import of_run
from sdbench.suites.e2e.rounding import round_linears
from sdbench.suites.e2e.suite import Outcome, run
from sdbench.suites.runs import read_run

from .asking import small_run

CPU = torch.device("cpu")
REPLY, EQUAL = 8, 12


@pytest.fixture
def tiny(tiny_qwen3: PreTrainedModel, tmp_path: Path) -> Path:
    """A random checkpoint with the demo model's tokenizer."""
    return save(tiny_qwen3, tmp_path / "tiny")


def save(model: PreTrainedModel, folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(1024, mean_resizing=False)
    model.generation_config = GenerationConfig.from_pretrained(MODEL_DIR)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(folder)
    return folder


def options(model: Path | str, rival: Path | str | None = None, **changes: object) -> E2EOptions:
    other = resolve_model(str(rival), None, CPU) if rival else None
    standard: dict[str, object] = {"method": "magnitude", "max_tokens": REPLY, "equal_tokens": EQUAL, "warmup_tokens": 0, "rival": other}
    return small_run(model, **standard | changes)


def run_in(path: Path, wanted: E2EOptions) -> Outcome:
    with RunDirectory.open(path, "e2e", wanted.arguments(), {"machine": "a test"}) as directory:
        return run(wanted, load(wanted), directory, Progress())


def replies(path: Path, arm: str) -> list[list[int]]:
    return [sample["ids"] for sample in read_jsonl(path / "samples.jsonl") if sample["arm"] == arm]


class TestInt8:
    def test_answers_are_those_of_a_checkpoint_of_rounded_weights(self, tiny: Path, tmp_path: Path) -> None:
        """Prompt and reply: as if the rounded weights had been saved and run as a dense model."""
        outcome = run_in(tmp_path / "run", options(tiny, alternatives=True, fidelity="also"))
        assert [arm["arm"] for arm in outcome.arms] == ["dense", "magnitude", "int8"]
        model = AutoModelForCausalLM.from_pretrained(tiny)
        for linear in select_linears(model).values():
            linear.weight.data = quantize(linear.weight.data, "int8").dequantize().float()
        rounded = save(model, tmp_path / "rounded")
        run_in(tmp_path / "dense", options(rounded))
        assert replies(tmp_path / "run", "int8") == replies(tmp_path / "dense", "dense") != []

        dense, pruned, int8 = outcome.arms
        assert (int8["pattern"], int8["method"], int8["examples"], int8["graded"]) == (None, None, 3, 3)
        assert int8["equal_tokens"] == EQUAL and int8["decode_rate"] > 0
        # No int8 product runs here, so that its rate says nothing about int8.
        assert int8["speedup"] is int8["net_speedup"] is None
        assert (
            int8["speedup_reason"] == int8["net_speedup_reason"] == "without a GPU its weights run as the dense values that they stand for"
        )
        assert int8["kernel_calls"] == int8["expected_kernel_calls"] == 0
        for prefill in ("pruned", "dense"):
            assert 0 < int8["fidelity"][prefill]["kl"] < 0.1 * pruned["fidelity"][prefill]["kl"]
        # Codes and one float32 scale a row in place of float32 weights.
        linears = select_linears(model)
        saved = sum(linear.weight.nbytes - quantize(linear.weight.data, "int8").nbytes for linear in linears.values())
        assert dense["step_bytes"] - int8["step_bytes"] == saved > 0

    def test_all_linears_are_rounded_whatever_is_pruned(self, tiny: Path, tmp_path: Path) -> None:
        for name, targets in (("all", ()), ("some", ("*.mlp.*",))):
            run_in(tmp_path / name, options(tiny, alternatives=True, targets=targets, fidelity="also"))
        assert replies(tmp_path / "all", "int8") == replies(tmp_path / "some", "int8")
        assert replies(tmp_path / "all", "magnitude") != replies(tmp_path / "some", "magnitude")

    def test_the_model_is_left_as_it_was(self, tiny_qwen3: PreTrainedModel) -> None:
        before = {name: linear.weight.clone() for name, linear in select_linears(tiny_qwen3).items()}
        rounded = round_linears(tiny_qwen3)
        assert rounded.keys() == before.keys()
        for name, weight in before.items():
            assert torch.equal(tiny_qwen3.get_submodule(name).weight, weight)
            # Half a step at most, and a step is the row's largest weight over 127.
            step = weight.abs().amax(1, keepdim=True) / 127
            assert ((rounded[name].matrix - weight).abs() <= 0.501 * step).all() and not torch.equal(rounded[name].matrix, weight)

    def test_by_fidelity_alone(self, tiny: Path) -> None:
        wanted = options(tiny, alternatives=True, fidelity="only")
        int8 = run(wanted, load(wanted), None, Progress()).arms[2]
        assert int8["decode_rate"] is None and int8["examples"] == 0 and int8["fidelity"]["pruned"]["kl"] > 0


NO_ROOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"


class TestAnArmThatMemoryDoesNotReachFor:
    """It is a row with the reason, and the other arms are judged as ever."""

    @staticmethod
    @contextmanager
    def failing(name: str, arm: str | None = None, error: Exception | None = None) -> Iterator[None]:
        """Inside, a step of the runner runs out of memory, of one arm alone where it is named."""
        made = getattr(runner, name)

        def fails(*arguments: Any, **others: Any) -> Any:
            if arm is None or arguments[0].arm == arm:
                raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has")
            return made(*arguments, **others)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, name, fails)
            yield

    @pytest.mark.parametrize(
        ("step", "arm", "failed"),
        [
            ("round_linears", None, "int8"),
            ("answer_runs", "int8", "int8"),
            ("prune", None, "magnitude"),
            ("answer_runs", "magnitude", "magnitude"),
        ],
    )
    @pytest.mark.parametrize("fidelity", ["no", "also"])
    def test_no_figure_of_it(self, step: str, arm: str | None, failed: str, fidelity: str, tiny: Path, tmp_path: Path) -> None:
        wanted = options(tiny, alternatives=True, fidelity=fidelity)
        with self.failing(step, arm):
            outcome = run_in(tmp_path / "run", wanted)
        assert [row["arm"] for row in outcome.arms] == ["dense", "magnitude", "int8"]
        for row in outcome.arms:
            if row["arm"] != failed:
                assert row["decode_rate"] > 0 and row["examples"] == 3 and "outcome" not in row
                continue
            assert (row["outcome"], row["reason"]) == ("out_of_resources", NO_ROOM)
            for name in ("decode_rate", "speedup", "ceiling", "peak_bytes", "memory", "answer_match", "eos", "truncated", "fidelity"):
                assert row[name] is None, name
            for name in ("speedup", "ceiling", "peak_bytes", "memory", "quality"):
                assert row[f"{name}_reason"] == f"not measured: {NO_ROOM}", name
            assert row["fidelity_reason"] == (None if fidelity == "no" else f"not measured: {NO_ROOM}")
            assert (row["kernel_calls"], row["expected_kernel_calls"], row["examples"]) == (0, 0, 0)
        read = read_run(tmp_path / "run")
        found = of_run(read)
        assert read.record.outcome == "complete" and len(found.cells) == 3
        assert next(cells for cells in found.cells if cells[0] == failed) == [failed, *["-"] * 6, "0", "-"]
        assert f"{failed}: not measured, out_of_resources ({NO_ROOM})" in found.lines
        assert "".join(found.lines).count(NO_ROOM) == 1
        # The same command asks again.
        again = run_in(tmp_path / "run", wanted)
        assert all(row["decode_rate"] > 0 and "outcome" not in row for row in again.arms)
        assert not any(NO_ROOM in line for line in of_run(read_run(tmp_path / "run")).lines)

    @pytest.mark.parametrize("failed", ["dense", "magnitude", "int8"])
    def test_no_rate_of_it(self, failed: str, tiny: Path, tmp_path: Path) -> None:
        with self.failing("rate_runs", failed):
            outcome = run_in(tmp_path / "run", options(tiny, alternatives=True))
        for row in outcome.arms:
            assert row["examples"] == 3 and row["eos"] is not None and row["quality_reason"] is None
            assert row["kernel_calls"] == row["expected_kernel_calls"]
            assert (row["kernel_calls"] > 0) == (row["arm"] == "magnitude")
            if row["arm"] != failed:
                assert row["decode_rate"] > 0 and "outcome" not in row
            else:
                assert (row["outcome"], row["reason"], row["decode_rate"]) == ("out_of_resources", NO_ROOM, None)
                assert row["speedup_reason"] == row["net_speedup_reason"] == f"not measured: {NO_ROOM}"
        if failed == "dense":
            assert (outcome.arms[1]["speedup"], outcome.arms[1]["speedup_reason"]) == (None, "no baseline rate")
        found = of_run(read_run(tmp_path / "run"))
        assert f"{failed}: not timed, out_of_resources ({NO_ROOM})" in found.lines
        assert "".join(found.lines).count(NO_ROOM) == 1

    def test_a_kernel_that_does_not_compile(self, tiny: Path) -> None:
        wanted = options(tiny, alternatives=True)
        with self.failing("rate_runs", "magnitude", PTXASError("ptxas fatal")):
            _, pruned, int8 = run(wanted, load(wanted), None, Progress()).arms
        assert pruned["outcome"] == "compile_error" and "ptxas fatal" in pruned["reason"] and int8["decode_rate"] > 0

    def test_without_dense_answers_there_is_nothing_to_compare_with(self, tiny: Path, tmp_path: Path) -> None:
        with self.failing("answer_runs", "dense"), pytest.raises(torch.OutOfMemoryError):
            run_in(tmp_path / "run", options(tiny, alternatives=True))

    def test_weights_that_were_left_elsewhere_come_back(self) -> None:
        """Putting originals back after a pruned arm may itself find no room, as long as the failed step still holds its own."""
        linears: dict[str, Any] = {name: SimpleNamespace(weight=SimpleNamespace(data=torch.ones(2))) for name in ("there", "elsewhere")}
        before = linears["there"].weight.data
        put_back(linears, {"there": CPU, "elsewhere": torch.device("meta")})
        assert linears["there"].weight.data is before and linears["elsewhere"].weight.data.device.type == "meta"


@pytest.mark.gpu
class TestInt8OnAGpu:
    def test_decodes_through_the_int8_products(self, tiny: Path, tmp_path: Path) -> None:
        wanted = options(
            tiny, alternatives=True, fidelity="also", device=torch.device("cuda"), dtype=torch.bfloat16, compile_baseline=False
        )
        dense, _, int8 = run_in(tmp_path / "run", wanted).arms
        assert (dense["path"], int8["path"]) == (FUSED_GRAPH, FUSED_INT8)
        assert int8["speedup"] > 0 and int8["ceiling"] > dense["ceiling"] and int8["path_reason"] is None
        assert len(replies(tmp_path / "run", "int8")) == 3
        assert 0 < int8["fidelity"]["pruned"]["kl"] < 0.1

    def test_without_a_fused_step_there_is_no_int8_rate(self, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise Unfusable("no fused step: a test")

        monkeypatch.setattr("sdbench.engine.decoders.FusedDecoder", refuse)
        wanted = options(tiny, alternatives=True, device=torch.device("cuda"), dtype=torch.bfloat16, compile_baseline=False)
        int8 = run_in(tmp_path / "run", wanted).arms[2]
        assert (int8["decode_rate"], int8["examples"]) == (None, 3)
        assert int8["speedup_reason"] == "int8 weights have a kernel in the fused step alone: no fused step: a test"


def test_a_speed_up_is_of_one_loop(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense weights that had no fused step to run in would lend theirs to the pruned ones."""

    def refuse_dense(model: Any, *arguments: Any, **others: Any) -> Any:
        if not any(isinstance(module, PackedLinear) for module in model.modules()):
            raise Unfusable("no fused step: a test")
        return FusedDecoder(model, *arguments, **others)

    monkeypatch.setattr("sdbench.engine.decoders.FusedDecoder", refuse_dense)
    dense, control = run_in(tmp_path / "run", options(tiny)).arms
    assert (dense["path"], control["path"], control["speedup"]) == (EAGER, FUSED, None)
    assert control["speedup_reason"] == f"decoded by another loop than dense weights ({FUSED}, not {EAGER})"
    lines = of_run(read_run(tmp_path / "run")).lines
    assert any(line.startswith(f"decode loop of dense: {EAGER} (no fused step") for line in lines)
    assert any(f"no speed-up for {control['arm']}: decoded by another loop" in line for line in lines)


class TestRival:
    def test_judged_as_if_alone(self, tiny: Path, tmp_path: Path) -> None:
        """Answers are those that the other model gives as a run's dense model."""
        outcome = run_in(tmp_path / "run", options(tiny, "demo", fidelity="also", max_tokens=60))
        dense, _, other = outcome.arms
        alone = run_in(tmp_path / "alone", options("demo", max_tokens=60)).arms[0]
        assert replies(tmp_path / "run", "demo") == replies(tmp_path / "alone", "dense") != []
        same = ("answer_match", "examples", "eos", "truncated", "reply_tokens", "step_bytes", "loops")
        assert {name: other[name] for name in same} == {name: alone[name] for name in same}
        assert (other["arm"], other["pattern"], other["equal_tokens"]) == ("demo", None, EQUAL)
        # One tokenizer, so that tokens and their rates are alike.
        assert other["speedup"] == pytest.approx(other["decode_rate"] / dense["decode_rate"])
        assert other["length_ratio"] is not None
        assert other["fidelity"] is None and "another model" in other["fidelity_reason"]
        lines = of_run(read_run(tmp_path / "run")).lines
        assert "demo: another dense model, on the same questions with its own tokenizer" in lines
        assert any(line.startswith("no fidelity: another model") for line in lines)

    def test_tokens_of_another_vocabulary_are_not_compared(self, tiny: Path, tmp_path: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny)
        tokenizer.add_tokens(["sheep"])
        tokenizer.save_pretrained(tiny)
        outcome = run_in(tmp_path / "run", options("demo", tiny, max_tokens=60))
        other = outcome.arms[2]
        for name in ("speedup", "length_ratio", "net_speedup"):
            assert other[name] is None and "another vocabulary" in other[f"{name}_reason"]
        assert other["decode_rate"] > 0 and other["reply_tokens"] > 0

    def test_a_resumed_run_does_not_ask_again(self, tiny: Path, tmp_path: Path) -> None:
        wanted = options(tiny, "demo")
        first = run_in(tmp_path / "run", wanted)
        second = run_in(tmp_path / "run", wanted)
        assert len(replies(tmp_path / "run", "demo")) == 3
        assert first.arms[2]["answer_match"] == second.arms[2]["answer_match"]

    def test_random_models_are_timed(self, tiny: Path) -> None:
        wanted = options(f"random:{tiny}", f"random:{tiny}")
        other = run(wanted, None, None, Progress()).arms[2]
        assert other["examples"] == 0 and other["decode_rate"] > 0 and other["speedup"] > 0

    def test_a_missing_model_is_told_before_any_work(self, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        with pytest.raises(SdbenchError, match="the hub cannot be reached"):
            run_in(tmp_path / "run", options(tiny, "nobody/nothing"))
        assert not (tmp_path / "run/rows.jsonl").exists()

    def test_what_makes_no_comparison_is_refused(self, tiny: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="--fidelity-only asks for neither"):
            options(tiny, "demo", fidelity="only")
        with pytest.raises(UsageError, match="another random: model alone"):
            options(tiny, "random:qwen3-0.6b")
        with pytest.raises(UsageError, match="would look like the arm of that name"):
            options("demo", tiny.rename(tmp_path / "dense"))
