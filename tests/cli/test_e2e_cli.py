"""``sdbench e2e`` as a user calls it: results, tables, bad input, Ctrl-C."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from rich.text import Text

from sdbench.results import RunRecord, read_jsonl
from sdbench.suites.e2e.report import COLUMNS, table_rows
from sdbench.suites.e2e.tables import behaviour_table
from sdbench.suites.tasks.arithmetic import MANIFEST_FILE, TRAIN_FILE, VALIDATION_FILE

from .short import SHORT

DATA = {"--train": TRAIN_FILE, "--validation": VALIDATION_FILE, "--split-manifest": MANIFEST_FILE}


def strict(text: str) -> Any:
    """Parses JSON and refuses NaN and Infinity, which Python would take."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def split(tmp_path: Path) -> Callable[..., list[str | Path]]:
    """Copies the bundled split, lets a test spoil it, and returns the options that name it."""

    def copy(change: Callable[[dict[str, Path]], None]) -> list[str | Path]:
        files = {option: tmp_path / path.name for option, path in DATA.items()}
        for option, path in DATA.items():
            shutil.copy(path, files[option])
        change(files)
        return [part for option, path in files.items() for part in (option, path)]

    return copy


def pin(files: dict[str, Path]) -> None:
    """Makes the manifest's hashes those of the files as they are, without looking at what they hold."""
    manifest = json.loads(files["--split-manifest"].read_text())
    for part, option in (("train", "--train"), ("validation", "--validation")):
        digest = subprocess.run(["sha256sum", files[option]], capture_output=True, text=True, check=True).stdout.split()[0]
        manifest["parts"][part]["sha256"] = digest
    files["--split-manifest"].write_text(json.dumps(manifest))


class TestResults:
    def test_json_is_one_strict_document_and_nothing_else(self, sdbench, checkpoint, tmp_path):
        done = sdbench("e2e", "--model", checkpoint(), *SHORT, "--json")
        assert done.code == 0
        whole = strict(done.out)
        assert whole["schema"] == "sdbench.e2e/1" and whole["model"] == "tiny"
        assert whole["environment"]["torch"] == torch.__version__
        assert [arm["arm"] for arm in whole["arms"]] == ["dense", "teacher-forced", "decode"]
        promised = (
            "arm pattern method examples answer_match eos truncated equal_tokens decode_rate speedup speedup_reason "
            "kernel_calls expected_kernel_calls ceiling peak_bytes"
        )
        for arm in whole["arms"]:
            assert set(promised.split()) <= arm.keys()
            assert isinstance(arm["decode_rate"], float) and arm["equal_tokens"] == 5 and arm["examples"] == 2
            assert arm["kernel_calls"] == arm["expected_kernel_calls"]
            for figure in ("speedup", "ceiling", "peak_bytes"):
                assert (arm[figure] is None) == isinstance(arm[f"{figure}_reason"], str)
        path = tmp_path / whole["run_dir"]
        assert [row["arm"] for row in read_jsonl(path / "rows.jsonl") if row["record"] == "arm"] == ["dense", "teacher-forced", "decode"]
        assert len(read_jsonl(path / "samples.jsonl")) == 6
        assert (path / "report.md").read_text().count("\n| ") == 15  # three tables of three arms

    def test_first_line_says_which_model_and_why_and_where_it_goes(self, sdbench, checkpoint):
        folder = checkpoint()
        done = sdbench("e2e", "--model", folder, *SHORT, "--output", "here")
        first, second, warning, fourth, *_ = done.err.splitlines()
        assert first == f"model: tiny (--model {folder})"
        assert warning.startswith("warning: calibrated on 10 rows a layer, too few to tell columns apart")
        assert (second, fourth) == (f"loading {folder}", "run directory: here")
        default = sdbench("e2e", "--targets", "nothing").err.splitlines()[0]
        assert default == "model: demo (the default without a CUDA device: the bundled demo model)"

    @pytest.mark.parametrize("width", [80, None])
    def test_no_figure_is_cut(self, width, sdbench, checkpoint, tmp_path, monkeypatch):
        """CASES 23: on a terminal of 80 columns, and piped."""
        out = io.StringIO()
        if width:
            monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
            monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "stdout", out)
        assert sdbench("e2e", "--model", checkpoint(), *SHORT, "--calib", "decode+sink", "--output", "run").code == 0
        whole = Text.from_ansi(out.getvalue()).plain.splitlines()
        lines = whole[: whole.index("memory of the weights")]
        arms = [row for row in read_jsonl(tmp_path / "run/rows.jsonl") if row["record"] == "arm"]
        assert [arm["arm"] for arm in arms] == ["dense", "teacher-forced", "decode+sink"]
        for arm, cells in zip(arms, table_rows(arms), strict=True):
            of_arm = [line.split() for line in lines if line.split()[:1] == [arm["arm"]]]
            assert [cell for line in of_arm for cell in line[1:]] == cells[1:]
        last = max(number for number, line in enumerate(lines) if line.startswith(" decode+sink"))
        table = lines[: last + 1]
        assert all(word in " ".join(table) for column in COLUMNS for word in column.name.split())
        assert width is None or max(map(len, table)) <= width
        assert whole[-1] == "run directory: run"
        behaviour = behaviour_table(arms)
        assert behaviour
        for cells in behaviour.cells:
            of_arm = [line.split() for line in whole[whole.index("how replies behave") :] if line.split()[:1] == [cells[0]]]
            assert [cell for line in of_arm for cell in line[1:]] == list(cells[1:])

    def test_slower_than_asked_for(self, sdbench, checkpoint):
        call = ("e2e", "--model", checkpoint(), *SHORT, "--json", "--min-speedup")
        done = sdbench(*call, 1000)
        assert done.code == 4
        gain = {arm["arm"]: arm["speedup"] for arm in strict(done.out)["arms"]}  # the result is there all the same
        line = f"slower than --min-speedup 1000: teacher-forced {gain['teacher-forced']:.2f}, decode {gain['decode']:.2f}"
        assert done.err.splitlines()[-1] == f"sdbench: error: {line}"
        assert sdbench(*call, 0.0001).code == 0

    def test_the_same_directory_resumes_and_other_arguments_are_refused(self, sdbench, checkpoint, tmp_path):
        call = ("e2e", "--model", checkpoint(), *SHORT, "--output", "run")
        assert "kept from an earlier attempt" not in sdbench(*call).err
        again = sdbench(*call)
        kept = len((tmp_path / "run/samples.jsonl").read_text().splitlines())
        assert again.code == 0 and f"replies kept from an earlier attempt: {kept}, rates are measured again" in again.err
        record = RunRecord.model_validate_json((tmp_path / "run/run.json").read_bytes())
        assert [attempt.outcome for attempt in record.audit] == ["complete", "complete"]
        before = (tmp_path / "run/run.json").read_bytes()
        sdbench(*call, "--pattern", "1:4").refuses(2, "run holds a run with other arguments: pattern", '"2:4" there, "1:4" now')
        sdbench("kernels", "--shapes", "8x32", "--output", "run").refuses(2, "run holds a run of 'sdbench e2e'")
        assert (tmp_path / "run/run.json").read_bytes() == before

    def test_wrong_kernel_calls_fail_the_run(self, sdbench, checkpoint, monkeypatch, tmp_path):
        from sdbench.engine.fused.products import Product

        multiply = Product.__call__

        def forgetful(self: Product, x: torch.Tensor) -> torch.Tensor:
            before = self.calls
            sums = multiply(self, x)
            self.calls = before
            return sums

        monkeypatch.setattr(Product, "__call__", forgetful)
        sdbench("e2e", "--model", checkpoint(), *SHORT, "--output", "run").refuses(3, "teacher-forced: 0 kernel calls, 112 expected")
        record = RunRecord.model_validate_json((tmp_path / "run/run.json").read_bytes())
        assert record.outcome == "failed" and "0 kernel calls" in (record.outcome_reason or "")


class TestBadModel:
    def test_neither_path_nor_hub_id(self, sdbench):
        sdbench("e2e", "--model", "./nowhere").refuses(2, "'./nowhere'", "no such folder or file")

    def test_unknown_on_the_hub(self, sdbench, monkeypatch, tmp_path):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        sdbench("e2e", "--model", "nobody/nothing").refuses(1, "'nobody/nothing'", "the hub cannot be reached")

    def test_no_weights(self, sdbench, checkpoint):
        folder = checkpoint()
        (folder / "model.safetensors").unlink()
        sdbench("e2e", "--model", folder).refuses(1, "model.safetensors is missing")

    def test_weights_cut_short(self, sdbench, checkpoint):
        folder = checkpoint()
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:5000])
        sdbench("e2e", "--model", folder).refuses(1, "model.safetensors is damaged or cut short")

    def test_a_gguf_file_cut_short(self, sdbench, tmp_path):
        (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\x01")
        sdbench("e2e", "--model", "model.gguf").refuses(1, "model.gguf", "cut short")

    def test_a_revision_of_a_folder(self, sdbench, checkpoint):
        sdbench("e2e", "--model", checkpoint(), "--revision", "main").refuses(2, "--revision main: only a hub id has revisions")

    def test_a_width_that_m_does_not_divide(self, sdbench, checkpoint):
        folder = checkpoint(hidden_size=72)
        done = sdbench("e2e", "--model", folder, *SHORT, "--pattern", "16:32")
        done.refuses(2, "layer model.layers.0.self_attn.q_proj: in_features 72 is not a multiple of M=32")
        assert sdbench("e2e", "--model", folder, *SHORT, "--pattern", "4:8").code == 0

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_weight_that_is_no_number(self, value, sdbench, checkpoint):
        """CASES 12: layer and index are named, though the dense arm would trip over it first."""

        def spoil(model: Any) -> None:
            model.model.layers[1].mlp.up_proj.weight[3, 5] = value

        done = sdbench("e2e", "--model", checkpoint(spoil=spoil), *SHORT)
        done.refuses(1, f"layer model.layers.1.mlp.up_proj: weight[3, 5] is {value}")

    def test_more_tokens_than_positions(self, sdbench, checkpoint):
        done = sdbench("e2e", "--model", checkpoint(), *SHORT, "--equal-tokens", 512)
        done.refuses(2, "exceed the 512 positions")

    def test_a_run_that_never_began_names_no_directory(self, sdbench, checkpoint, tmp_path):
        """There is none: a line about one would send the user to look for it."""
        done = sdbench("e2e", "--model", checkpoint(), *SHORT, "--equal-tokens", 512, "--output", "run")
        done.refuses(2, "exceed the 512 positions")
        assert "run directory" not in done.err and not (tmp_path / "run").exists()


class TestBadData:
    def test_wrong_revision(self, sdbench):
        sdbench("e2e", "--dataset-revision", "v9").refuses(3, "not 'v9'")

    def test_a_changed_part(self, sdbench, split):
        def change(files: dict[str, Path]) -> None:
            with files["--validation"].open("a") as file:
                file.write('{"question": "1 + 1?", "answer": "#### 2"}\n')

        sdbench("e2e", *split(change)).refuses(3, "validation.jsonl is not the validation part")

    def test_shared_questions(self, sdbench, split):
        """The hashes are right: it is the questions that are looked at."""

        def change(files: dict[str, Path]) -> None:
            first = json.loads(files["--train"].read_text().splitlines()[0])
            with files["--validation"].open("a") as file:
                file.write(json.dumps({"question": f"  {first['question'].upper()}", "answer": "#### 2", "id": "twin"}) + "\n")
            pin(files)

        sdbench("e2e", *split(change)).refuses(3, "share 1 question,", "'twin'")

    def test_no_example(self, sdbench, split):
        def change(files: dict[str, Path]) -> None:
            files["--validation"].write_text("\n")
            pin(files)

        sdbench("e2e", *split(change)).refuses(1, "validation.jsonl holds no examples")

    def test_an_official_test_split(self, sdbench, split):
        def change(files: dict[str, Path]) -> None:
            files["--validation"] = files["--validation"].rename(files["--validation"].with_name("test.jsonl"))

        sdbench("e2e", *split(change)).refuses(2, "test.jsonl", "says test split")

    def test_a_part_without_its_manifest(self, sdbench, tmp_path):
        sdbench("e2e", "--train", TRAIN_FILE, "--output", "run").refuses(2, "go together", "sdbench split")
        assert not (tmp_path / "run").exists()

    def test_no_such_manifest(self, sdbench, tmp_path):
        files = ("--train", TRAIN_FILE, "--validation", VALIDATION_FILE, "--split-manifest", "none.json")
        sdbench("e2e", *files, "--output", "run").refuses(2, "cannot read none.json: No such file")
        assert not (tmp_path / "run").exists()

    def test_more_examples_than_there_are(self, sdbench):
        sdbench("e2e", "--validation-examples", 201).refuses(2, "--validation-examples 201", "validation.jsonl has 200 to draw from")


class TestBadOptions:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("--max-tokens 0", "--max-tokens is 0; it must be at least 1"),
            ("--equal-tokens 1", "--equal-tokens is 1; it must be at least 2"),
            ("--max-tokens many", "Invalid value for '--max-tokens'"),
            ("--pattern 5:4", "pattern 5:4"),
            ("--pattern 4:4", "pattern 4:4"),
            ("--pattern 2:3", "the group size must be one of 4, 8, 16, 32"),
            ("--pattern 2/4", "write it as N:M"),
            ("--calib decod", "did you mean decode"),
            ("--method wnda", "did you mean wanda?"),
            ("--prefill sparse", "'sparse' is not one of 'pruned', 'dense'"),
            ("--dtype fp8", "dtype 'fp8': use auto, bf16, fp16, fp32"),
            ("--device gpu", "device 'gpu': use auto, cpu, cuda or cuda:N"),
            ("--calb decode", "--calib"),
            ("decode", "unexpected extra argument (decode)"),
        ],
    )
    def test_usage(self, arguments, message, sdbench, tmp_path):
        sdbench("e2e", *arguments.split(), "--output", "run").refuses(2, message)
        assert not (tmp_path / "run").exists()

    def test_no_gpu(self, sdbench, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        sdbench("e2e", "--device", "cuda").refuses(1, "finds no CUDA GPU")

    def test_a_target_that_matches_nothing(self, sdbench, checkpoint):
        """CASES 22."""
        model = checkpoint()
        sdbench("e2e", "--model", model, *SHORT, "--targets", "dwn_proj").refuses(2, "target pattern 'dwn_proj'", "did you mean down_proj")
        sdbench("e2e", "--model", model, *SHORT, "--ignore", "mlp").refuses(2, "ignore pattern 'mlp' matches no linear layer")

    def test_nothing_left_to_prune(self, sdbench, checkpoint):
        sdbench("e2e", "--model", checkpoint(), *SHORT, "--ignore", "*").refuses(5, "no linear layer to prune")

    def test_an_output_that_cannot_be_written(self, sdbench, tmp_path):
        (tmp_path / "file").touch()
        sdbench("e2e", "--output", "file/run").refuses(1, "cannot write the run directory file/run", "choose another --output")


def start(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sdbench", *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell ignores Ctrl-C and would pass that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_ctrl_c_keeps_what_is_finished(checkpoint, tmp_path):
    """A real SIGINT in a process of its own, once three answers are on disk."""
    samples = tmp_path / "run/samples.jsonl"
    call = ("e2e", "--model", checkpoint(), "--calibration-examples", "2", "--validation-examples", "200", "--max-tokens", "40")
    process = start(*call, "--output", "run", cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (samples.exists() and samples.read_bytes().count(b"\n") >= 3):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "sdbench: error: interrupted; what is finished is in run, and the same command with --output run goes on"
    record = RunRecord.model_validate_json((tmp_path / "run/run.json").read_bytes())
    assert (record.outcome, [attempt.outcome for attempt in record.audit]) == ("interrupted", ["interrupted"])
    kept = read_jsonl(samples)
    assert 3 <= len(kept) < 200 and all(sample["arm"] == "dense" for sample in kept)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "demo", "--revision", "main"], 2, "only a hub id has revisions"),
        (["--dataset-revision", "v9"], 3, "not 'v9'"),
    ],
)
def test_bad_input_in_a_process_of_its_own(arguments, code, message, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sdbench", "e2e", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ
    )
    assert (done.returncode, done.stdout) == (code, "")
    *progress, last = done.stderr.splitlines()
    assert last.startswith("sdbench: error: ") and message in last
    assert len(progress) <= 2 and not any("Traceback" in line or "Warning" in line for line in progress)


def test_a_file_that_differs_leaves_no_run_directory(sdbench, tmp_path):
    done = sdbench("e2e", "--dataset-revision", "none", "--output", "never")
    assert done.code == 3 and "pins dataset revision 'arithmetic-1', not 'none'" in done.err
    assert not (tmp_path / "never").exists()


class TestAlternatives:
    def test_int8_and_another_model_stand_in_the_table(self, sdbench, checkpoint):
        call = ("e2e", "--model", checkpoint(), *SHORT, "--output", "run", "--alternatives", "--compare-model")
        other = checkpoint("smaller", num_hidden_layers=1)
        done = sdbench(*call, other, "--min-speedup", 0.0001)
        assert done.code == 0
        named = [
            line.split()[0] for line in done.out.splitlines() if line.startswith(" ") and line.split()[0] in ("dense", "int8", "smaller")
        ]
        assert named == ["dense", "int8", "smaller"] * 3  # arms, their memory, and how their replies behave
        assert "int8: nothing pruned; every linear but the output embedding rounded to 8 bits" in done.out

    def test_on_a_cpu_int8_is_judged_where_it_is_asked_for(self, sdbench, checkpoint):
        done = sdbench("e2e", "--model", checkpoint(), *SHORT, "--json")
        assert "int8" not in [arm["arm"] for arm in strict(done.out)["arms"]]

    def test_bad_names(self, sdbench, checkpoint):
        call = ("e2e", "--model", checkpoint(), *SHORT)
        sdbench(*call, "--compare-model", "./nowhere").refuses(2, "'./nowhere'", "no such folder or file")
        sdbench(*call, "--compare-revision", "main").refuses(2, "--compare-revision is of --compare-model")
        sdbench(*call, "--compare-model", "").refuses(2, "model ''")
