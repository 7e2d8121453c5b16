"""``sdbench pool``: hand-worked draws, and runs that must not be pooled."""

import json
from typing import Any

import pytest

from .test_report_cli import E2E, arm

ARGUMENTS = {"model": "demo", "pattern": "2:4", "method": "wanda", "calib": ["decode"], "validation_examples": 2}


FIGURES = ("equal_tokens", "decode_rate", "speedup", "ceiling", "peak_bytes", "path", "quality")
UNTIMED = dict.fromkeys((*FIGURES, *(f"{name}_reason" for name in FIGURES), "decode_rate_spread", "decode_rate_note", "variant"))


def fidelity(arm: str, example: str, kl: float, positions: int, prefill: str = "dense", agreement: float = 0.5) -> dict[str, Any]:
    return {
        "record": "fidelity", "arm": arm, "prefill": prefill, "example": example, "positions": positions, "kl": kl, "agreement": agreement,
        "first_divergence": None,
    }  # fmt: skip


FIRST = [
    fidelity("teacher-forced", "q1", 2.0, 10), fidelity("teacher-forced", "q2", 1.0, 30),
    fidelity("decode", "q1", 1.0, 10, agreement=1.0), fidelity("decode", "q2", 0.5, 30),
]  # fmt: skip
SECOND = [
    fidelity("teacher-forced", "q1", 4.0, 10), fidelity("teacher-forced", "q3", 2.0, 20),
    fidelity("decode", "q1", 1.0, 10), fidelity("decode", "q3", 1.0, 20),
]  # fmt: skip


@pytest.fixture
def draws(saved_run):
    saved_run("a", "e2e", ARGUMENTS | {"seed": 0}, FIRST)
    saved_run("b", "e2e", ARGUMENTS | {"seed": 1}, SECOND)


def test_two_draws_by_hand(draws, sdbench):
    done = sdbench("pool", "a", "b", "--json")
    assert (done.code, done.err) == (0, "")
    control, decode = json.loads(done.out)["rows"]
    assert (control["arm"], control["seeds"], control["questions"], control["positions"]) == ("teacher-forced", [0, 1], 3, 70)
    assert control["kl"] == pytest.approx((2 * 10 + 1 * 30 + 4 * 10 + 2 * 20) / 70) and control["control_ratio"] is None
    assert control["kl_of_draws"] == pytest.approx([50 / 40, 80 / 30])
    assert decode["kl"] == pytest.approx((10 + 15 + 10 + 20) / 70)
    assert decode["agreement"] == pytest.approx((10 + 0.5 * 60) / 70)
    ratio = decode["control_ratio"]
    # Of q1, q2 and q3 the ratios are 60/20, 30/15 and 40/20.
    assert ratio["estimate"] == pytest.approx(130 / 55) and 2.0 <= ratio["low"] <= 130 / 55 <= ratio["high"] <= 3.0


def test_int8_has_no_pattern(saved_run, sdbench):
    saved_run("a", "e2e", ARGUMENTS | {"seed": 0}, [*FIRST, fidelity("int8", "q1", 0.5, 10), fidelity("int8", "q2", 0.25, 30)])
    int8, *_ = json.loads(sdbench("pool", "a", "--json").out)["rows"]
    assert (int8["arm"], int8["pattern"], int8["method"]) == ("int8", None, None)
    assert int8["control_ratio"]["estimate"] == pytest.approx(4.0)
    # Beside another pattern it is the same draw, told once, and there is no one control for it.
    saved_run("b", "e2e", ARGUMENTS | {"seed": 0, "pattern": "16:32"}, [*FIRST, fidelity("int8", "q1", 0.5, 10)])
    int8, *others = json.loads(sdbench("pool", "a", "b", "--json").out)["rows"]
    assert (int8["arm"], int8["seeds"], int8["positions"], int8["control_ratio"]) == ("int8", [0], 40, None)
    assert [row["arm"] for row in others] == ["teacher-forced", "decode"] * 2


def test_a_kl_at_rounding_level_has_no_ratio(saved_run, sdbench):
    """An int8 arm of a small model is the dense one but for rounding: how many times as near it is nothing tells."""
    rounding = [fidelity("int8", "q1", 3e-9, 10), fidelity("int8", "q2", 0.0, 30)]
    saved_run("a", "e2e", ARGUMENTS | {"seed": 0}, [*FIRST, *rounding])
    assert [row["control_ratio"] is None for row in json.loads(sdbench("pool", "a", "--json").out)["rows"]] == [True, True, False]
    shown = sdbench("pool", "a", "--format", "markdown").out
    assert "| int8 | 1 | 2 | 7.50e-10 | 7.50e-10-7.50e-10 | 50.0% | - | - |" in shown
    assert "\n- no x control where a KL is not above 1e-06 nats: so much is the rounding of float32 logits\n" in shown
    saved_run("b", "e2e", ARGUMENTS | {"seed": 0}, FIRST)
    assert "no x control" not in sdbench("pool", "b").out


def test_draws_of_one_question_are_resampled_together(saved_run, sdbench):
    """Two draws of the same two questions are two clusters, and not four independent pairs: the interval is that of the sums."""
    decode = [fidelity("decode", one, 1.0, 10) for one in "xy"]
    rows = [
        [*(fidelity("teacher-forced", one, kl, 10) for one, kl in zip("xy", kls, strict=True)), *decode] for kls in ((1.0, 3.0), (3.0, 9.0))
    ]
    for seed, (name, part) in enumerate(zip("ab", rows, strict=True)):
        saved_run(name, "e2e", ARGUMENTS | {"seed": seed}, part)
    ratio = json.loads(sdbench("pool", "a", "b", "--json").out)["rows"][1]["control_ratio"]
    # Both clusters alike, x alone, y alone: (4 + 12) / 4, 8 / 4, 24 / 4.
    assert ratio == {"estimate": 4.0, "low": 2.0, "high": 6.0}


def test_patterns_and_methods_are_lines_of_their_own(draws, saved_run, sdbench):
    saved_run("c", "e2e", ARGUMENTS | {"seed": 0, "pattern": "16:32"}, FIRST)
    out = sdbench("pool", "a", "b", "c").out
    lines = [line.split() for line in out.splitlines() if line.startswith((" 2:4", " 16:32"))]
    assert [line[:5] for line in lines] == [
        ["2:4", "wanda", "dense", "teacher-forced", "2"], ["2:4", "wanda", "dense", "decode", "2"],
        ["16:32", "wanda", "dense", "teacher-forced", "1"], ["16:32", "wanda", "dense", "decode", "1"],
    ]  # fmt: skip
    assert "| 2:4 | wanda | dense | decode | 2 | 3 | 0.7857 | 0.6250-1.0000 |" in sdbench("pool", "a", "b", "--format", "markdown").out
    assert sdbench("pool", "a", "--format", "csv").out.splitlines()[0].startswith('"pattern","method","prefill","arm"')


@pytest.mark.parametrize(
    ("kl", "text"),
    [(24.75, "24.7500"), (0.5118, "0.5118"), (0.00143, "0.0014"), (0.00057, "0.000570"), (3.3e-05, "3.30e-05"), (0.0, "0.00")],
)
def test_a_kl_reads_the_same_in_a_pool_and_in_a_run(saved_run, sdbench, kl, text):
    """Three figures of a small one, and four decimals of any other."""
    found = {"kl": kl, "agreement": 0.5, "diverged": 0, "questions": 1, "first_divergence": None, "control_ratio": None}
    rows = [arm(name, 100.0, fidelity={"dense": found} if name == "decode" else None) for name in ("dense", "decode")]
    saved_run("a", "e2e", E2E | ARGUMENTS | {"seed": 0}, [*rows, fidelity("decode", "q1", kl, 10)])
    assert f"| decode | dense | {text} |" in sdbench("report", "a", "--format", "markdown").out
    assert f"| decode | 1 | 1 | {text} | {text}-{text} |" in sdbench("pool", "a", "--format", "markdown").out


def test_calibrations_are_lines_of_their_own(saved_run, sdbench):
    """A sweep over ``calib: [decode, [decode, self]]``: one seed each, and a control each, since the sources share its number of rows."""
    other = [row | {"kl": 3 * row["kl"]} if row["arm"] == "teacher-forced" else row for row in FIRST]
    own = [fidelity("self", "q1", 1.0, 10), fidelity("self", "q2", 1.0, 30)]
    saved_run("a", "e2e", ARGUMENTS | {"seed": 0}, FIRST)
    saved_run("b", "e2e", ARGUMENTS | {"seed": 0, "calib": ["decode", "self"]}, [*other, *own])
    rows = json.loads(sdbench("pool", "a", "b", "--json").out)["rows"]
    assert [(row["calib"], row["arm"], row["kl"], row["seeds"]) for row in rows] == [
        (["decode"], "teacher-forced", 1.25, [0]), (["decode"], "decode", 0.625, [0]),
        (["decode", "self"], "teacher-forced", 3.75, [0]), (["decode", "self"], "decode", 0.625, [0]),
        (["decode", "self"], "self", 1.0, [0]),
    ]  # fmt: skip
    assert [row["control_ratio"] and row["control_ratio"]["estimate"] for row in rows] == [None, 2.0, None, 6.0, 3.75]
    shown = sdbench("pool", "a", "b", "--format", "markdown").out
    assert "| pattern | method | calib | prefill | arm |" in shown and "| 2:4 | wanda | decode, self | dense | self | 1 |" in shown
    # Where all runs have the same sources, in whatever order they were typed, the arm says it all.
    saved_run("c", "e2e", ARGUMENTS | {"seed": 1, "calib": ["self", "decode"]}, SECOND)
    assert "calib" not in sdbench("pool", "b", "c", "--format", "markdown").out.splitlines()[2]
    sdbench("pool", "a", "b", "a").refuses(2, "a and a are one draw: 2:4, wanda, decode, seed 0; give each once")


def answered(arm: str, matches: dict[str, bool], eos: int = 2, truncated: int = 0) -> dict[str, Any]:
    pruned = arm != "dense"
    row = {"record": "arm", "arm": arm, "pattern": "2:4" if pruned else None, "method": "wanda" if pruned else None}
    row |= {"prefill": "pruned" if pruned else None, "matches": matches, "examples": len(matches), "answer_match": sum(matches.values())}
    return row | {"eos": eos, "truncated": truncated, **dict.fromkeys(("kernel_calls", "expected_kernel_calls"), 0), **UNTIMED}


def test_answers_of_two_draws_by_hand(saved_run, sdbench):
    first = [answered("dense", {"x": True, "y": True}), answered("teacher-forced", {"x": True, "y": False}, 1, 1)]
    saved_run("a", "e2e", ARGUMENTS | {"seed": 0}, [*first, answered("decode", {"x": True, "y": True})])
    second = [answered("dense", {"x": True, "z": False}), answered("teacher-forced", {"x": False, "z": False})]
    saved_run("b", "e2e", ARGUMENTS | {"seed": 1}, [*second, answered("decode", {"x": True, "z": False})])
    found = json.loads(sdbench("pool", "a", "b", "--json").out)
    assert found["rows"] == []
    dense, control, decode = found["answers"]
    assert (dense["right"], dense["examples"], dense["pattern"], dense["over_control"]) == (3, 4, None, None)
    assert (control["right"], control["right_of_draws"], control["eos"], control["truncated"]) == (1, [1, 0], 3, 1)
    # Of x, asked twice, one answer more is right; of y one of one, of z none of one.
    assert decode["over_control"]["estimate"] == pytest.approx(2 / 4)
    assert 0 <= decode["over_control"]["low"] < 2 / 4 < decode["over_control"]["high"] <= 1
    line = next(line.split() for line in sdbench("pool", "a", "b").out.splitlines() if "decode" in line)
    assert line[:8] == ["2:4", "wanda", "pruned", "decode", "2", "3/4", "1-2", "4/4"] and "+50.0" in line


def test_arms_that_never_differ_have_an_interval_all_the_same(saved_run, sdbench):
    """Of 60 questions none differs: up to about 3 of 60 might (the rule of three), either way."""
    answers = {f"q{number}": number % 2 == 0 for number in range(60)}
    saved_run("a", "e2e", ARGUMENTS | {"seed": 0}, [answered("teacher-forced", answers), answered("decode", answers)])
    done = sdbench("pool", "a")
    (line,) = (line.split() for line in done.out.splitlines() if " decode " in line)
    assert line[-4:] == ["+0.0", "-4.9", "to", "+4.9"]
    assert "where all questions say the same" in done.out.splitlines()[-1]


def test_a_question_with_all_of_its_draws_is_resampled_as_one(saved_run, sdbench):
    """Two questions, one of which always gains and one of which never does: clusters give 0 to 100 points, four pairs would give less."""
    for seed, name in enumerate("ab"):
        arms = [answered("teacher-forced", {"x": False, "y": False}), answered("decode", {"x": True, "y": False})]
        saved_run(name, "e2e", ARGUMENTS | {"seed": seed}, arms)
    *_, decode = json.loads(sdbench("pool", "a", "b", "--json").out)["answers"]
    assert decode["over_control"] == {"estimate": 0.5, "low": 0.0, "high": 1.0}


def test_fidelity_and_answers_are_tables_of_their_own(saved_run, sdbench):
    arms = [answered("teacher-forced", {"q1": True, "q2": False}), answered("decode", {"q1": True, "q2": True})]
    saved_run("a", "e2e", ARGUMENTS | {"seed": 0}, [*FIRST, *arms])
    shown = sdbench("pool", "a", "--format", "markdown").out
    assert "### demo: 1 run, fidelity" in shown and "#### answers" in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 0}, "c and a are one draw: 2:4, wanda, decode, seed 0; give each once"),
        (
            {"seed": 2, "model": "other"},
            "c has --model other and a --model demo: pooled runs may differ in --calib, --method, --pattern, --seed alone",
        ),
        ({"seed": 2, "validation_examples": 3}, "c has --validation-examples 3 and a --validation-examples 2: pooled runs"),
    ],
)
def test_runs_that_are_no_draws_of_one_comparison(draws, saved_run, sdbench, changes, message):
    saved_run("c", "e2e", ARGUMENTS | changes, FIRST)
    sdbench("pool", "a", "b", "c").refuses(2, message)


@pytest.mark.parametrize(
    ("name", "first", "other", "message"),
    [
        ("fidelity", "also", "only", "c has --fidelity-only and a --fidelity: pooled runs"),
        ("fidelity", "only", "no", "c has no --fidelity and a --fidelity-only: "),
        ("alternatives", True, False, "c has --no-alternatives and a --alternatives: "),
        ("diagnose", False, True, "c has --diagnose and a no --diagnose: "),
        ("dtype", "float32", "bfloat16", "c has --dtype bf16 and a --dtype fp32: "),
        ("targets", [], ["q_proj", "*.mlp.*"], "c has --targets q_proj --targets *.mlp.* and a no --targets: "),
        ("mix", {"decode": 3.0, "prefill": 1.0}, {}, "c has no --mix and a --mix decode=3 --mix prefill=1: "),
        ("task", "own", "gsm8k", "c has --task gsm8k and a no --task: "),
        ("task_version", 1, 2, "c has version 2 of --task and a 1: "),
        ("train_sha256", "1f", "2e", "c and a have another --train, though its name is the same: "),
        ("compare_model_files", "1f", "2e", "c and a have another --compare-model, though its name is the same: "),
        ("profile", None, "paper, version 1", "c has --profile paper of version 1 and a no --profile: "),
    ],
)
def test_a_difference_is_told_as_it_was_typed(saved_run, sdbench, name, first, other, message):
    saved_run("a", "e2e", ARGUMENTS | {"seed": 0, name: first}, FIRST)
    saved_run("c", "e2e", ARGUMENTS | {"seed": 1, name: other}, FIRST)
    sdbench("pool", "a", "c").refuses(2, message)


def test_draws_of_a_profile_may_have_seeds_of_their_own(saved_run, sdbench):
    for seed, changed in ((42, []), (1, ["seed"])):
        saved_run(f"s{seed}", "e2e", ARGUMENTS | {"seed": seed, "profile": "seed, version 1", "profile_changed": changed}, FIRST)
    assert sdbench("pool", "s42", "s1").code == 0


def test_other_runs_are_refused(draws, saved_run, sdbench):
    saved_run("k", "kernels", {"pattern": ["2:4"]}, [{"record": "model"}])
    saved_run("cut", "e2e", ARGUMENTS | {"seed": 3}, FIRST, outcome="interrupted")
    saved_run("none", "e2e", ARGUMENTS | {"seed": 4}, [{"record": "model"}])
    sdbench("pool", "k").refuses(2, "'sdbench kernels'")
    sdbench("pool", "a", "cut").refuses(1, "not a complete run (interrupted)")
    sdbench("pool", "a", "none").refuses(5, "neither fidelity rows nor answers")


def test_pooling_needs_no_torch(draws, tmp_path, heavy_imports):
    done = heavy_imports(tmp_path, "pool", "a", "b")
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.fixture
def swept(saved_run, tmp_path):
    """A sweep's folder: two complete runs, one that failed and one that never began."""
    (tmp_path / "out").mkdir()
    for seed, rows in ((0, FIRST), (1, SECOND)):
        saved_run(f"out/seed{seed}", "e2e", ARGUMENTS | {"seed": seed}, rows)
    saved_run("out/seed2", "e2e", ARGUMENTS | {"seed": 2}, FIRST, outcome="failed")

    def write(*outcomes: str) -> None:
        runs = [{"run": f"seed{seed}", "arguments": {"seed": str(seed)}, "outcome": outcome} for seed, outcome in enumerate(outcomes)]
        record = {"schema": "sdbench.sweep/1", "grid": "grid.yaml", "executor": "local", "varying": ["seed"], "runs": runs}
        (tmp_path / "out/sweep.json").write_text(json.dumps(record))

    write("complete", "complete", "failed", "waiting")
    return write


@pytest.mark.parametrize("command", ["pool", "report"])
def test_a_sweeps_folder_stands_for_its_complete_runs(command, swept, sdbench):
    done = sdbench(command, "out")
    assert (done.code, done.err) == (0, "out: left out as not complete: seed2 (failed), seed3 (waiting)\n")
    both = sdbench(command, "out/seed0", "out/seed1").out
    assert done.out.endswith(both) and (command == "report" or done.out == both)
    # As a shell's out/* names them, where no run has failed.
    assert sdbench(command, "out/seed0", "out/seed1", "out/sweep.json").out == both
    swept("complete", "complete")
    assert sdbench(command, "out").err == ""


@pytest.mark.parametrize("command", ["pool", "report"])
def test_a_sweep_without_complete_runs_or_with_a_damaged_record(command, swept, sdbench, tmp_path):
    swept("failed", "running")
    sdbench(command, "out").refuses(5, "no run of the sweep in out is complete")
    (tmp_path / "out/sweep.json").write_text("{")
    sdbench(command, "out").refuses(1, "out/sweep.json is no sdbench.sweep/1 record")
    sdbench(command, "out/sweep.json").refuses(2, "out/sweep.json is no run directory")
