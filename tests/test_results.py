"""Results on disk: CASES rows 19 and 20, and resuming a run directory."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from sdbench.csv_files import csv_text, read_csv, rows_to_frame
from sdbench.errors import CheckFailed, SdbenchError, UsageError
from sdbench.results import (
    RunDirectory,
    append_jsonl,
    read_jsonl,
    strict_json,
    with_status,
    write_atomic,
)

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A shared machine is slow at times; these tests are about values."""

AWKWARD = [
    "007",
    "None",
    "NA",
    "a,b",
    "a\nb",
    "a\r\nb",
    "a\rb",
    '"quoted"',
    "a\u2028b",
    "a\u0085b",
    "",
    " ",
    "null",
    "1e3",
    "\x00",
    "long " * 40_000,
]


@dataclass(frozen=True)
class Point:
    x: Any


class Model(BaseModel):
    y: float


def refuse_constant(name: str) -> None:
    raise ValueError(name)


def strictly(text: str) -> Any:
    return json.loads(text, parse_constant=refuse_constant)


def run(path: Path, **arguments: Any) -> RunDirectory:
    return RunDirectory.open(path, "e2e", arguments or {"pattern": "2:4"}, {"gpu": None})


def saved(path: Path) -> dict[str, Any]:
    return strictly((path / "run.json").read_text())


# --- strict JSON ---


def test_cases_19_nan_and_inf_become_null() -> None:
    value = {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": Point(math.nan), "d": Model(y=math.nan), "e": np.float32("nan")}
    assert strictly(strict_json(value)) == {"a": None, "b": [None, None, 1.5], "c": {"x": None}, "d": {"y": None}, "e": None}


def test_values_of_other_libraries() -> None:
    value = {
        "path": Path("a/b"),
        "numpy": [np.int64(3), np.float64(0.5), np.bool_(True), np.arange(2)],
        "torch": [torch.tensor(2), torch.tensor([0.5, math.nan], dtype=torch.bfloat16)],
        "tuple": (1, Point(Path("c"))),
        7: None,
    }
    assert strictly(strict_json(value)) == {
        "path": "a/b",
        "numpy": [3, 0.5, True, [0, 1]],
        "torch": [2, [0.5, None]],
        "tuple": [1, {"x": "c"}],
        "7": None,
    }


def test_a_value_without_a_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON form"):
        strict_json({"dtype": torch.bfloat16})


@UNHURRIED
@given(st.text())
def test_cases_20_a_text_is_one_line_for_every_reader(text: str) -> None:
    line = strict_json({"text": text})
    assert len(line.splitlines()) == 1
    assert strictly(line) == {"text": text}


def test_cases_19_status_beside_a_figure() -> None:
    row = {
        "us": math.nan,
        "deep": {"p50": math.inf},
        "list": [{"x": -math.inf}],
        "fine": np.float32(0.5),
        "gbps": math.nan,
        "gbps_status": "timeout",
    }
    assert with_status(row) == {
        "us": None,
        "us_status": "nan",
        "deep": {"p50": None, "p50_status": "inf"},
        "list": [{"x": None, "x_status": "-inf"}],
        "fine": 0.5,
        "gbps": None,
        "gbps_status": "timeout",
    }


# --- JSONL ---


def test_cases_20_torn_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """3 rows and half a row: 3 kept, a warning, and the next append starts a fresh line."""
    file = tmp_path / "rows.jsonl"
    for number in range(3):
        append_jsonl(file, {"n": number})
    with file.open("ab") as stream:
        stream.write(b'{"n": 3, "text": "ha\xc3')
    with caplog.at_level(logging.WARNING, "sdbench"):
        assert read_jsonl(file) == [{"n": 0}, {"n": 1}, {"n": 2}]
        assert "torn last line" in caplog.text
        caplog.clear()
        append_jsonl(file, {"n": 4})
        assert "torn last line" in caplog.text
    assert file.read_bytes().split(b"\n") == [b'{"n": 0}', b'{"n": 1}', b'{"n": 2}', b'{"n": 4}', b""]


def test_a_last_row_that_lacks_only_its_newline_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"n": 0}\n{"n": 1}')
    assert read_jsonl(file) == [{"n": 0}, {"n": 1}]
    append_jsonl(file, {"n": 2})
    assert read_jsonl(file) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert not caplog.records


@pytest.mark.parametrize("tail", [b"x", b"{", b"3", b"\x00\x00\x00"])
def test_a_torn_only_line(tmp_path: Path, tail: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(tail)
    assert read_jsonl(file) == []
    append_jsonl(file, {"n": 0})
    assert read_jsonl(file) == [{"n": 0}]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"n": 0}\n[1]\n{"n": 2}\n')
    with pytest.raises(SdbenchError, match=r"rows.jsonl, line 2: not a JSON object"):
        read_jsonl(file)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SdbenchError, match="No such file"):
        read_jsonl(tmp_path / "rows.jsonl")


@UNHURRIED
@given(st.text())
def test_cases_20_separators_written_raw_are_one_record(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Another tool may write U+2028 or U+0085 unescaped."""
    file = tmp_path_factory.mktemp("raw") / "rows.jsonl"
    file.write_bytes(json.dumps({"text": f"a\u2028{text}\u0085b"}, ensure_ascii=False).encode() + b"\n")
    assert read_jsonl(file) == [{"text": f"a\u2028{text}\u0085b"}]


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write_atomic(file, "one\n")
    write_atomic(file, "two é\n")
    assert file.read_bytes() == "two é\n".encode()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomic(tmp_path / "folder", "three")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run.json"]


# --- CSV ---


def test_cases_19_texts_survive_json_and_csv(tmp_path: Path) -> None:
    rows = [{"id": "007", "answer": text} for text in AWKWARD]
    for row in rows:
        append_jsonl(tmp_path / "rows.jsonl", row)
    back = read_jsonl(tmp_path / "rows.jsonl")
    assert back == rows
    write_atomic(tmp_path / "rows.csv", csv_text(rows_to_frame(back)))
    assert read_csv(tmp_path / "rows.csv").to_dict("records") == rows


@UNHURRIED
@given(st.lists(st.fixed_dictionaries({"id": st.text(), "answer": st.text()}), min_size=1, max_size=5))
def test_cases_19_any_text_survives_csv(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> None:
    file = tmp_path_factory.mktemp("csv") / "rows.csv"
    write_atomic(file, csv_text(rows_to_frame(rows)))
    assert read_csv(file).to_dict("records") == rows


def test_csv_of_missing_and_nested_values(tmp_path: Path) -> None:
    rows = [{"n": 7, "us": {"p50": 1.5}, "ok": True}, {"n": None, "ids": [1, 2]}]
    write_atomic(tmp_path / "rows.csv", csv_text(rows_to_frame(rows)))
    assert read_csv(tmp_path / "rows.csv").to_dict("records") == [
        {"n": "7", "us": '{"p50": 1.5}', "ok": "True", "ids": ""},
        {"n": "", "us": "", "ok": "", "ids": "[1, 2]"},
    ]


# --- the run directory ---


def test_a_complete_run(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with run(path, pattern="2:4", size=np.int64(3), file=Path("x")) as directory:
        directory.add_row({"arm": "dense", "decode_rate": math.nan})
        directory.add_sample({"id": "007", "text": "a\u2028b"})
        assert saved(path)["outcome"] == "running"
    record = saved(path)
    assert record["schema"] == "sdbench.run/1"
    assert record["arguments"] == {"pattern": "2:4", "size": 3, "file": "x"}
    assert set(record["versions"]) == {"python", "torch", "triton", "transformers", "sdbench"}
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (record["outcome"], record["outcome_reason"]) == ("complete", None)
    assert [(a["attempt"], a["outcome"], a["resumed_rows"]) for a in record["audit"]] == [(1, "complete", 0)]
    assert (
        read_jsonl(path / "rows.jsonl")
        == [{"arm": "dense", "decode_rate": None, "attempt": 1, "decode_rate_status": "nan"}]
        == directory.rows
    )
    assert read_jsonl(path / "samples.jsonl") == [{"id": "007", "text": "a\u2028b", "attempt": 1}] == directory.samples


def test_earlier_attempts_stay_in_the_audit_and_rows_are_kept(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), run(tmp_path) as directory:
        directory.add_row({"arm": "dense"})
        raise RuntimeError("out of\nmemory")
    assert saved(tmp_path)["outcome"] == "failed"
    with pytest.raises(SdbenchError), run(tmp_path):
        raise SdbenchError("no such model")
    with pytest.raises(KeyboardInterrupt), run(tmp_path) as directory:
        directory.add_row({"arm": "decode"})
        raise KeyboardInterrupt
    assert saved(tmp_path)["outcome"] == "interrupted"
    with run(tmp_path) as directory:
        assert directory.rows == [{"arm": "dense", "attempt": 1}, {"arm": "decode", "attempt": 3}]
    record = saved(tmp_path)
    assert [(a["outcome"], a["reason"], a["resumed_rows"]) for a in record["audit"]] == [
        ("failed", "RuntimeError: out of memory", 0),
        ("failed", "no such model", 1),
        ("interrupted", "Ctrl-C", 1),
        ("complete", None, 2),
    ]
    assert (record["outcome"], record["outcome_reason"]) == ("complete", None)


KILLED = """
import os, signal, sys
from sdbench.results import RunDirectory
with RunDirectory.open(sys.argv[1], "e2e", {"pattern": "2:4"}, {"gpu": None}) as directory:
    directory.add_row({"arm": "dense"})
    with open(sys.argv[1] + "/rows.jsonl", "ab") as rows:
        rows.write(b'{"arm": "dec')
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_cases_20_a_killed_run_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    with run(tmp_path) as directory:
        assert directory.rows == [{"arm": "dense", "attempt": 1}]
        directory.add_row({"arm": "decode"})
    assert "torn last line" in caplog.text
    assert read_jsonl(tmp_path / "rows.jsonl") == [{"arm": "dense", "attempt": 1}, {"arm": "decode", "attempt": 2}]
    assert [(a["outcome"], a["reason"]) for a in saved(tmp_path)["audit"]] == [("interrupted", "killed"), ("complete", None)]


def test_other_arguments_are_refused_by_name(tmp_path: Path) -> None:
    with run(tmp_path, pattern="2:4", seed=0, gone=None) as directory:
        directory.add_row({"arm": "dense"})
    with pytest.raises(
        UsageError, match=r'other arguments: pattern \("2:4" there, "4:8" now\), seed \(0 there, null now\); choose another --output'
    ):
        run(tmp_path, pattern="4:8")
    with pytest.raises(UsageError, match="'sdbench e2e'; choose another --output for 'sdbench kernels'"):
        RunDirectory.open(tmp_path, "kernels", {"pattern": "2:4", "seed": 0}, {})
    assert len(saved(tmp_path)["audit"]) == 1


def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for path in (tmp_path / "a" / "b", there):
        with pytest.raises(SdbenchError), run(path):
            raise SdbenchError("no such model")
    assert [*tmp_path.iterdir()] == [there] and not [*there.iterdir()]
    (tmp_path / "a").mkdir()
    with pytest.raises(SdbenchError), run(tmp_path / "a" / "b"):
        raise SdbenchError("no such model")
    assert [*(tmp_path / "a").iterdir()] == []


@pytest.mark.parametrize(
    "error", [CheckFailed("the step differs"), KeyboardInterrupt(), RuntimeError("a bug"), SdbenchError("after a file")], ids=repr
)
def test_what_did_begin_keeps_its_audit(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), run(tmp_path / "run") as directory:
        if "file" in str(error):
            (directory.path / "layer-0").write_text("")
        raise error
    assert saved(tmp_path / "run")["audit"][0]["outcome"] in ("failed", "interrupted")
    with pytest.raises(SdbenchError), run(tmp_path / "run"):
        raise SdbenchError("no such model")
    assert len(saved(tmp_path / "run")["audit"]) == 2


def test_a_corrected_command_may_take_a_directory_where_nothing_was_measured(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), run(tmp_path, examples=999):
        raise RuntimeError("out of memory")
    with run(tmp_path, examples=9):
        pass
    record = saved(tmp_path)
    assert record["arguments"] == {"examples": 9}
    assert [a["outcome"] for a in record["audit"]] == ["failed", "complete"]


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with run(tmp_path), pytest.raises(SdbenchError, match="in use by another sdbench process"):
        run(tmp_path)
    with run(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "{}", '{"schema": "sdbench.run/9"}', "[1]"])
def test_a_foreign_run_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(SdbenchError, match=r"run.json is no sdbench.run/1 record .*; choose another --output"):
        run(tmp_path)
    assert (tmp_path / "run.json").read_text() == content


def test_rows_without_run_json_are_not_adopted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(SdbenchError, match=r"rows but no run.json"):
        run(tmp_path)


def test_an_unwritable_output_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/sdbench")):
        with pytest.raises(SdbenchError, match=r"cannot write the run directory .*; choose another --output"):
            run(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SdbenchError, match="Permission denied; choose another --output"):
        run(tmp_path)
