"""``sdbench e2e --lm-eval``: tasks of lm-evaluation-harness on every arm; what needs the harness skips without it."""

import importlib.util
import json
import math
import sys

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdbench.results import read_jsonl

from .short import SHORT

QUESTIONS = ((3, 4), (9, 2), (5, 1), (7, 8), (6, 2))
CHOICES = (" yes", " no")

needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="extra lm-eval is not installed")


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with one task of the harness whose data lies beside it."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    records = [{"question": f"Is {one} more than {other}?", "answer": int(one < other)} for one, other in QUESTIONS]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    task = {
        "task": "more",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": ["yes", "no"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    (folder / "more.yaml").write_text(yaml.safe_dump(task))
    return folder


def right_answers(folder):
    """How many questions a model answers right, by the likelihood of each choice, without the harness."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right = 0
    for one, other in QUESTIONS:
        question = f"Is {one} more than {other}?"
        start = len(tokenizer(question).input_ids)
        likelihoods = []
        for choice in CHOICES:
            ids = torch.tensor([tokenizer(question + choice).input_ids])
            with torch.no_grad():
                logs = model(input_ids=ids).logits[0].log_softmax(-1)
            likelihoods.append(float(logs[start - 1 : -1].gather(1, ids[0, start:, None]).sum()))
        right += likelihoods.index(max(likelihoods)) == int(one < other)
    return right


@needs_harness
def test_every_arm_is_judged_and_a_resumed_run_does_not_judge_again(sdbench, checkpoint, tasks, tmp_path, monkeypatch):
    call = ("e2e", "--model", checkpoint(), *SHORT, "--alternatives", "--lm-eval", "more", "--lm-eval-path", tasks, "--output", "run")
    done = sdbench(*call)
    assert done.code == 0, done.err
    arms = {row["arm"]: row for row in read_jsonl(tmp_path / "run/rows.jsonl") if row["record"] == "arm"}
    assert list(arms) == ["dense", "teacher-forced", "decode", "int8"]
    for arm in arms.values():
        (found,) = arm["lm_eval"]
        assert (found["task"], found["metric"], found["samples"], found["higher_is_better"]) == ("more", "acc", 5, True)
    share = right_answers(tmp_path / "tiny") / 5
    assert arms["dense"]["lm_eval"][0]["value"] == pytest.approx(share)
    assert arms["dense"]["lm_eval"][0]["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 4))
    assert "lm-evaluation-harness" in done.out
    # Neither its bars nor what git says of a folder without a repository.
    assert not any(word in done.err for word in ("loglikelihood", "Tokenizing", "Generating", "fatal"))

    monkeypatch.setattr("lm_eval.simple_evaluate", lambda **_: pytest.fail("judged again"))
    assert sdbench(*call).code == 0


@needs_harness
def test_it_reads_the_arms_own_weights(sdbench, checkpoint, tasks, tmp_path):
    """A pruned arm has the figure of the checkpoint that 'sdbench prune' makes of the same weights."""
    model = checkpoint()
    common = ("--model", model, "--method", "magnitude", "--pattern", "1:4")
    assert sdbench("e2e", *common, *SHORT, "--lm-eval", "more", "--lm-eval-path", tasks, "--output", "run").code == 0
    assert sdbench("prune", *common, "--format", "dense", "--output", "zeros").code == 0
    arms = {row["arm"]: row for row in read_jsonl(tmp_path / "run/rows.jsonl") if row["record"] == "arm"}
    assert arms["magnitude"]["lm_eval"][0]["value"] == pytest.approx(right_answers(tmp_path / "zeros") / 5)


@needs_harness
def test_bad_input(sdbench, checkpoint, tasks):
    call = ("e2e", "--model", checkpoint(), *SHORT, "--lm-eval-path", tasks, "--lm-eval")
    sdbench(*call, "arc_eazy").refuses(2, "--lm-eval arc_eazy", "did you mean arc_easy")
    sdbench(*call, "more", "--lm-eval-limit", 0).refuses(2, "--lm-eval-limit is 0")
    sdbench("e2e", "--lm-eval", "more", "--lm-eval-path", "nowhere").refuses(2, "--lm-eval-path nowhere: no such folder")
    (tasks / "data.jsonl").unlink()
    sdbench(*call, "more").refuses(1, "lm-evaluation-harness, more: ")


def test_without_the_extra(sdbench, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    sdbench("e2e", "--lm-eval", "arc_easy").refuses(2, "--lm-eval needs lm-evaluation-harness", "pip install 'sdbench[lm-eval]'")
    sdbench("e2e", "--lm-eval-limit", 3).refuses(2, "--lm-eval-path and --lm-eval-limit are of --lm-eval")
