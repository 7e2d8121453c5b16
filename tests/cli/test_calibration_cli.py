"""Calibration choices, fidelity and diagnosis of ``sdbench e2e`` as a user calls them."""

import json
from pathlib import Path

import pytest

from sdbench.cli.calibration import ABOUT_CALIBRATION, calibration_options
from sdbench.cli.prune import WITHOUT_CALIBRATION
from sdbench.results import RunRecord

SHORT = ["--calibration-examples=2", "--validation-examples=2", "--max-tokens=6", "--fidelity-only"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--calib", "text"], 2, "calibration source text: name a corpus with --calibration-text FILE"),
        (["--calib", "mixed"], 2, "name its parts, such as --mix decode=3 --mix prefill=1"),
        (["--calib", "mixed", "--mix", "decode"], 2, "--mix 'decode': write SOURCE=WEIGHT"),
        (["--calib", "mixed", "--mix", "decod=1"], 2, "unknown calibration source 'decod'; did you mean decode"),
        (["--calibration-tokens", "many"], 2, "--calibration-tokens 'many': write a whole number"),
        (["--calibration-tokens", "0"], 2, "--calibration-tokens is 0"),
        (["--calibration-tokens", "1M"], 1, "fewer than --calibration-tokens 1000000; raise --calibration-examples"),
        (["--top-k", "5"], 2, "give a --temperature above 0 too"),
        (["--first-decode", "2", "--last-decode", "2"], 2, "--first-decode and --last-decode exclude each other"),
        (["--sink-tokens", "4"], 2, "--sink-tokens changes nothing without the calibration source decode+sink"),
        (["--calib", "text", "--calibration-text", "none.txt"], 2, "cannot read none.txt: No such file"),
        (["--plot", "layers.png"], 2, "--plot draws what --diagnose measures; give both"),
        (["--diagnose", "--plot", "layers.doc"], 2, "the suffix chooses the format"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(arguments, code, message, sdbench, checkpoint):
    sdbench("e2e", "--model", checkpoint(), *SHORT, *arguments).refuses(code, message)


def test_a_corpus_without_texts_leaves_no_run_directory(sdbench, checkpoint, tmp_path):
    corpus = tmp_path / "c4.jsonl"
    corpus.write_text('{"txt": "a"}\n')
    done = sdbench("e2e", "--model", checkpoint(), *SHORT, "--calib", "text", "--calibration-text", corpus, "--output", "never")
    done.refuses(1, "c4.jsonl, line 1: no text")
    assert not (tmp_path / "never").exists()


def test_everything_at_once(sdbench, checkpoint, tmp_path):
    corpus = tmp_path / "c4.jsonl"
    corpus.write_text(json.dumps({"text": "How many apples are left of 9 when 4 are eaten? " * 20}) + "\n")
    call = ["--calib", "decode+sink", "--calib", "mixed", "--mix", "decode=1", "--mix", "text=1", "--calibration-text", corpus]
    call += ["--text-window=20", "--sink-tokens=2", "--last-decode=3", "--calibration-tokens=6", "--token-weighting=late"]
    call += ["--temperature=0.8", "--top-k=50", "--top-p=0.9", "--sequential", "--method=sparsegpt", "--diagnose", "--plot", "layers.svg"]
    done = sdbench("e2e", "--model", checkpoint(), *SHORT, *call, "--json", "--output", "run")
    assert done.code == 0, done.err
    whole = json.loads(done.out)
    assert [arm["arm"] for arm in whole["arms"]] == ["dense", "teacher-forced", "decode+sink", "mixed"]
    assert {entry["rows"] for entry in whole["calibration"]["sources"].values()} == {6}
    assert set(whole["arms"][2]["fidelity"]) == {"pruned", "dense"}
    assert {"discrepancy", "reconstruction_error"} <= whole["layers"][-1].keys()
    assert Path("layers.svg").read_text().count("decode+sink") >= 1
    told = {"mix": {"decode": 1.0, "text": 1.0}, "calibration_text": "c4.jsonl", "sequential": True, "fidelity": "only", "last_decode": 3}
    record = RunRecord.model_validate_json((tmp_path / "run/run.json").read_bytes())
    assert told.items() <= record.arguments.items() and whole["options"] == record.arguments


@pytest.mark.parametrize("width", [80, None])
def test_tables_are_whole(width, sdbench, checkpoint, monkeypatch):
    """CASES 23 for the further tables: every row is there, at 80 columns and piped."""
    if width:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(width))
    done = sdbench("e2e", "--model", checkpoint(), *SHORT, "--diagnose")
    assert done.code == 0
    rows = [line.split()[:3] for line in done.out.splitlines()]
    for arm in ("teacher-forced", "decode"):
        assert sum(row[:2] == [arm, "pruned"] for row in rows) >= 1 and sum(row == [arm, "2", "down_proj"] for row in rows) >= 1
    assert "not measured" not in done.out and "judged by fidelity alone" in done.out


def test_options_that_change_nothing_are_told(sdbench, checkpoint):
    """Refused by prune, but not here: a grid's common options meet a method that needs no calibration."""
    call = ("e2e", "--model", checkpoint(), *SHORT, "--method", "magnitude")
    done = sdbench(*call, "--calib", "self", "--sequential")
    told = "--method magnitude needs no calibration: --calib, --calibration-examples, --sequential change nothing"
    assert done.code == 0 and told in done.err.splitlines()
    assert "each block calibrated" not in done.out
    without = [option for option in call if option != "--calibration-examples=2"]
    assert "needs no calibration" not in sdbench(*without).err
    assert "needs no calibration" not in sdbench("e2e", "--model", "tiny", *SHORT, "--calib", "self").err


def test_options_about_calibration():
    """All that every command with calibration has, and nothing that prune takes for a method without."""
    common = {option.name for option in calibration_options(lambda **_: None).__click_params__}
    assert common < ABOUT_CALIBRATION and not ABOUT_CALIBRATION & WITHOUT_CALIBRATION


@pytest.mark.parametrize("command", ["e2e", "prune"])
def test_a_prompt_length_of_a_model_with_prompts_is_told(command, sdbench, checkpoint):
    call = ("--model", checkpoint(), "--calibration-examples", 1, "--max-tokens", 4, "--prompt-tokens", 9, "--output", "out")
    done = sdbench(command, *call, *(("--validation-examples", 1, "--rate-repeats", 0) if command == "e2e" else ()))
    assert done.code == 0 and "--prompt-tokens is about random: models, and changes nothing here" in done.err.splitlines()
