"""``sdbench e2e --profile`` on stand-in models."""

import json

import pytest

from sdbench.results import read_jsonl
from sdbench.suites.e2e import profiles

QUESTIONS = "".join(
    json.dumps({"question": f"Tom has {n} apples and buys 4 more. How many apples does he have now?", "answer": f"{n} + 4. #### {n + 4}"})
    + "\n"
    for n in range(1, 1013)
)
SHORT = ("--model", "demo", "--equal-tokens", 5, "--max-tokens", 60, "--rate-repeats", 1, "--warmup-tokens", 0)


@pytest.fixture
def data(tmp_path):
    """A file as large as gsm8k's holdout asks for."""
    (tmp_path / "questions.jsonl").write_text(QUESTIONS)
    return "questions.jsonl"


def arguments(path):
    return json.loads((path / "run.json").read_text())["arguments"]


def test_seed_on_the_demo_model(sdbench, data, tmp_path):
    done = sdbench("e2e", "--profile", "seed", *SHORT, "--data", data, "--output", "run")
    assert done.code == 0, done.err
    found = arguments(tmp_path / "run")
    kept = {"task": "gsm8k", "pattern": "2:4", "method": "wanda", "calib": ["decode"], "calibration_examples": 4, "seed": 42}
    assert kept.items() <= found.items()
    assert found["profile"] == "seed, version 1"
    # Those that the command line gives win, and the revision was the other model's.
    assert (found["model"], found["revision"], found["max_tokens"], found["equal_tokens"]) == ("demo", None, 60, 5)
    assert found["profile_changed"] == ["equal-tokens", "max-tokens", "model"]
    assert "profile seed, version 1, with another equal-tokens, max-tokens, model" in done.out
    arms = [row for row in read_jsonl(tmp_path / "run/rows.jsonl") if row["record"] == "arm"]
    assert [(arm["arm"], arm["examples"]) for arm in arms] == [("dense", 4), ("teacher-forced", 4), ("decode", 4)]


@pytest.mark.parametrize("pattern", [None, "16:32"])
def test_paper_on_the_demo_model(pattern, sdbench, tmp_path):
    few = ("--calibration-examples", 2, "--validation-examples", 2)
    done = sdbench("e2e", "--profile", "paper", *SHORT, *few, *(("--pattern", pattern) if pattern else ()), "--output", "run")
    assert done.code == 0, done.err
    found = arguments(tmp_path / "run")
    assert (found["method"], found["temperature"], found["sequential"]) == ("sparsegpt", 0.7, True)
    assert found["pattern"] == (pattern or "2:4")
    assert ("pattern" in found["profile_changed"]) == (pattern is not None)


def test_the_same_value_is_no_change(sdbench, data, tmp_path):
    done = sdbench("e2e", "--profile", "seed", *SHORT, "--data", data, "--seed", 42, "--calib", "decode", "--output", "run")
    assert done.code == 0, done.err
    assert arguments(tmp_path / "run")["profile_changed"] == ["equal-tokens", "max-tokens", "model"]


def test_the_profiles_own_model_has_its_revision(sdbench, data, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    done = sdbench("e2e", "--profile", "seed", "--data", data)
    done.refuses(1, "'Qwen/Qwen3-4B-Instruct-2507' at revision cdbee75f17c01a7cc42f958dc650907174af0554", "the hub cannot be reached")


def test_bad_names(sdbench, monkeypatch):
    sdbench("e2e", "--profile", "papr").refuses(2, "unknown profile 'papr'; did you mean paper?")
    broken = profiles.find_profile("paper").model_copy(update={"options": {"temprature": 1.0}})
    monkeypatch.setattr(profiles, "profiles", lambda: {"paper": broken})
    sdbench("e2e", "--profile", "paper").refuses(1, "profile paper: there is no option --temprature; did you mean temperature?")


def test_help_lists_them(sdbench):
    out = " ".join(sdbench("e2e", "--help").out.replace("│", " ").split())
    assert "seed (an earlier run" in out and "paper (the paper's" in out
