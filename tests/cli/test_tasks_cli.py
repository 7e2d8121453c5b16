"""Tasks from the command line: each one once on a tiny checkpoint, where its data is found, and bad input."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sdbench.results import read_jsonl
from sdbench.suites.data import load_examples, verify_manifest
from sdbench.suites.tasks.endpoint import Judge
from sdbench.suites.tasks.sandbox import why_not

from .short import SHORT


def sums(n: int) -> list[dict[str, Any]]:
    return [{"question": f"{i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(n)]


def classes(n: int) -> list[dict[str, Any]]:
    test = "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(Plum().eat(), 1)"
    return [
        {
            "task_id": f"Plum_{i}",
            "skeleton": f"class Plum:\n    def eat(self):\n        '''Eats {i}.'''",
            "solution_code": "class Plum:\n    def eat(self): return 1",
            "class_name": "Plum",
            "import_statement": [],
            "test": test,
            "test_classes": ["T"],
        }
        for i in range(n)
    ]


def texts(n: int) -> list[dict[str, Any]]:
    return [{"index": i, "query": f"Write {i} lines.", "checklist": [{"name": "length"}]} for i in range(n)]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    monkeypatch.delenv("SDBENCH_DATA", raising=False)
    monkeypatch.setenv("SDBENCH_CACHE", str(tmp_path / "cache"))

    def write(name: str, records: Sequence[Any]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


class TestTasks:
    def test_numbers_of_ones_own(self, sdbench, checkpoint, data):
        done = sdbench("e2e", "--model", checkpoint(), "--data", data("mine.jsonl", sums(8)), *SHORT, "--json")
        whole = json.loads(done.out)
        assert (whole["options"]["task"], whole["options"]["data"]) == ("own", "mine.jsonl")
        for arm in whole["arms"]:
            assert (arm["examples"], arm["graded"], arm["answer_match"], arm["answer_match_reason"]) == (2, 2, 0, None)
            assert arm["reply_tokens"] == 6 and arm["loops"] == 0
            assert arm["seconds_per_correct"] is None and arm["seconds_per_correct_reason"] == "no right answer"
        dense, *pruned = whole["arms"]
        assert dense["net_speedup"] is None and dense["net_speedup_reason"] == dense["length_ratio_reason"] == "this arm is the baseline"
        # No reply ends, so that all are equally long.
        assert all(arm["length_ratio"] == 1 and arm["net_speedup"] == arm["speedup"] for arm in pruned)

    def test_gsm8k_out_of_a_folder(self, sdbench, checkpoint, data, monkeypatch, tmp_path):
        data("gsm8k/train.jsonl", sums(1005))
        monkeypatch.setenv("SDBENCH_DATA", str(tmp_path))
        done = sdbench("e2e", "--model", checkpoint(), "--task", "gsm8k", *SHORT, "--json")
        whole = json.loads(done.out)
        assert (whole["options"]["task"], whole["options"]["task_version"]) == ("gsm8k", 1)
        assert [arm["arm"] for arm in whole["arms"]] == ["dense", "teacher-forced", "decode"]

    def test_classes_are_not_run_without_leave(self, sdbench, checkpoint, data, tmp_path):
        call = ["e2e", "--model", checkpoint(), "--task", "classeval", "--data", data("classes.jsonl", classes(10))]
        done = sdbench(*call, *SHORT, "--json", "--output", "run")
        for arm in json.loads(done.out)["arms"]:
            assert (arm["examples"], arm["graded"], arm["answer_match"]) == (2, 0, None)
            assert arm["answer_match_reason"] == "generated code is run with --allow-code-execution alone (2)"
            assert arm["execution"] == {"passed": 0, "failed": 0, "error": 0, "timeout": 0, "not_run": 2}
            assert arm["seconds_per_correct_reason"] == arm["answer_match_reason"]
        shown = sdbench("report", "run").out
        assert "no match: generated code is run with --allow-code-execution alone" in shown and "timeout" in shown

    @pytest.mark.skipif(why_not() is not None, reason=f"no code can be locked away here: {why_not()}")
    def test_classes_are_run_with_leave(self, sdbench, checkpoint, data):
        call = ["e2e", "--model", checkpoint(), "--task", "classeval", "--data", data("classes.jsonl", classes(10))]
        for arm in json.loads(sdbench(*call, *SHORT, "--json", "--allow-code-execution").out)["arms"]:
            assert (arm["graded"], arm["answer_match"], arm["execution"]["error"]) == (2, 0, 2)

    def test_texts_are_scored_again_where_the_judge_failed(self, sdbench, checkpoint, data, monkeypatch, tmp_path):
        call = ["e2e", "--model", checkpoint(), "--task", "writingbench", "--data", data("texts.jsonl", texts(10)), *SHORT, "--json"]
        call += ["--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "nobody", "--output", "run"]
        monkeypatch.setattr(Judge, "score", lambda *anything: (None, "length: nobody is there"))
        whole = json.loads(sdbench(*call).out)
        assert [arm["arm"] for arm in whole["arms"]] == ["dense", "decode"]  # no answers, so no control
        for arm in whole["arms"]:
            assert (arm["score"], arm["scored"], arm["score_reason"]) == (None, 0, "length: nobody is there (2)")
            assert (arm["answer_match"], arm["answer_match_reason"]) == (None, "this task has no answers (2)")
        first = read_jsonl(tmp_path / "run/samples.jsonl")
        monkeypatch.setattr(Judge, "score", lambda *anything: (7.0, None))
        for arm in json.loads(sdbench(*call).out)["arms"]:
            assert (arm["score"], arm["scored"], arm["score_reason"]) == (7.0, 2, None)
        samples = read_jsonl(tmp_path / "run/samples.jsonl")
        assert len(first) == 4 and len(samples) == 8  # graded again, and not asked again
        assert [sample["ids"] for sample in samples[4:]] == [sample["ids"] for sample in first]

    def test_fidelity_is_asked_for_by_itself(self, sdbench, checkpoint, data, tmp_path):
        (tmp_path / "prompts.txt").write_text("Hello\nGood day\nWell\nHow are you?\n")
        whole = json.loads(sdbench("e2e", "--model", checkpoint(), "--task", "fidelity", "--data", "prompts.txt", *SHORT, "--json").out)
        dense, pruned = whole["arms"]
        assert dense["fidelity"] is None and pruned["fidelity"]["pruned"]["questions"] == 2
        assert pruned["answer_match_reason"] == "this task has no answers (2)"


class TestSplit:
    def test_the_parts_are_those_of_a_run_with_the_file(self, sdbench, checkpoint, data, tmp_path):
        file = data("classes.jsonl", classes(10))
        assert sdbench("split", file, "--task", "classeval", "--output", "parts").code == 0
        parts = [tmp_path / "parts" / name for name in ("train.jsonl", "validation.jsonl", "manifest.json")]
        manifest = verify_manifest(parts[2], parts[0], parts[1])
        assert (manifest.parts.train.examples, manifest.parts.validation.examples) == (2, 8)
        assert load_examples(parts[0])[0].grading["class_name"] == "Plum"
        asked = []
        options = [item for pair in zip(("--train", "--validation", "--split-manifest"), parts, strict=True) for item in pair]
        model = checkpoint()
        for where, output in ((["--data", file], "a"), (options, "b")):
            assert sdbench("e2e", "--model", model, "--task", "classeval", *where, *SHORT, "--json", "--output", output).code == 0
            asked.append([(sample["example"], sample["prompt_hash"]) for sample in read_jsonl(tmp_path / output / "samples.jsonl")])
        assert asked[0] == asked[1]

    def test_parts_of_another_task_are_refused(self, sdbench, checkpoint, data):
        assert sdbench("split", data("mine.jsonl", sums(10)), "--output", "parts").code == 0
        names = ("train.jsonl", "validation.jsonl", "manifest.json")
        options = [item for pair in zip(("--train", "--validation", "--split-manifest"), names, strict=True) for item in pair]
        options = [option if option.startswith("--") else f"parts/{option}" for option in options]
        done = sdbench("e2e", "--task", "classeval", *options)
        done.refuses(1, "parts/validation.jsonl, mine-", "grading: class_name: Field required; task classeval needs it to judge replies")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--task gsm8", 2, "unknown task 'gsm8'; did you mean gsm8k"),
        ("--task arithmetic --data mine.jsonl", 2, "task arithmetic comes with its data"),
        ("--task writingbench", 2, "task writingbench needs its data"),
        ("--task gsm8k --data none.jsonl", 2, "cannot read none.jsonl"),
        ("--task gsm8k --data mine.jsonl", 2, "the source has 3 distinct questions"),
        ("--task classeval --data mine.jsonl", 1, "mine.jsonl, line 1: no text 'skeleton', which task classeval needs"),
        ("--task fidelity --data mine.jsonl --calib teacher-forced", 2, "needs reference answers, and task fidelity has none"),
        ("--data mine.jsonl --dataset-revision r1", 2, "--dataset-revision is checked against a manifest"),
        ("--data mine.jsonl --allow-code-execution", 2, "--allow-code-execution has no use for task own"),
        ("--judge-url http://a", 2, "--judge-url and --judge-model go together"),
        ("--judge-url a --judge-model m", 2, "give an address such as"),
        (
            "--model random:qwen3-0.6b --task gsm8k --data mine.jsonl",
            2,
            "a random: model has no text to answer; leave out --task and --data",
        ),
    ],
)
def test_bad_input_leaves_no_trace(arguments, code, message, sdbench, data, tmp_path):
    data("mine.jsonl", sums(3))
    sdbench("e2e", *arguments.split(), "--output", "run").refuses(code, message)
    assert not (tmp_path / "run").exists()


def test_a_machine_that_cannot_lock_code_away_is_told_first(sdbench, data, monkeypatch, tmp_path):
    monkeypatch.setattr("sdbench.suites.tasks.sandbox.why_not", lambda: "the kernel refuses")
    call = ("e2e", "--task", "classeval", "--data", data("classes.jsonl", classes(10)), "--allow-code-execution", "--output", "run")
    sdbench(*call).refuses(1, "generated code cannot be locked away here, so that it is not run: the kernel refuses")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--task arithmetic", "task arithmetic comes with its split"),
        ("", "name the file to split, or a --task"),
        ("mine.jsonl --task gsm", "unknown task 'gsm'"),
    ],
)
def test_bad_splits(arguments, message, sdbench, data):
    data("mine.jsonl", sums(3))
    sdbench("split", *arguments.split(), "--output", "parts").refuses(2, message)


def test_an_example_that_cannot_be_judged_is_named(sdbench, checkpoint, data):
    """By its answer before the model loads, by its length before any other is judged."""
    records = sums(8)
    call = ("e2e", "--model", checkpoint(), "--calibration-examples", 1, "--validation-examples", 2, "--max-tokens", 4)
    wordless = data("wordless.jsonl", [one | {"answer": "none"} for one in records])
    done = sdbench(*call, "--data", wordless)
    done.refuses(1, ": the reference answer 'none' holds no number", "example ")
    assert "loading" not in done.err
    long = data("long.jsonl", [one | {"question": one["question"] + " and so on" * 2000} for one in records])
    sdbench(*call, "--data", long).refuses(2, "example ", "--max-tokens 4 exceed the", "take a model of a longer context")
