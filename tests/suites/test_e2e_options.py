"""What an end-to-end run can be asked for: arms, limits, and the arguments by which a run directory knows its run."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdbench.calibrate.choices import CalibrationChoices
from sdbench.errors import SdbenchError, UsageError
from sdbench.models import resolve_model
from sdbench.pattern import Pattern
from sdbench.suites.data import make_manifest
from sdbench.suites.e2e.harness import HarnessTasks
from sdbench.suites.e2e.options import E2EOptions
from sdbench.suites.tasks.endpoint import Judge
from sdbench.suites.tasks.registry import find_task

from .asking import small_run

CPU = torch.device("cpu")
BASE = small_run("demo", max_tokens=120)


def names(**changes: Any) -> list[str]:
    return [arm.name for arm in replace(BASE, **changes).arms]


def write_split(folder: Path, answer: str) -> dict[str, Path]:
    """Three files of the same names whatever they hold."""
    folder.mkdir()
    train, validation, manifest = (folder / name for name in ("train.jsonl", "validation.jsonl", "manifest.json"))
    train.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    validation.write_text(f'{{"question": "2 + 2?", "answer": "#### {answer}"}}\n')
    make_manifest(train, validation, "r1").write(manifest)
    return {"train": train, "validation": validation, "split_manifest": manifest}


def test_arms_are_dense_then_the_control_then_the_chosen_sources() -> None:
    assert names() == ["dense", "teacher-forced", "decode"]
    assert names(calib=("self", "decode")) == ["dense", "teacher-forced", "self", "decode"]


def test_no_arm_comes_twice() -> None:
    assert names(calib=("decode", "teacher-forced", "decode")) == ["dense", "teacher-forced", "decode"]


def test_a_method_without_calibration_has_one_arm_of_its_name() -> None:
    assert names(method="magnitude") == ["dense", "magnitude"]


@pytest.mark.parametrize(
    ("option", "least"),
    [
        ("calibration_examples", 1),
        ("validation_examples", 1),
        ("max_tokens", 1),
        ("equal_tokens", 2),
        ("warmup_tokens", 0),
        ("rate_repeats", 0),
        ("prompt_tokens", 1),
        ("batch_size", 1),
    ],
)
def test_limits(option: str, least: int) -> None:
    """CASES 4 for equal_tokens: one token has no decode rate."""
    assert getattr(replace(BASE, **{option: least}), option) == least
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is {least - 1}; it must be at least {least}"):
        replace(BASE, **{option: least - 1})


def test_unknown_names_are_answered_with_the_closest() -> None:
    with pytest.raises(UsageError, match="unknown calibration source 'decod'; did you mean decode"):
        replace(BASE, calib=("decod",))
    with pytest.raises(UsageError, match="unknown method 'sparsgpt'; did you mean sparsegpt"):
        replace(BASE, method="sparsgpt")


def test_the_three_files_go_together(tmp_path: Path) -> None:
    files = write_split(tmp_path / "a", "4")
    assert replace(BASE, **files).train == files["train"]
    for left_out in files:
        with pytest.raises(UsageError, match="go together"):
            replace(BASE, **files | {left_out: None})


def test_a_random_model_takes_no_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="random: model has no text to answer"):
        replace(BASE, spec=resolve_model("random:qwen3-0.6b", None, CPU), **write_split(tmp_path / "a", "4"))


def test_every_option_is_among_the_arguments(tmp_path: Path) -> None:
    """A run directory resumes by its arguments: an option that is missing there would mix two runs."""
    files, others = write_split(tmp_path / "a", "4"), write_split(tmp_path / "b", "4")
    for name, path in others.items():
        others[name] = path.rename(path.with_name(f"other-{path.name}"))
    changed: dict[str, Any] = {
        "spec": resolve_model("someone/else", None, CPU),
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "pattern": Pattern(16, 32),
        "method": "sparsegpt",
        "calib": ("self",),
        "prefill": "dense",
        "compile_baseline": False,
        "fidelity": "only",
        "dataset_revision": "r1",
        "targets": ("down_proj",),
        "ignore": ("down_proj",),
        "choices": CalibrationChoices(tokens=100),
        "chosen_task": find_task("gsm8k"),
        "rival": resolve_model("someone/smaller", None, CPU),
        "harness": HarnessTasks(("arc_easy",)),
        "device_map": "balanced",
        "profile": "seed, version 1",
        "profile_changed": ("model",),
        **others,
    }
    base = replace(BASE, **files)
    for field in fields(E2EOptions):
        if field.name in ("data", "replies", "allow_code_execution", "judge"):
            continue  # of some tasks alone: see test_what_a_task_is_given_is_among_the_arguments
        new = changed[field.name] if field.name in changed else getattr(base, field.name) + 1
        assert replace(base, **{field.name: new}).arguments() != base.arguments(), field.name
    hub = replace(base, spec=resolve_model("someone/else", None, CPU))
    assert replace(hub, spec=resolve_model("someone/else", "v2", CPU)).arguments() != hub.arguments()


def test_what_a_task_is_given_is_among_the_arguments(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text("{}")
    other.write_text("[]")
    code = replace(BASE, chosen_task=find_task("classeval"), data=one)
    texts = replace(BASE, chosen_task=find_task("writingbench"), data=one, judge=Judge("http://a", "m"))
    runs = [
        code,
        replace(code, data=other),
        replace(code, allow_code_execution=True),
        replace(BASE, data=one),
        replace(BASE, replies=one),
        replace(BASE, replies=other),
        texts,
        replace(texts, judge=None),
        replace(texts, judge=Judge("http://b", "m")),
        replace(texts, judge=Judge("http://a", "n")),
    ]
    assert len({json.dumps(run.arguments()) for run in runs}) == len(runs)
    assert (code.arguments()["task"], code.arguments()["task_version"], code.arguments()["data"]) == ("classeval", 1, "one.jsonl")
    assert [replace(BASE, **given).arguments()["task"] for given in ({}, {"data": one}, {"replies": one})] == ["arithmetic", "own", "own"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chosen_task": "gsm8k"}, "task gsm8k needs its data; give --data FILE"),
        ({"chosen_task": "gsm8k", "data": Path("a"), "allow_code_execution": True}, "--allow-code-execution has no use for task gsm8k"),
        ({"judge": Judge("http://a", "m")}, "--judge-url has no use for task arithmetic"),
        (
            {"chosen_task": "fidelity", "data": Path("a"), "calib": ("teacher-forced",)},
            "needs reference answers, and task fidelity has none",
        ),
        ({"spec": "random", "data": Path("a")}, "a random: model has no text to answer; leave out --task and --data"),
    ],
)
def test_what_does_not_fit_a_task(given: dict[str, Any], message: str) -> None:
    if "chosen_task" in given:
        given = given | {"chosen_task": find_task(given["chosen_task"])}
    if "spec" in given:
        given = given | {"spec": resolve_model("random:qwen3-0.6b", None, CPU)}
    with pytest.raises(UsageError, match=message):
        replace(BASE, **given)


def test_a_file_and_parts_of_one_are_not_given_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--data is one file, of which a part is held out"):
        replace(BASE, data=tmp_path / "a.jsonl", **write_split(tmp_path / "a", "4"))


def test_without_reference_answers_there_is_no_control() -> None:
    wanted = replace(BASE, chosen_task=find_task("fidelity"), data=Path("a"), calib=("decode", "self"))
    assert [arm.name for arm in wanted.arms] == ["dense", "decode", "self"]


def test_every_choice_is_among_the_arguments(tmp_path: Path) -> None:
    text, other_text = tmp_path / "text.txt", tmp_path / "text.jsonl"
    text.write_text("one")
    other_text.write_text("two")
    mix = (("decode+sink", 1.0), ("text", 1.0))
    changes: dict[str, dict[str, Any]] = {
        "sink": {"sink": 2},
        "first": {"first": 3},
        "last": {"last": 3},
        "weighting": {"weighting": "late"},
        "mix": {"mix": (*mix, ("prefill", 1.0))},
        "tokens": {"tokens": 9},
        "text": {"text": other_text},
        "window": {"window": 9},
        "temperature": {"temperature": 0.5},
        "top_k": {"top_k": 5},
        "top_p": {"top_p": 0.5},
    }
    base = replace(BASE, calib=("decode", "mixed"), choices=CalibrationChoices(mix=mix, text=text, temperature=1.0))
    for item in fields(CalibrationChoices):
        other = replace(base, choices=replace(base.choices, **changes[item.name]))
        assert other.arguments() != base.arguments(), item.name


def test_other_examples_under_the_same_names_are_another_run(tmp_path: Path) -> None:
    one, other = (replace(BASE, **write_split(tmp_path / name, answer)) for name, answer in (("a", "4"), ("b", "5")))
    assert one.arguments() != other.arguments()
    copy = replace(BASE, **write_split(tmp_path / "c", "4"))
    assert copy.arguments() == one.arguments()  # where the files lie makes no difference


def test_another_checkpoint_under_the_same_name_is_another_run(tmp_path: Path) -> None:
    """Results hold a local model's name without its path, and checkpoints are often called alike."""
    runs = []
    for name, weights in (("a", b"1"), ("b", b"22")):
        folder = tmp_path / name / "final"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
        runs.append(replace(BASE, spec=resolve_model(str(folder), None, CPU)).arguments())
    assert runs[0]["model"] == runs[1]["model"] == "final"
    assert runs[0] != runs[1]
    assert str(tmp_path) not in str(runs)
    folder.joinpath("model.safetensors").write_bytes(b"333")
    assert replace(BASE, spec=resolve_model(str(folder), None, CPU)).arguments() != runs[1]


def test_a_corpus_is_known_by_what_it_holds(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        text = tmp_path / name / "corpus.txt"
        text.write_text(name)
        runs.append(replace(BASE, calib=("text",), choices=CalibrationChoices(text=text)).arguments())
    assert runs[0]["calibration_text"] == runs[1]["calibration_text"] == "corpus.txt"
    assert runs[0] != runs[1]
    with pytest.raises(SdbenchError, match=r"cannot read .*none\.txt: No such file"):
        replace(BASE, calib=("text",), choices=CalibrationChoices(text=tmp_path / "none.txt")).arguments()


def test_choices_are_checked_against_the_arms() -> None:
    with pytest.raises(UsageError, match="calibration source text: name a corpus"):
        replace(BASE, calib=("text",))
    with pytest.raises(UsageError, match="random: model has no tokenizer for a text"):
        spec = resolve_model("random:qwen3-0.6b", None, CPU)
        replace(BASE, spec=spec, calib=("text",), choices=CalibrationChoices(text=Path("a.txt")))


def test_arguments_name_a_manifest_that_is_not_there(tmp_path: Path) -> None:
    files = write_split(tmp_path / "a", "4") | {"split_manifest": tmp_path / "none.json"}
    with pytest.raises(SdbenchError, match=r"cannot read .*none\.json: No such file"):
        replace(BASE, **files).arguments()
