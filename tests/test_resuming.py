"""What a resumed run directory makes of what earlier attempts left."""

import json
from pathlib import Path
from typing import Any

import pytest

from sdbench.errors import SdbenchError
from sdbench.results import RunDirectory


def run(path: Path) -> RunDirectory:
    return RunDirectory.open(path, "e2e", {"pattern": "2:4"}, {"gpu": None})


def saved(path: Path) -> Any:
    return json.loads((path / "run.json").read_text())


def test_another_machine_is_recorded_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with run(tmp_path):
        pass
    with RunDirectory.open(tmp_path, "e2e", {"pattern": "2:4"}, {"gpu": "H200"}):
        pass
    assert not caplog.records  # nothing is kept
    with run(tmp_path) as directory:
        directory.add_row({"arm": "dense"})
    assert not caplog.records
    with RunDirectory.open(tmp_path, "e2e", {"pattern": "2:4"}, {"gpu": "H200"}):
        pass
    assert "kept rows are not of this machine and code (gpu None, H200, the last one now)" in caplog.text
    record = saved(tmp_path)
    assert record["environment"] == {"gpu": None}
    assert [a["changed"] for a in record["audit"]] == [{}, {"environment": {"gpu": "H200"}}] * 2


def test_a_wrong_line_of_an_earlier_attempt_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    with run(tmp_path) as directory:
        directory.add_rows([{"arm": "dense"}, {"arm": 7}])
    before = (tmp_path / "run.json").read_bytes()
    faults = {"rows.jsonl": lambda row: None if isinstance(row["arm"], str) else "an arm without a name"}
    with pytest.raises(SdbenchError, match=r"rows.jsonl, line 2: an arm without a name; take the line out, and the run's command"):
        RunDirectory.open(tmp_path, "e2e", {"pattern": "2:4"}, {"gpu": None}, faults)
    assert (tmp_path / "run.json").read_bytes() == before
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text(lines[0] + "\n")
    with RunDirectory.open(tmp_path, "e2e", {"pattern": "2:4"}, {"gpu": None}, faults) as directory:
        assert len(directory.rows) == 1


def test_an_attempt_that_measured_nothing_takes_nothing_from_a_complete_run(tmp_path: Path) -> None:
    with run(tmp_path) as directory:
        directory.add_row({"arm": "dense"})
    with pytest.raises(SdbenchError), run(tmp_path):
        raise SdbenchError("no such model")
    record = saved(tmp_path)
    assert (record["outcome"], record["outcome_reason"]) == ("complete", None)
    assert [(a["outcome"], a["reason"]) for a in record["audit"]] == [("complete", None), ("failed", "no such model")]
    with pytest.raises(SdbenchError), run(tmp_path) as directory:
        directory.add_row({"arm": "dense"})
        raise SdbenchError("out of memory")
    assert saved(tmp_path)["outcome"] == "failed"


def test_a_complete_run_records_how_many_rows_it_has(tmp_path: Path) -> None:
    with pytest.raises(SdbenchError), run(tmp_path) as directory:
        directory.add_row({"arm": "dense"})
        raise SdbenchError("out of memory")
    assert saved(tmp_path)["rows"] is None
    with run(tmp_path) as directory:
        directory.add_rows([{"arm": "decode"}, {"arm": "self"}])
    assert saved(tmp_path)["rows"] == 3
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:2]))
    # An attempt that measures nothing and fails leaves the loss to be seen; one that ends well has measured again what it wants.
    with pytest.raises(SdbenchError), run(tmp_path):
        raise SdbenchError("no such model")
    assert (saved(tmp_path)["outcome"], saved(tmp_path)["rows"]) == ("complete", 3)
    with run(tmp_path) as directory:
        assert len(directory.rows) == 2
    assert saved(tmp_path)["rows"] == 2


def test_a_complete_run_records_how_many_samples_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with run(tmp_path) as directory:
        directory.add_row({"arm": "dense"})
        for name in "abc":
            directory.add_sample({"arm": "dense", "example": name})
    assert saved(tmp_path)["samples"] == 3
    with run(tmp_path):
        pass
    assert not caplog.records
    lines = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(lines[:2]))
    with run(tmp_path) as directory:
        assert caplog.messages == [f"{tmp_path}/samples.jsonl holds 2 of 3 samples: what is gone is measured again"]
        directory.add_sample({"arm": "dense", "example": "c"})
    assert saved(tmp_path)["samples"] == 3
    caplog.clear()
    for name in ("rows.jsonl", "samples.jsonl"):
        (tmp_path / name).unlink()
    with run(tmp_path) as directory:
        assert not directory.samples
    assert [message.partition(" ")[2].partition(":")[0] for message in caplog.messages] == ["holds 0 of 1 rows", "holds 0 of 3 samples"]
