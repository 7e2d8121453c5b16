"""``sdbench sweep`` as a user calls it: values checked by the code of e2e before anything starts; runs of the demo model."""

import json

import pytest

from sdbench.cli.sweep import NOT_OF_A_RUN, run_options

SHORT = (
    "options: {model: demo, calibration-examples: 2, validation-examples: 2, max-tokens: 6, equal-tokens: 5, warmup-tokens: 0, "
    "rate-repeats: 1, device: cpu}\n"
)


@pytest.fixture
def grid(tmp_path):
    def write(text, name="grid.yaml"):
        (tmp_path / name).write_text(text)
        return name

    return write


def test_a_grid_may_set_every_option_of_e2e_but_those_of_the_sweep():
    known = run_options()
    assert {"model", "pattern", "calib", "method", "seed", "task", "fidelity-only"} <= known.keys()
    assert not known.keys() & {*NOT_OF_A_RUN, "help"}
    assert known["calib"].multiple and known["sequential"].switch and known["compile-baseline"].off == "--no-compile-baseline"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("axes: {pattern: [2:4, 2:5x]}\n", ["grid.yaml: pattern: 2:5x: pattern '2:5x': write it as N:M"]),
        ("axes: {method: [wanda], seed: [0, one]}\n", ["grid.yaml: seed: one: ", "not a valid integer"]),
        ("axes: {seed: [0, 00]}\n", ["seed 0", "seed 00 are the same run"]),
    ],
)
def test_a_wrong_value_is_one_line_before_anything_starts(text, messages, sdbench, grid, tmp_path):
    done = sdbench("sweep", grid(text + SHORT), "--output", "out")
    done.refuses(2, *messages)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("patern", "did you mean pattern?"),
        ("examples", f"the nearest of {len(run_options())}: validation-examples, calibration-examples, equal-tokens"),
        ("rate", f"the nearest of {len(run_options())}: pattern, temperature, rate-repeats"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest(key, nearest, sdbench, grid):
    done = sdbench("sweep", grid(f"axes: {{seed: [0]}}\noptions: {{{key}: 1}}\n"))
    done.refuses(2, f"grid.yaml: unknown key {key!r} in options; {nearest}")


@pytest.mark.parametrize("option", ["model", "compare-model"])
def test_a_model_that_is_not_there_is_one_line_before_anything_starts(option, sdbench, grid, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    done = sdbench("sweep", grid(f"axes: {{{option}: [nonsense/path]}}\n" + SHORT.replace("model: demo, ", "")), "--output", "out")
    missing = "model 'nonsense/path': no such folder here, not in the hub cache, and the hub cannot be reached (offline?)"
    done.refuses(1, f"grid.yaml: {option}: nonsense/path: {missing}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.yaml"], "cannot read none.yaml: No such file"),
        (["grid.yaml", "--ray-address", "1.2.3.4:5"], "--ray-address is of --executor ray"),
        (["grid.yaml", "--jobs", "0"], "--jobs"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, message, sdbench, grid):
    grid("axes: {output: [a]}\n")
    sdbench("sweep", *arguments).refuses(2, message)


def test_options_of_the_sweep_and_single_gpus_are_no_axes(sdbench, grid):
    why = "a sweep names its runs' folders itself, in its own --output"
    sdbench("sweep", grid("axes: {output: [a]}\n")).refuses(2, f"grid.yaml: output in axes: {why}")
    sdbench("sweep", grid("axes: {seed: [0]}\noptions: {output: a}\n")).refuses(2, f"grid.yaml: output in options: {why}")
    sdbench("sweep", grid("axes: {seed: [0]}\ninclude: [{min_speedup: 1}]\n")).refuses(2, "grid.yaml: min-speedup in include: ")
    sdbench("sweep", grid("axes: {device: [cuda:1]}\n")).refuses(2, "device: cuda:1: each run is given a GPU of its own")


@pytest.mark.slow
def test_a_grid_of_the_demo_model_and_the_same_again(sdbench, grid, tmp_path):
    call = ("sweep", grid("axes: {pattern: [2:4, 16:32]}\n" + SHORT), "--output", "out", "--json")
    done = sdbench(*call)
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert [(run["run"], run["outcome"], run["kept"], len(run["arms"])) for run in document["runs"]] == [
        ("2-4", "complete", False, 3),
        ("16-32", "complete", False, 3),
    ]
    assert [arm["pattern"] for run in document["runs"] for arm in run["arms"]] == [None, "2:4", "2:4", None, "16:32", "16:32"]
    before = (tmp_path / "out/2-4/run.json").read_bytes()
    again = sdbench(*call)
    assert "2 of 2 runs finished already and kept" in again.err
    assert [run["kept"] for run in json.loads(again.out)["runs"]] == [True, True]
    assert (tmp_path / "out/2-4/run.json").read_bytes() == before
    table = sdbench(
        "report", *(path for path in sorted((tmp_path / "out").iterdir()) if not path.name.startswith("."))
    )  # as a shell's out/*
    assert table.code == 0 and table.out.count("demo: dense against pruned") == 2
    # The hint under the sweep's own table, as printed.
    hint = sdbench(*call[:-1]).out.splitlines()[-1]
    assert hint == "each complete run with its notes: sdbench report out"
    assert sdbench(*hint.split()[-2:]).out.count("demo: dense against pruned") == 2
    listed = sdbench("runs", "out")
    assert listed.code == 0 and "2-4" in listed.out and "16-32" in listed.out


@pytest.mark.slow
def test_a_run_that_fails_is_told_and_the_other_is_kept(sdbench, grid, tmp_path):
    (tmp_path / "out/16-32").mkdir(parents=True)
    (tmp_path / "out/16-32/rows.jsonl").write_text('{"record": "arm"}\n')
    text = "axes: {pattern: [2:4, 16:32]}\n" + SHORT
    done = sdbench("sweep", grid(text), "--output", "out", "--retries", "0")
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert last.startswith("sdbench: error: 1 of 2 runs failed, the first 16-32 (out/16-32 holds rows but no run.json")
    assert "16-32: failed after 1 attempt" in done.out and "kept in out" in last
    assert json.loads((tmp_path / "out/2-4/run.json").read_text())["outcome"] == "complete"
    found = sdbench("report", "out")
    assert (found.code, found.err) == (0, "out: left out as not complete: 16-32 (failed)\n")
