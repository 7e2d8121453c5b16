"""``sdbench report`` as a user calls it: on runs of the commands themselves, and on hand-made run directories."""

import json
from dataclasses import replace
from typing import Any

import pytest

from sdbench.results import read_csv, read_jsonl, strict_json

ASKED = {"pattern": ["2:4"], "shapes": "o,down", "dtype": "bf16", "device": "cuda"}
E2E = {
    "model": "tiny",
    "pattern": "2:4",
    "method": "wanda",
    "prefill": "dense",
    "max_tokens": 6,
    "equal_tokens": 5,
    "rate_repeats": 1,
    "dtype": "float32",
    "device": "cuda",
}


def row(kernel: str, variant: str, layer: str, p50: float | None, **changes: Any) -> dict[str, Any]:
    made = {
        "record": "result",
        "kernel": kernel,
        "variant": variant,
        "pattern": None if kernel == "dense" else "2:4",
        "shape": [16, 32],
        "dtype": "bf16",
        "config": {"block_out": 2},
        "outcome": "correct",
        "error": 1e-7,
        "us": {"p20": p50 - 0.25, "p50": p50, "p80": p50 + 0.25} if p50 else None,
        "message": None,
        "layer": layer,
        "of_shape": [16, 32] if layer == "o" else [32, 64],
        "us_reason": None,
        "bytes": 1000,
        "gbps": 4123.4 if p50 else None,
        "roofline": 0.876 if p50 else None,
        "configs": 1,
        "outcomes": {"correct": 1},
        "config_source": "search",
        "compile_seconds": 1.25,
        "attempt": 1,
    }
    return made | changes


ROWS = [
    row("dense", "linear", "o", 12.0),
    row("dense", "gemv", "o", 8.0),
    row("spmv", "lane_row", "o", 4.0),
    row("dense", "linear", "down", 24.0),
    row("dense", "gemv", "down", 16.0),
    row("spmv", "lane_row", "down", 8.125),
]
SUMS = "2:4: sum of 2 shapes 12.1 us, 2.97x over F.linear, 1.98x over the fastest dense"  # 36 / 12.125 and 24 / 12.125
CHAIN = {
    "record": "chain",
    "kernel": "chain",
    "variant": "spmv",
    "pattern": "2:4",
    "layers": 36,
    "us": {"p20": 900.0, "p50": 1000.0, "p80": 1100.0},
    "us_reason": None,
    "outcome": "correct",
    "gbps": 4000.0,
    "speedup": {"linear": 2.0, "dense": 1.5},
}


TRIAL = {"record": "trial", "config": {"splits": 1}, "outcome": "correct", "error": 1e-7, "us": None, "message": None}


def arm(name: str, rate: float | None, **changes: Any) -> dict[str, Any]:
    pruned = name != "dense"
    made = {
        "record": "arm",
        "arm": name,
        "pattern": "2:4" if pruned else None,
        "method": "wanda" if pruned else None,
        "prefill": "dense" if pruned else None,
        "examples": 4,
        "answer_match": 3,
        "eos": 2,
        "truncated": 2,
        "quality_reason": None,
        "equal_tokens": 5,
        "decode_rate": rate,
        "decode_rate_spread": {"p20": rate, "p50": rate, "p80": rate} if rate else None,
        "decode_rate_note": None,
        "speedup": 1.25 if pruned else None,
        "speedup_reason": None if pruned else "this arm is the baseline",
        "variant": "lane_row" if pruned else None,
        "kernel_calls": 12 if pruned else 0,
        "expected_kernel_calls": 12 if pruned else 0,
        "ceiling": 400.0,
        "ceiling_reason": None,
        "peak_bytes": 1.5e9,
        "peak_bytes_reason": None,
        "path": "eager",
        "path_reason": None,
        "attempt": 1,
    }
    return made | ({} if pruned else {"baselines": {"eager": rate}}) | changes


AUDITED = {"attempt": 1, "started": "2026-12-01T00:00:00+00:00", "outcome": "failed"}
SAMPLE = {
    "prompt_hash": "h", "ids": [7, 2], "match": None, "eos": True, "truncated": False, "tokens": 2,
    "kernel_calls": 0, "expected_kernel_calls": 0,
}  # fmt: skip


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def table_line(out: str, *words: str) -> list[str]:
    """The one line that holds all of these words, as words."""
    (line,) = [line.split() for line in out.splitlines() if set(words) <= set(line.split())]
    return line


class TestTheSameAsTheCommand:
    """Text, Markdown and JSON of a run directory are what its command gave."""

    CALL = ("kernels", "--shapes", "8x32,16x32", "--device", "cpu", "--variant", "lane_row", "--output", "run")

    def test_kernels(self, sdbench, tmp_path):
        sdbench(*self.CALL)
        rows = read_jsonl(tmp_path / "run/rows.jsonl")
        for number, one in enumerate(rows):
            if one["record"] == "result" and one["outcome"] == "correct":
                p50 = 2.0 + number
                one |= {"us": {"p20": p50 - 0.25, "p50": p50, "p80": p50 + 0.25}, "gbps": 4123.4, "roofline": 0.876}
            if one["variant"] == "linear":
                one |= {"error": None, "error_status": "nan"}
        (tmp_path / "run/rows.jsonl").write_text("".join(strict_json(one) + "\n" for one in rows))
        printed = sdbench(*self.CALL).out
        assert "nan" in printed and "x over the fastest dense" in printed

        header, shown = sdbench("report", "run").out.split("\n", 1)
        assert shown == printed
        assert header.startswith("run: sdbench kernels of 8x32,16x32, 2:4, bf16 on CPU, torch 2.")
        assert header.endswith(", complete in 2 attempts")
        title, _, rest = sdbench("report", "run", "--format", "markdown").out.split("\n\n", 2)
        assert f"{title}\n\n{rest}" == (tmp_path / "run/report.md").read_text()
        assert strict(sdbench("report", "run", "--format", "json").out) == strict(sdbench(*self.CALL, "--json").out)

    def test_a_wrong_result_reads_the_same_from_memory_and_from_the_run_directory(self, sdbench, monkeypatch):
        """CASES 5 and 19: an error that is NaN is null with its status in JSON, and "nan" in the table."""
        import torch

        from sdbench.kernels import registry

        registry.variants("spmv")
        known = registry.find("spmv", "lane_row")
        spoilt = replace(known, launch=lambda weight, x, y, config: torch.full_like(y, float("nan")))
        monkeypatch.setitem(registry._VARIANTS, ("spmv", "lane_row"), spoilt)
        first = sdbench(*self.CALL)
        assert first.code == 3
        assert [line.split()[-1] for line in first.out.splitlines() if " incorrect " in line] == ["nan"] * 2
        assert sdbench("report", "run").out.split("\n", 1)[1] == first.out
        document = strict(sdbench("report", "run", "--format", "json").out)
        assert document == strict(sdbench(*self.CALL, "--json").out)
        wrong = [one for one in document["rows"] if one["outcome"] == "incorrect"]
        assert wrong and all((one["error"], one["error_status"]) == (None, "nan") for one in wrong)

    def test_e2e(self, sdbench, checkpoint, tmp_path):
        short = ("--calibration-examples=2", "--validation-examples=2", "--max-tokens=6", "--equal-tokens=5", "--rate-repeats=1")
        call = ("e2e", "--model", checkpoint(), *short, "--output", "run")
        *printed, last = sdbench(*call).out.splitlines()
        assert last == "run directory: run"
        header, *shown = sdbench("report", "run").out.splitlines()
        assert shown == printed
        assert header.startswith("run: sdbench e2e of tiny, 2:4, float32 on CPU, torch 2.")
        title, _, rest = sdbench("report", "run", "--format", "markdown").out.split("\n\n", 2)
        assert f"{title}\n\n{rest}" == (tmp_path / "run/report.md").read_text()
        given = sdbench(*call, "--json").out
        assert strict(sdbench("report", "run", "--format", "json").out) == strict(given)

    def test_tune(self, sdbench, saved_run):
        refused = row("spmv", "nibble", "o", None, outcome="constraint", message="takes no 2:4")
        saved_run("run", "tune", ASKED, [row("spmv", "lane_row", "o", 4.0, outcomes={"correct": 11, "timeout": 1}), refused])
        header, title, *_, last = sdbench("report", "run").out.splitlines()
        assert "run: sdbench tune of o,down, 2:4, bf16 on NVIDIA H200, torch 2.11.0, Triton 3.6.0, commit 0123456, complete" in header
        assert (title, last) == ("Fastest right configs on NVIDIA H200", "2.5 s of compiling, in no figure above")
        words = "o 16x32 2:4 spmv/lane_row 4.00 3.75-4.25 search block_out=2 11 correct, 1 timeout"
        assert table_line(sdbench("report", "run").out, "spmv/lane_row") == words.split()
        assert strict(sdbench("report", "run", "--format", "json").out)["schema"] == "sdbench.tune/1"


class TestKernels:
    def test_speedups_sums_and_chains_from_the_rows(self, sdbench, saved_run):
        saved_run("run", "kernels", ASKED, [*ROWS, CHAIN, TRIAL])
        out = sdbench("report", "run").out
        assert SUMS in out.splitlines()
        assert "chain of 36 layers, 2:4: 1000 us, 1.50x over the fastest dense" in out.splitlines()
        best = "o 16x32 2:4 lane_row * correct 4.00 3.75-4.25 4123 88 3.00 2.00 - - 1.0e-07"
        assert table_line(out, "o", "lane_row") == best.split()
        assert len([line for line in out.splitlines() if line.startswith((" o ", " down "))]) == 6

    def test_of_several_rows_with_one_key_the_last_holds(self, sdbench, saved_run):
        again = [row("spmv", "lane_row", "o", 3.875, attempt=2), CHAIN | {"us": {"p20": 1.0, "p50": 750.0, "p80": 1.0}}]
        saved_run("run", "kernels", ASKED, [*ROWS, CHAIN, *again])
        out = sdbench("report", "run").out
        assert "2:4: sum of 2 shapes 12.0 us, 3.00x over F.linear, 2.00x over the fastest dense" in out
        assert " 4.00 " not in out and table_line(out, "o", "lane_row")[6] == "3.88"
        assert [line for line in out.splitlines() if line.startswith("chain")] == [
            "chain of 36 layers, 2:4: 750 us, 1.50x over the fastest dense"
        ]

    def test_a_plot(self, sdbench, saved_run, tmp_path):
        pytest.importorskip("matplotlib")
        saved_run("run", "kernels", ASKED, ROWS)
        saved_run("e2e", "e2e", E2E, [arm("dense", 100.0)])
        assert sdbench("report", "run", "e2e", "--plot", "plots/roofline.svg").code == 0
        assert (tmp_path / "plots/roofline.svg").read_text().count("<svg") == 1
        sdbench("report", "run", "--plot", "plot.jpg").refuses(2, "the suffix chooses the format")
        saved_run("empty", "kernels", ASKED, outcome="running")
        assert sdbench("report", "empty", "--plot", "plot.svg").code == 5
        assert not (tmp_path / "plot.svg").exists()


class TestUnfinished:
    def test_what_is_there_is_shown_and_said_to_be_all(self, sdbench, saved_run):
        saved_run("run", "kernels", ASKED, ROWS[:3], outcome="failed", outcome_reason="[b]no luck", audit=2 * [AUDITED])
        done = sdbench("report", "run")
        assert (done.code, done.err) == (0, "")
        first, second, *_ = done.out.splitlines()
        assert first.endswith("commit 0123456, failed in 2 attempts")
        assert second == "NOT A COMPLETE RUN ([b]no luck): what follows, sums included, is over what is there"
        assert "2:4: sum of 1 shape 4.0 us, 3.00x over F.linear, 2.00x over the fastest dense" in done.out.splitlines()

    def test_an_arm_with_answers_and_no_rate(self, sdbench, saved_run):
        samples = [SAMPLE | {"arm": name, "example": f"00{n}"} for name, count in (("dense", 4), ("decode", 3)) for n in (*range(count), 0)]
        saved_run("run", "e2e", E2E, [arm("dense", 100.0)], samples, outcome="running", audit=[])
        out = sdbench("report", "run").out.splitlines()
        assert "NOT A COMPLETE RUN (it is going on, or was killed)" in out[1]
        assert out[-1] == "decode: 3 answers, not judged yet"
        assert table_line("\n".join(out), "dense", "3/4") == ["dense", "3/4", "2/4", "2", "100.0", "-", "400", "0", "1.50"]

    def test_arms_of_different_attempts(self, sdbench, saved_run):
        saved_run("run", "e2e", E2E, [arm("dense", 100.0), arm("decode", 125.0), arm("dense", 200.0, attempt=2)])
        out = sdbench("report", "run").out
        assert out.splitlines()[-1].startswith("arms were measured in different attempts, and a speed-up is over the dense arm of its own")
        assert out.splitlines()[-1].endswith(": dense in attempt 2, decode in attempt 1")
        assert table_line(out, "dense", "3/4")[4] == "200.0"

    @pytest.mark.parametrize(("command", "arguments"), [("kernels", ASKED), ("tune", ASKED), ("e2e", E2E)])
    def test_nothing_measured_yet(self, command, arguments, sdbench, saved_run):
        folder = saved_run("run", command, arguments, outcome="interrupted", outcome_reason="Ctrl-C")
        (folder / "rows.jsonl").unlink()
        done = sdbench("report", "run")
        assert done.code == 0 and "NOT A COMPLETE RUN (Ctrl-C)" in done.out and ": nothing is measured yet" in done.out
        for form in ("markdown", "csv", "json"):
            assert sdbench("report", "run", "--format", form).code == 0

    def test_a_torn_last_line(self, sdbench, saved_run):
        """CASES 20: three rows and half a row."""
        folder = saved_run("run", "kernels", ASKED, ROWS[:3])
        with (folder / "rows.jsonl").open("a") as file:
            file.write('{"record": "result", "ker')
        done = sdbench("report", "run")
        assert done.code == 0 and "4.00" in done.out
        assert len(strict(sdbench("report", "run", "--format", "json").out)["rows"]) == 3


class TestFormats:
    def test_csv_has_all_digits_and_texts_unchanged(self, sdbench, saved_run, tmp_path):
        """CASES 19 and 20."""
        text = 'a, "b"\nc\u2028d\u0085e'
        saved_run(
            "run", "kernels", ASKED, [*ROWS[:2], row("spmv", "007", "o", 4.0123456789), row("spmv", "NA", "o", None, message=text), CHAIN]
        )
        out = sdbench("report", "run", "--format", "csv").out
        assert sdbench("report", "run", "--format", "csv", "--output", "rows.csv").out == ""
        assert (tmp_path / "rows.csv").read_bytes().decode() == out
        *_, first, second, chain = read_csv(tmp_path / "rows.csv").to_dict("records")
        assert (first["variant"], first["us.p50"], first["speedup.linear"], first["best"]) == (
            "007",
            "4.0123456789",
            repr(12 / 4.0123456789),
            "True",
        )
        assert (second["variant"], second["us.p50"], second["speedup.linear"], second["message"]) == ("NA", "", "", text)
        assert (chain["kernel"], chain["layers"], chain["us.p50"], chain["speedup.dense"]) == ("chain", "36", "1000.0", "1.5")

    def test_csv_of_e2e_has_a_line_an_arm(self, sdbench, saved_run, tmp_path):
        saved_run("run", "e2e", E2E, [arm("dense", 100.0), arm("decode", None)])
        sdbench("report", "run", "--format", "csv", "--output", "arms.csv")
        records = read_csv(tmp_path / "arms.csv").to_dict("records")
        assert [(one["arm"], one["decode_rate"], one["speedup"], one["answer_match"]) for one in records] == [
            ("dense", "100.0", "", "3"), ("decode", "", "1.25", "3"),
        ]  # fmt: skip

    def test_markdown_shows_messages_as_they_are(self, sdbench, saved_run):
        spoilt = row("spmv", "lane_row", "o", None, outcome="constraint", message="takes no <think>\n# 2:4 | *a*")
        saved_run("run", "kernels", ASKED, [*ROWS, spoilt, CHAIN])
        out = sdbench("report", "run", "--format", "markdown").out
        assert out.startswith("### SpMV at batch 1 (\\* fastest correct variant of its kind)\n\n")
        assert "- lane_row at 2:4 takes no &lt;think&gt; # 2:4 | \\*a\\*\n" in out
        assert "| down | 32x64 | 2:4 | lane_row * | correct | 8.12 | 7.88-8.38 | 4123 | 88 | 2.95 | 1.97 | - | - | 1.0e-07 |\n" in out

    def test_several_runs(self, sdbench, saved_run, tmp_path):
        saved_run("one", "kernels", ASKED, ROWS)
        saved_run("two", "e2e", E2E, [arm("dense", 100.0)])
        out = sdbench("report", "one", "two").out
        assert out == sdbench("report", "one").out + "\n" + sdbench("report", "two").out
        assert sdbench("report", "one", "two", "--output", "both.txt").code == 0
        assert (tmp_path / "both.txt").read_text() == out
        marked = sdbench("report", "one", "two", "--format", "markdown").out
        assert marked.count("\n\n### ") == 1 and marked.startswith("### ")
        for form in ("csv", "json"):
            sdbench("report", "one", "two", "--format", form).refuses(2, f"--format {form} holds one run, and 2 are given")

    def test_a_file_that_is_there_is_not_replaced(self, sdbench, saved_run):
        folder = saved_run("run", "kernels", ASKED, ROWS)
        before = (folder / "rows.jsonl").read_bytes()
        sdbench("report", "run", "--output", "run/rows.jsonl", "--force").refuses(
            2, "run/rows.jsonl is a file of the run itself; name another"
        )
        assert (folder / "rows.jsonl").read_bytes() == before
        assert sdbench("report", "run", "--output", "a.md", "--format", "markdown").code == 0
        sdbench("report", "run", "--output", "a.md").refuses(2, "a.md is there already; --force replaces it")
        assert sdbench("report", "run", "--output", "a.md", "--force").code == 0
        assert (folder.parent / "a.md").read_text() == sdbench("report", "run").out
        sdbench("report", "run", "--output", "none/a.md").refuses(1, "cannot write none/a.md: No such file")


class TestBadInput:
    def test_a_complete_run_without_its_rows(self, sdbench, saved_run):
        (saved_run("run", "kernels", ASKED, ROWS) / "rows.jsonl").unlink()
        sdbench("report", "run").refuses(1, "run/run.json says complete, but run/rows.jsonl is missing")
        saved_run("emptied", "kernels", ASKED)
        sdbench("report", "emptied").refuses(1, "emptied/run.json says complete, but emptied/rows.jsonl holds no row")

    def test_no_run_directory(self, sdbench, saved_run, tmp_path):
        (tmp_path / "empty").mkdir()
        for name in ("empty", "nowhere"):
            sdbench("report", name).refuses(2, f"{name} is no run directory", "run.json cannot be read (No such file or directory)")
        sdbench("report").refuses(2, "RUN...")
        folder = saved_run("run", "kernels", ASKED, ROWS)
        sdbench("report", "run", "--format", "html").refuses(2, "'html' is not one of")
        (folder / "run.json").write_text('{"schema": "sdbench.run/1"')
        sdbench("report", "run").refuses(1, "run/run.json is no sdbench.run/1 record", "Invalid JSON")

    def test_rows_that_cannot_be_read(self, sdbench, saved_run):
        for changes, fault in (
            ({"variant": None}, "variant: Input should be a valid string"),
            ({"us": {"p50": "4.0"}}, "us.p20: Field required"),
            ({"of_shape": [16, "32"]}, "of_shape.1: Input should be a valid integer"),
            ({"record": None}, "a row without its kind ('record')"),
        ):
            name = f"bad{len(fault)}"
            saved_run(name, "kernels", ASKED, [*ROWS[:2], ROWS[2] | changes])
            sdbench("report", name).refuses(1, f"{name}/rows.jsonl, line 3: a row ", fault, "take the line out", "measures it again")
        lacking = {name: value for name, value in ROWS[2].items() if name != "gbps"}
        saved_run("old", "kernels", ASKED, [lacking])
        sdbench("report", "old").refuses(1, "old/rows.jsonl, line 1: a row of kind 'result' with a fault (gbps: Field required)")
        saved_run("e2e", "e2e", E2E, [arm("dense", 100.0)], [SAMPLE | {"arm": "dense"}])
        sdbench("report", "e2e").refuses(1, "e2e/samples.jsonl, line 1: a sample with a fault (example: Field required)")
        saved_run("other", "sweep", {}, [{"record": "model"}])
        sdbench("report", "other").refuses(
            2, "other holds a run of 'sdbench sweep', which has no report; those that do: kernels, tune, e2e"
        )


def test_json_is_a_format(saved_run, sdbench) -> None:
    saved_run("run", "kernels", ASKED, ROWS)
    assert sdbench("report", "run", "--json").out == sdbench("report", "run", "--format", "json", "--json").out
    assert json.loads(sdbench("report", "run", "--json").out)["schema"] == "sdbench.kernels/1"
    sdbench("report", "run", "run", "--json").refuses(2, "--format json holds one run, and 2 are given")
    sdbench("report", "run", "--json", "--format", "csv").refuses(2, "--json is --format json, and --format csv is given; leave one out")


def test_a_report_needs_no_torch(saved_run, heavy_imports) -> None:
    folder = saved_run("run", "kernels", ASKED, ROWS)
    done = heavy_imports(folder.parent, "report", "run")
    assert (done.returncode, done.stderr) == (0, "[]\n") and SUMS in done.stdout
