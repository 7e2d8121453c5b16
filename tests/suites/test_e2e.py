"""The end-to-end suite in-process: the demo model once, and a tiny random checkpoint for everything that needs no answers."""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel

from sdbench.demo import MODEL_DIR
from sdbench.engine.greedy import Reply
from sdbench.errors import SdbenchError
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.prompts import encode_question
from sdbench.results import RunDirectory, RunRecord, read_jsonl, strict_json
from sdbench.suites.data import load_examples
from sdbench.suites.e2e.data import load
from sdbench.suites.e2e.judge import Calls, Contender
from sdbench.suites.e2e.options import E2EOptions
from sdbench.suites.e2e.suite import Outcome, run
from sdbench.suites.grading import extract_answer, is_match
from sdbench.suites.tasks.arithmetic import VALIDATION_FILE

from .asking import small_run

CPU = torch.device("cpu")
EQUAL, REPEATS = 12, 1
TINY_LINEARS, TINY_MAX = 14, 8
PRODUCTS_PER_LINEAR = 4 / 7
"""q, k and v are one product of a decode step, and so are gate and up."""


def options(model: str, **changes: Any) -> E2EOptions:
    return small_run(model, **{"max_tokens": TINY_MAX, "equal_tokens": EQUAL, "rate_repeats": REPEATS} | changes)


@pytest.fixture
def tiny(tiny_qwen3: PreTrainedModel, tmp_path: Path) -> Path:
    """A random checkpoint of 14 linears with the demo model's tokenizer; it says no EOS within a few tokens."""
    folder = tmp_path / "tiny"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny_qwen3.resize_token_embeddings(1024, mean_resizing=False)
    tiny_qwen3.generation_config = GenerationConfig.from_pretrained(MODEL_DIR)
    tiny_qwen3.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(folder)
    return folder


@dataclass
class Replies:
    """What the arms said, in order, with what they were asked."""

    prompts: list[tuple[int, ...]] = field(default_factory=list)
    answers: list[Reply] = field(default_factory=list)
    rates: list[Reply] = field(default_factory=list)


@contextmanager
def listening(before: Callable[[Replies], None] = lambda replies: None) -> Iterator[Replies]:
    """Notes the judged replies (not the calibration's); ``before`` is called ahead of each answer."""
    original, heard = Contender.reply, Replies()

    def listened(contender: Contender, prompt: Sequence[int], max_new_tokens: int, *, ignore_eos: bool) -> tuple[Reply, Calls]:
        if not ignore_eos:
            before(heard)
        reply, calls = original(contender, prompt, max_new_tokens, ignore_eos=ignore_eos)
        if ignore_eos:
            heard.rates.append(reply)
        else:
            heard.prompts.append(tuple(prompt))
            heard.answers.append(reply)
        return reply, calls

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Contender, "reply", listened)
        yield heard


def run_in(path: Path, wanted: E2EOptions) -> Outcome:
    with RunDirectory.open(path, "e2e", wanted.arguments(), {"machine": "a test"}) as directory:
        return run(wanted, load(wanted), directory, quiet())


def run_only(wanted: E2EOptions) -> Outcome:
    return run(wanted, load(wanted), None, quiet())


def quiet() -> Progress:
    return Progress(Console(file=io.StringIO()))


def steps(samples: list[dict[str, Any]], arm: str, repeats: int = REPEATS) -> int:
    """Decode steps of an arm, from the lengths alone: the first token of a reply comes from its prefill."""
    return sum(len(sample["ids"]) - 1 for sample in samples if sample["arm"] == arm) + repeats * (EQUAL - 1)


@dataclass
class DemoRun:
    options: E2EOptions
    path: Path
    outcome: Outcome
    replies: Replies

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "rows.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "samples.jsonl")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    path = tmp_path_factory.mktemp("demo") / "run"
    wanted = options("demo", max_tokens=120)
    with listening() as replies:
        outcome = run_in(path, wanted)
    return DemoRun(wanted, path, outcome, replies)


class TestDemo:
    """The main job on the bundled model: 28 pruned linears, three questions."""

    def test_three_arms_in_order(self, demo: DemoRun) -> None:
        assert [arm["arm"] for arm in demo.outcome.arms] == ["dense", "teacher-forced", "decode"]
        how = [(arm["pattern"], arm["method"], arm["variant"]) for arm in demo.outcome.arms]
        assert how == [(None, None, None), ("2:4", "wanda", "reference"), ("2:4", "wanda", "reference")]

    def test_dense_answers_and_ends_every_question(self, demo: DemoRun) -> None:
        dense = demo.outcome.arms[0]
        assert (dense["examples"], dense["answer_match"], dense["eos"], dense["truncated"]) == (3, 3, 3, 0)
        assert dense["reply_tokens"] >= 30

    def test_rates_are_measured_at_one_length(self, demo: DemoRun) -> None:
        """CASES 2: a rate run gives exactly N tokens on every arm."""
        rates = [row for row in demo.rows if row["record"] == "rate"]
        assert [(row["arm"], row["tokens"]) for row in rates] == [("dense", EQUAL), ("teacher-forced", EQUAL), ("decode", EQUAL)]
        for row, arm in zip(rates, demo.outcome.arms, strict=True):
            assert arm["equal_tokens"] == EQUAL
            assert row["decode_rate"] == pytest.approx((EQUAL - 1) / row["decode_seconds"])
            assert arm["decode_rate"] == row["decode_rate"]  # the median of one

    def test_speedup_is_over_dense(self, demo: DemoRun) -> None:
        dense, *pruned = demo.outcome.arms
        assert (dense["speedup"], dense["speedup_reason"]) == (None, "this arm is the baseline")
        for arm in pruned:
            assert arm["speedup"] == pytest.approx(arm["decode_rate"] / dense["decode_rate"])
            assert arm["speedup_reason"] is None

    def test_kernel_calls_are_pruned_linears_times_decode_steps(self, demo: DemoRun) -> None:
        for arm in demo.outcome.arms:
            linears = 0 if arm["arm"] == "dense" else 28
            assert len(arm["layers"]) == linears
            products = linears * PRODUCTS_PER_LINEAR
            assert arm["kernel_calls"] == arm["expected_kernel_calls"] == products * steps(demo.samples, arm["arm"])
            for sample in (s for s in demo.samples if s["arm"] == arm["arm"]):
                assert sample["kernel_calls"] == products * (len(sample["ids"]) - 1)

    def test_every_arm_calibrates_on_as_many_rows(self, demo: DemoRun) -> None:
        sources = demo.outcome.calibration["sources"]
        assert list(sources) == ["teacher-forced", "decode"]
        assert len({entry["rows"] for entry in sources.values()}) == 1
        decode = sources["decode"]
        # Two replies of T tokens give T - 1 decode rows each, and the teacher-forced text is longer.
        assert decode["rows"] == decode["rows_available"] == demo.outcome.calibration["replies"]["tokens"] - 2
        assert sources["teacher-forced"]["rows_available"] > decode["rows"]
        for arm in demo.outcome.arms[1:]:
            assert {layer["rows"] for layer in arm["layers"].values()} == {decode["rows"]}

    def test_replayed_statistics_are_those_of_live_decode_steps(self, demo: DemoRun) -> None:
        assert 0 <= demo.outcome.calibration["replay_difference"] < 1e-4

    def test_run_directory_holds_everything_and_reads_back(self, demo: DemoRun) -> None:
        record = RunRecord.model_validate_json((demo.path / "run.json").read_bytes())
        assert (record.command, record.outcome, len(record.audit)) == ("e2e", "complete", 1)
        assert record.arguments == json.loads(strict_json(demo.options.arguments()))
        assert [row["record"] for row in demo.rows] == ["calibration", *["rate", "arm"] * 3]
        arms = [{k: v for k, v in row.items() if k not in ("record", "attempt")} for row in demo.rows if row["record"] == "arm"]
        assert arms == json.loads(strict_json(demo.outcome.arms))
        assert [(s["arm"], s["example"]) for s in demo.samples] == [
            (arm["arm"], s["example"]) for arm in demo.outcome.arms for s in demo.samples[:3]
        ]

    def test_samples_can_be_graded_again(self, demo: DemoRun) -> None:
        tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
        examples = {example.id: example for example in load_examples(VALIDATION_FILE)}
        for sample, reply, prompt in zip(demo.samples, demo.replies.answers, demo.replies.prompts, strict=True):
            example = examples[sample["example"]]
            assert list(prompt) == encode_question(tokenizer, example.question)  # the question alone
            assert sample["prompt_tokens"] == len(prompt)
            assert sample["prompt_hash"] == hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()[:16]
            assert sample["ids"] == list(reply.ids) and sample["tokens"] == len(reply.ids)
            assert sample["text"] == tokenizer.decode(reply.ids, skip_special_tokens=True)
            assert sample["extracted"] == extract_answer(sample["text"])
            assert sample["match"] == is_match(sample["text"], example.answer)
            assert (sample["eos"], sample["truncated"]) == (reply.eos, reply.truncated)
            assert sample["prefill_seconds"] > 0 and sample["decode_seconds"] > 0

    def test_a_figure_that_cannot_be_had_is_null_with_its_reason(self, demo: DemoRun) -> None:
        for arm in demo.outcome.arms:
            assert arm["ceiling"] is None and "no GPU" in arm["ceiling_reason"]
            assert (arm["peak_bytes"] is None) == (arm["peak_bytes_reason"] is not None)
            for account in ("allocated", "process", "gpu"):
                assert arm["memory"][account] is None and "no GPU" in arm["memory"][f"{account}_reason"]
            assert arm["quality_reason"] is None

    def test_every_row_has_the_memory_of_its_weights(self, demo: DemoRun) -> None:
        dense, *pruned = (arm["memory"] for arm in demo.outcome.arms)
        config = AutoConfig.from_pretrained(MODEL_DIR)
        width, heads, shared = (
            config.hidden_size,
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        linears = config.num_hidden_layers * width * (2 * heads + 2 * shared + 3 * config.intermediate_size)
        assert (dense["weights_ratio"], dense["packed"], dense["originals"]) == (1.0, 0, None)
        for memory in pruned:
            # fp32 at 2:4: half of the values and a bit a column.
            assert memory["packed"] == 4 * linears * 17 // 32
            assert memory["weights"] == dense["weights"] - 4 * linears * 15 // 32
            assert memory["weights_ratio"] == memory["weights"] / dense["weights"]
            assert memory["originals"] == "kept"

    def test_a_rate_run_says_what_the_answer_run_says(self, demo: DemoRun) -> None:
        """CASES 2, packed linears in place: the first question's rate run begins as its answer does."""
        # A warm-up comes before each rate run, and the first of three questions is the one that is timed.
        warmups, rates = demo.replies.rates[::2], demo.replies.rates[1::2]
        assert [len(reply.ids) for reply in warmups] == [2, 2, 2]
        for rate, answer in zip(rates, demo.replies.answers[::3], strict=True):
            assert rate.ids == answer.ids[:EQUAL]


class TestCalibration:
    def test_a_second_source_is_an_arm_under_the_same_conditions(self, tiny: Path) -> None:
        with listening() as heard:
            outcome = run_only(options(str(tiny), calib=("decode", "self")))
        assert [arm["arm"] for arm in outcome.arms] == ["dense", "teacher-forced", "decode", "self"]
        # Each source chooses other weights.
        assert len({tuple(reply.ids for reply in heard.answers[start : start + 3]) for start in range(0, 12, 3)}) == 4
        rows = {entry["rows"] for entry in outcome.calibration["sources"].values()}
        assert rows == {2 * (TINY_MAX - 1)}  # no reply ends before max_tokens
        assert {layer["rows"] for arm in outcome.arms[1:] for layer in arm["layers"].values()} == rows

    def test_magnitude_needs_none(self, tiny: Path) -> None:
        outcome = run_only(options(str(tiny), method="magnitude"))
        assert [arm["arm"] for arm in outcome.arms] == ["dense", "magnitude"]
        assert outcome.calibration["sources"] == {} and outcome.calibration["replay_difference"] is None
        assert outcome.arms[1]["kernel_calls"] == outcome.arms[1]["expected_kernel_calls"] > 0

    def test_sparsegpt(self, tiny: Path) -> None:
        outcome = run_only(options(str(tiny), method="sparsegpt"))
        assert [arm["method"] for arm in outcome.arms] == [None, "sparsegpt", "sparsegpt"]
        for arm in outcome.arms[1:]:
            assert len(arm["layers"]) == TINY_LINEARS
            # The damping that was used is on record: it may have been raised for a Hessian of low rank.
            assert all(layer["damp"] == 0.01 and layer["damp_used"] >= 0.01 for layer in arm["layers"].values())

    def test_a_reply_that_ends_at_once_has_no_decode_step(self, tiny: Path) -> None:
        with pytest.raises(SdbenchError, match="no calibration text has a row that counts"):
            run_only(options(str(tiny), max_tokens=1))


class TestArms:
    def test_prefill_on_dense_weights(self, tiny: Path) -> None:
        """The first token comes from the prompt, so it is the dense model's; on pruned weights it need not be."""
        first: dict[str, list[list[int]]] = {}
        for prefill in ("dense", "pruned"):
            with listening() as heard:
                outcome = run_only(options(str(tiny), prefill=prefill, pattern=Pattern(1, 4)))
            assert [arm["prefill"] for arm in outcome.arms] == [None, prefill, prefill]
            ids = [reply.ids[0] for reply in heard.answers]
            first[prefill] = [ids[start : start + 3] for start in (0, 3, 6)]
        dense = first["dense"][0]
        assert first["dense"] == [dense, dense, dense]
        assert first["pruned"][0] == dense and first["pruned"][1] != dense and first["pruned"][2] != dense

    def test_targets(self, tiny: Path) -> None:
        with listening() as heard:
            outcome = run_only(options(str(tiny), targets=("*.mlp.*",)))
        for number, arm in enumerate(outcome.arms[1:], start=1):
            assert len(arm["layers"]) == 6 and all(".mlp." in name for name in arm["layers"])
            answered = sum(len(reply.ids) - 1 for reply in heard.answers[3 * number : 3 * number + 3])
            assert arm["kernel_calls"] == 4 * (answered + EQUAL - 1)  # gate and up are one product

    def test_the_model_is_dense_again_after_each_arm(self, tiny: Path) -> None:
        """Arms are judged on one model in turn: their order must not matter."""
        answers = []
        for calib in (("decode", "self"), ("self", "decode")):
            with listening() as heard:
                outcome = run_only(options(str(tiny), calib=calib))
            names = [arm["arm"] for arm in outcome.arms for _ in range(3)]
            answers.append(sorted((name, reply.ids) for name, reply in zip(names, heard.answers, strict=True)))
        assert answers[0] == answers[1]

    def test_random_weights_are_timed_and_not_graded(self, tiny_qwen3: PreTrainedModel, tmp_path: Path) -> None:
        """A folder with nothing but a config: speed is real, quality null with the reason."""
        tiny_qwen3.config.save_pretrained(tmp_path / "architecture")
        path = tmp_path / "run"
        outcome = run_in(path, options(f"random:{tmp_path / 'architecture'}"))
        assert [arm["arm"] for arm in outcome.arms] == ["dense", "teacher-forced", "decode"]
        for arm in outcome.arms:
            assert (arm["examples"], arm["answer_match"], arm["eos"], arm["truncated"], arm["reply_tokens"]) == (0, None, None, None, None)
            assert "random weights" in arm["quality_reason"]
            assert arm["equal_tokens"] == EQUAL and arm["decode_rate"] > 0
        for arm in outcome.arms[1:]:
            assert arm["speedup"] > 0
            assert arm["kernel_calls"] == arm["expected_kernel_calls"] == TINY_LINEARS * PRODUCTS_PER_LINEAR * (EQUAL - 1)
        assert not (path / "samples.jsonl").exists()


class TestGreedy:
    def test_case_1_six_seeds_one_reply(self, tiny: Path) -> None:
        """CASES 1: the checkpoint's config says do_sample, temperature 0.6, top_k 20."""
        assert GenerationConfig.from_pretrained(tiny).do_sample
        said = set()
        for seed in range(6):
            torch.manual_seed(seed)
            with listening() as heard:
                run_only(options(str(tiny), method="magnitude", validation_examples=2))
            said.add(tuple(reply.ids for reply in heard.answers))
        assert len(said) == 1

    def test_case_2_eos_ends_answers_and_not_rates(self, tiny: Path) -> None:
        """CASES 2: the second EOS id comes third; the rate run goes on past it, with the ids of a run without EOS."""
        with listening() as free:
            run_only(options(str(tiny)))
        config = GenerationConfig.from_pretrained(tiny)
        stop = free.answers[0].ids[2]
        assert stop not in free.answers[0].ids[:2]
        config.eos_token_id = [1023, stop]
        config.save_pretrained(tiny)
        with listening() as heard:
            outcome = run_only(options(str(tiny)))
        assert (heard.answers[0].ids, heard.answers[0].eos, heard.answers[0].truncated) == (free.answers[0].ids[:3], True, False)
        assert heard.rates[1].ids == free.rates[1].ids
        assert heard.rates[1].ids[:TINY_MAX] == free.answers[0].ids
        assert [arm["equal_tokens"] for arm in outcome.arms] == [EQUAL] * 3
        assert outcome.arms[0]["eos"] >= 1 and outcome.arms[0]["eos"] + outcome.arms[0]["truncated"] == 3


class TestResume:
    @pytest.mark.parametrize("stop", [KeyboardInterrupt(), SdbenchError("out of luck")])
    def test_a_stopped_run_goes_on_where_it_was(self, tiny: Path, tmp_path: Path, stop: BaseException) -> None:
        """Five of nine answers are there; the second start asks the other four and ends as if nothing had happened."""
        wanted = options(str(tiny))

        def give_up(heard: Replies) -> None:
            if len(heard.answers) == 5:
                raise stop

        with pytest.raises(type(stop)), listening(give_up):
            run_in(tmp_path / "run", wanted)
        kept = read_jsonl(tmp_path / "run/samples.jsonl")
        assert [sample["arm"] for sample in kept] == ["dense"] * 3 + ["teacher-forced"] * 2
        assert [row["arm"] for row in read_jsonl(tmp_path / "run/rows.jsonl") if row["record"] == "arm"] == ["dense"]

        with listening() as rest:
            resumed = run_in(tmp_path / "run", wanted)
        assert len(rest.answers) == 4
        whole = run_in(tmp_path / "whole", wanted)

        times = ("prefill_seconds", "decode_seconds", "attempt")
        samples = [
            [{k: v for k, v in sample.items() if k not in times} for sample in read_jsonl(tmp_path / name / "samples.jsonl")]
            for name in ("run", "whole")
        ]
        assert samples[0] == samples[1]
        assert read_jsonl(tmp_path / "run/samples.jsonl")[:5] == kept
        measured = ("decode_rate", "decode_rate_spread", "speedup", "baselines", "peak_bytes", "peak_bytes_reason", "net_speedup")
        for again, once in zip(resumed.arms, whole.arms, strict=True):
            assert {k: v for k, v in again.items() if k not in measured} == {k: v for k, v in once.items() if k not in measured}

        record = RunRecord.model_validate_json((tmp_path / "run/run.json").read_bytes())
        outcome = "interrupted" if isinstance(stop, KeyboardInterrupt) else "failed"
        assert [attempt.outcome for attempt in record.audit] == [outcome, "complete"]
        assert record.audit[0].reason == ("Ctrl-C" if outcome == "interrupted" else "out of luck")
        assert record.outcome == "complete"

    def test_a_finished_run_is_measured_again_but_not_asked_again(self, tiny: Path, tmp_path: Path) -> None:
        first = run_in(tmp_path, options(str(tiny)))
        with listening() as heard:
            second = run_in(tmp_path, options(str(tiny)))
        assert heard.answers == [] and len(heard.rates) == 6
        assert [arm["answer_match"] for arm in second.arms] == [arm["answer_match"] for arm in first.arms]
        assert len(read_jsonl(tmp_path / "samples.jsonl")) == 9
