"""Sources, sequential mode, fidelity and diagnosis of an end-to-end run, on a tiny random checkpoint."""

import io
import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from sdbench.calibrate.choices import CalibrationChoices
from sdbench.calibrate.diagnostics import reconstruction_error
from sdbench.calibrate.methods import prune_linears
from sdbench.calibrate.replay import collect
from sdbench.calibrate.select import select_linears
from sdbench.calibrate.sources import CalibrationText, equalise, make_text
from sdbench.demo import MODEL_DIR
from sdbench.errors import SdbenchError, UsageError
from sdbench.models import load_model, resolve_model
from sdbench.progress import Progress
from sdbench.results import RunDirectory, read_jsonl
from sdbench.suites.e2e.data import load, tokenise
from sdbench.suites.e2e.options import E2EOptions
from sdbench.suites.e2e.plot import draw
from sdbench.suites.e2e.report import notes, of_run, report
from sdbench.suites.e2e.suite import Outcome, run
from sdbench.suites.fidelity import compare, reply_logits
from sdbench.suites.runs import read_run
from sdbench.suites.statistics import ratio_of_means

from .asking import small_run

CPU = torch.device("cpu")
LINEARS, REPLY = 14, 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of 14 linears with the demo model's tokenizer; it says no EOS within a few tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=1024,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            initializer_range=0.3,
            tie_word_embeddings=True,
        )
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig.from_pretrained(MODEL_DIR)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(folder)
    return folder


def options(model: Path, **changes: Any) -> E2EOptions:
    standard = {"calibration_examples": 3, "max_tokens": REPLY, "equal_tokens": 4, "warmup_tokens": 0, "fidelity": "only"}
    return small_run(model, **standard | changes)


def run_only(wanted: E2EOptions) -> Outcome:
    return run(wanted, load(wanted), None, Progress(Console(file=io.StringIO())))


def run_in(path: Path, wanted: E2EOptions) -> Outcome:
    with RunDirectory.open(path, "e2e", wanted.arguments(), {"machine": "a test"}) as directory:
        return run(wanted, load(wanted), directory, Progress(Console(file=io.StringIO())))


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, E2EOptions, Outcome]:
    """One run with everything: fidelity alone, diagnosis, two sources beside the control."""
    path = tmp_path_factory.mktemp("runs") / "run"
    wanted = options(tiny, method="sparsegpt", calib=("decode", "prefill"), diagnose=True)
    return path, wanted, run_in(path, wanted)


class TestFidelity:
    def test_every_figure_is_that_of_the_dense_replies(self, finished: tuple[Path, E2EOptions, Outcome]) -> None:
        """Recomputed from the run's samples: the dense model's replies, the pruned model's logits there."""
        path, wanted, outcome = finished
        rows = [row for row in read_jsonl(path / "rows.jsonl") if row["record"] == "fidelity"]
        assert len(rows) == 3 * 2 * 3  # pruned arms, prefills, questions
        samples = read_jsonl(path / "samples.jsonl")
        assert [sample["arm"] for sample in samples] == ["dense"] * 3
        loaded = load_model(wanted.spec, CPU, torch.float32)
        linears = select_linears(loaded.model)
        examples = load(wanted)
        assert examples is not None
        questions = {question.id: question for question in tokenise(examples.calibration, loaded) + tokenise(examples.validation, loaded)}
        texts = [make_text("prefill", questions[example.id].prompt) for example in examples.calibration]
        counted = [len(text.rows) for text in texts]
        # The prompts are longer than the 7 decode steps that every arm has to make do with.
        assert outcome.calibration["sources"]["prefill"] == {"examples": 3, "rows": 3 * 7, "rows_available": sum(counted)}
        texts = equalise({"prefill": texts, "decode": [CalibrationText(tuple(range(7)), tuple(range(7)))] * 3})["prefill"]
        pruned = prune_linears(linears, collect(loaded.model, linears, texts, "hessian"), wanted.pattern, "sparsegpt")
        weights = {name: result.weight for name, result in pruned}
        for sample in samples:
            question = questions[sample["example"]]
            dense = reply_logits(loaded.model, question.prompt, sample["ids"])
            for prefill, before in (("pruned", weights), ("dense", None)):
                expected = compare(
                    dense, reply_logits(loaded.model, question.prompt, sample["ids"], linears, before, weights), sample["ids"]
                )
                (row,) = [r for r in rows if (r["arm"], r["prefill"], r["example"]) == ("prefill", prefill, sample["example"])]
                assert row["positions"] == expected.positions == len(sample["ids"]) == REPLY
                assert row["kl"] == pytest.approx(expected.kl, rel=1e-4)
                assert (row["agreement"], row["first_divergence"]) == (pytest.approx(expected.agreement), expected.first_divergence)

    def test_an_arm_sums_its_questions_up_and_is_compared_with_the_control(self, finished: tuple[Path, E2EOptions, Outcome]) -> None:
        path, _, outcome = finished
        rows = [row for row in read_jsonl(path / "rows.jsonl") if row["record"] == "fidelity"]

        def of(arm: str, prefill: str) -> list[dict[str, Any]]:
            return [row for row in rows if (row["arm"], row["prefill"]) == (arm, prefill)]

        for arm in outcome.arms[1:]:
            for prefill, found in arm["fidelity"].items():
                mine, control = of(arm["arm"], prefill), of("teacher-forced", prefill)
                assert (found["questions"], found["positions"]) == (3, 3 * REPLY)
                assert found["kl"] == pytest.approx(sum(row["kl"] for row in mine) / 3)
                assert found["agreement"] == pytest.approx(sum(row["agreement"] for row in mine) / 3)
                # Replies of one length, so that the mean over positions is that over replies.
                assert found["perplexity"] == pytest.approx(math.exp(sum(row["nll"] for row in mine) / 3))
                assert found["perplexity"] > found["dense_perplexity"] == pytest.approx(math.exp(sum(row["dense_nll"] for row in mine) / 3))
                assert found["diverged"] == sum(row["first_divergence"] is not None for row in mine)
                if arm["arm"] == "teacher-forced":
                    assert found["control_ratio"] is None and "this arm is the control" in found["control_ratio_reason"]
                else:
                    expected = ratio_of_means([row["kl"] * REPLY for row in control], [row["kl"] * REPLY for row in mine])
                    assert expected is not None and found["control_ratio"] == expected.as_dict()
                    assert found["control_ratio_reason"] is None
        assert outcome.arms[0]["fidelity"] is None

    def test_nothing_else_is_measured(self, finished: tuple[Path, E2EOptions, Outcome]) -> None:
        path, _, outcome = finished
        assert {row["record"] for row in read_jsonl(path / "rows.jsonl")} == {"calibration", "fidelity", "layer", "arm"}
        for arm in outcome.arms:
            for figure in ("decode_rate", "speedup", "ceiling", "peak_bytes"):
                assert arm[figure] is None
            assert arm["speedup_reason"] == "not measured: --fidelity-only"
        assert [arm["examples"] for arm in outcome.arms] == [3, 0, 0, 0]

    def test_a_resumed_run_computes_what_is_missing(self, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wanted = options(tiny)
        whole = run_in(tmp_path / "run", wanted)
        lines = (tmp_path / "run/rows.jsonl").read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["record"] == "fidelity"][:3]
        (tmp_path / "run/rows.jsonl").write_text("\n".join(kept) + "\n")
        asked: list[int] = []
        monkeypatch.setattr("sdbench.suites.e2e.inspection.compare", lambda *logits: asked.append(1) or compare(*logits))
        again = run_in(tmp_path / "run", wanted)
        assert len(asked) == 2 * 2 * 3 - 3
        assert [arm["fidelity"] for arm in again.arms] == [arm["fidelity"] for arm in whole.arms]

    def test_beside_answers_and_rates(self, tiny: Path) -> None:
        outcome = run_only(options(tiny, method="magnitude", fidelity="also"))
        magnitude = outcome.arms[1]
        assert magnitude["examples"] == 3 and magnitude["decode_rate"] > 0
        for found in magnitude["fidelity"].values():
            assert found["kl"] > 0.01 and found["control_ratio"] is None
            assert found["control_ratio_reason"] == "no teacher-forced arm in this run"
        assert magnitude["fidelity"]["pruned"]["kl"] != magnitude["fidelity"]["dense"]["kl"]
        assert run_only(options(tiny, method="magnitude", fidelity="no")).arms[1]["fidelity"] is None

    def test_a_random_model_has_no_replies(self) -> None:
        for asked in ({"fidelity": "also"}, {"fidelity": "no", "diagnose": True}):
            with pytest.raises(UsageError, match="leave out --fidelity and --diagnose"):
                replace(options(MODEL_DIR), spec=resolve_model("random:qwen3-0.6b", None, CPU), **asked)


class TestDiagnosis:
    def test_rows_of_every_layer_and_arm(self, finished: tuple[Path, E2EOptions, Outcome]) -> None:
        path, _, outcome = finished
        rows = [row for row in read_jsonl(path / "rows.jsonl") if row["record"] == "layer"]
        assert [(row["arm"], row["layer"]) for row in rows] == [(row["arm"], row["layer"]) for row in outcome.layers]
        by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in ("dense", "teacher-forced", "decode", "prefill")}
        assert {len(found) for found in by_arm.values()} == {LINEARS}
        for row in by_arm["dense"]:
            assert row["decode_rows"] == 3 * (REPLY - 1) and row["prefill_rows"] > row["decode_rows"]
            spread = row["energy_ratio"]
            assert 0 < spread["p05"] <= spread["p50"] <= spread["p95"]
            assert 0 < row["directions"] <= 3 * (REPLY - 1)  # the rank of so few decode steps
        for arm in ("teacher-forced", "decode", "prefill"):
            assert all(row["discrepancy"] > 0 and 0 < row["reconstruction_error"] < 1 for row in by_arm[arm])

    def test_the_error_is_that_of_unseen_decode_steps(self, tiny: Path, tmp_path: Path) -> None:
        wanted = options(tiny, method="magnitude", diagnose=True)
        outcome = run_in(tmp_path / "run", wanted)
        loaded = load_model(wanted.spec, CPU, torch.float32)
        linears = select_linears(loaded.model)
        examples = load(wanted)
        assert examples is not None
        replies = {sample["example"]: sample["ids"] for sample in read_jsonl(tmp_path / "run/samples.jsonl")}
        texts = [make_text("decode", question.prompt, reply=replies[question.id]) for question in tokenise(examples.validation, loaded)]
        decode = collect(loaded.model, linears, texts, "hessian")
        pruned = dict(prune_linears(linears, {}, wanted.pattern, "magnitude"))
        found = {row["layer"]: row for row in outcome.layers if row["arm"] == "magnitude"}
        for name, linear in linears.items():
            # There, since it was collected.
            expected = reconstruction_error(linear.weight.detach(), pruned[name].weight, decode[name].hessian)  # type: ignore[arg-type]
            assert found[name]["reconstruction_error"] == pytest.approx(expected, rel=1e-4)
            assert found[name]["discrepancy"] is None  # nothing was calibrated

    def test_the_report_has_both_tables(self, finished: tuple[Path, E2EOptions, Outcome]) -> None:
        path, _, _ = finished
        made = of_run(read_run(path))
        fidelity, layers = made.more
        assert [row[:2] for row in fidelity.cells] == [
            [arm, prefill] for arm in ("teacher-forced", "decode", "prefill") for prefill in ("pruned", "dense")
        ]
        assert [row[-1] == "-" for row in fidelity.cells] == [True, True, False, False, False, False]
        assert len(layers.cells) == 4 * 7 and layers.cells[0][:2] == ["dense", "2 q_proj"]
        text = made.markdown()
        assert "fidelity to the dense model's own replies" in text and "| decode | dense |" in text and "2 down\\_proj" not in text
        assert "damping of teacher-forced, decode, prefill: 0.01 of the mean diagonal" in made.lines
        assert len(made.document["layers"]) == 4 * LINEARS

    def test_case_12_raised_damping_stands_under_the_table(self, finished: tuple[Path, E2EOptions, Outcome]) -> None:
        _, wanted, outcome = finished
        arms = deepcopy(outcome.arms)
        arms[2]["layers"]["model.layers.0.self_attn.q_proj"]["damp_used"] = 0.1
        lines = notes(wanted.arguments(), arms, outcome.calibration)
        assert "damping of teacher-forced, prefill: 0.01 of the mean diagonal" in lines
        assert "damping of decode: 0.01 of the mean diagonal, raised in 1 of 14 layers, to 0.1 at most" in lines

    def test_plot(self, finished: tuple[Path, E2EOptions, Outcome]) -> None:
        figure = draw(finished[2].layers, "tiny")
        assert figure is not None
        left, right = figure.axes
        assert [line.get_label() for line in left.get_lines()] == ["teacher-forced", "decode", "prefill"]
        assert list(right.get_lines()[0].get_xdata()) == [0, 1]
        assert draw([row for row in finished[2].layers if row["arm"] == "dense"], "tiny") is None


class TestCalibration:
    def test_sequential_prunes_otherwise_on_the_same_rows(self, tiny: Path) -> None:
        one_pass, sequential = (run_only(options(tiny, sequential=mode)) for mode in (False, True))
        assert one_pass.calibration == sequential.calibration
        for once, again in zip(one_pass.arms[1:], sequential.arms[1:], strict=True):
            assert {layer["rows"] for layer in once["layers"].values()} == {layer["rows"] for layer in again["layers"].values()} == {21}
            assert once["fidelity"]["pruned"]["kl"] != again["fidelity"]["pruned"]["kl"]

    def test_a_token_budget_holds_on_every_arm_and_saves_replies(self, tiny: Path) -> None:
        """Examples of 7 decode steps, two answered at once: 10 rows take two of them, and the third is never asked."""
        outcome = run_only(options(tiny, choices=CalibrationChoices(tokens=10)))
        assert outcome.calibration["replies"]["count"] == 2
        assert [(entry["examples"], entry["rows"]) for entry in outcome.calibration["sources"].values()] == [(2, 10), (2, 10)]
        assert {layer["rows"] for arm in outcome.arms[1:] for layer in arm["layers"].values()} == {10}
        with pytest.raises(SdbenchError, match="rows on every arm: 21 of 3 calibration examples, fewer than --calibration-tokens 22"):
            run_only(options(tiny, choices=CalibrationChoices(tokens=22)))

    def test_a_corpus_and_a_mix(self, tiny: Path, tmp_path: Path) -> None:
        corpus = tmp_path / "corpus.txt"
        corpus.write_text("Tom has 3 apples and buys 4 more. How many apples does he have now?\n" * 9)
        choices = CalibrationChoices(mix=(("decode", 2.0), ("text", 1.0)), text=corpus, window=30)
        outcome = run_only(options(tiny, calib=("text", "mixed"), choices=choices))
        assert [arm["arm"] for arm in outcome.arms] == ["dense", "teacher-forced", "text", "mixed"]
        # The mix's decode examples set the number for everyone; its third example is a window of 30.
        assert outcome.calibration["sources"]["text"] == {"examples": 3, "rows": 44, "rows_available": 90}
        assert outcome.calibration["sources"]["mixed"]["parts"] == {"decode": 14, "text": 30}
        with pytest.raises(UsageError, match="holds 2 windows of 100 tokens, fewer than 3 calibration examples"):
            corpus.write_text("1 2 3 4 5 6 7 8 9 " * 15)
            run_only(options(tiny, calib=("text",), choices=CalibrationChoices(text=corpus, window=100)))

    def test_sampled_replies_are_others_and_the_same_again(self, tiny: Path) -> None:
        kl = [
            run_only(options(tiny, seed=seed, choices=CalibrationChoices(temperature=temperature))).arms[2]["fidelity"]["pruned"]["kl"]
            for seed, temperature in ((0, 0.0), (0, 1.0), (0, 1.0))
        ]
        assert kl[0] != kl[1] == kl[2]


def test_answers_without_rates(tiny: Path) -> None:
    timed, untimed = (run_only(options(tiny, rate_repeats=repeats, fidelity="no")).arms for repeats in (1, 0))
    for with_rate, without in zip(timed, untimed, strict=True):
        assert (without["examples"], without["truncated"]) == (with_rate["examples"], with_rate["truncated"]) == (3, 3)
        assert with_rate["decode_rate"] > 0 and without["decode_rate"] is without["speedup"] is without["net_speedup"] is None
        assert without["speedup_reason"] == "not measured: --rate-repeats 0"
        # That the pruned linears ran is checked all the same.
        steps_of_rate = with_rate["kernel_calls"] - without["kernel_calls"]
        assert steps_of_rate == with_rate["expected_kernel_calls"] - without["expected_kernel_calls"]
        assert (without["kernel_calls"] > 0) == (without["pattern"] is not None)


@pytest.mark.parametrize(("fidelity", "columns"), [("no", "tokens x dense loops repeated 4-grams"), ("only", None)])
def test_tables_without_rates(fidelity: Any, columns: str | None, tiny: Path) -> None:
    """What was not timed has no column, which one line says; JSON and CSV have the fields all the same."""
    asked = options(tiny, rate_repeats=0, fidelity=fidelity)
    outcome = run_only(asked)
    shown = report(asked.arguments(), {}, outcome.arms, outcome.calibration, "run", None)
    assert [column.name for column in shown.columns] == ["arm", "match", "EOS", "cut off", "kernel calls"]
    assert {len(cells) for cells in shown.cells} == {5}
    behaviour = [table for table in shown.more if table.title == "how replies behave"]
    assert [" ".join(column.name for column in table.columns[1:]) for table in behaviour] == ([columns] if columns else [])
    lines = [line for table in (shown, *shown.more) for line in table.lines]
    assert sum("nothing was timed" in line for line in lines) == 1
    assert not any(word in line for line in lines for word in ("net x", "s/right"))
    assert "| arm | match | EOS | cut off | kernel calls |" in shown.markdown()
    assert {"decode_rate", "speedup", "net_speedup"} <= shown.document["arms"][0].keys()
    assert '"decode_rate"' in shown.csv().splitlines()[0]
