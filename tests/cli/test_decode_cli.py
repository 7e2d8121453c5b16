"""``sdbench decode`` as a user calls it, on a tiny model."""

import pytest
import torch

from sdbench.csv_files import read_csv
from sdbench.errors import SdbenchError
from sdbench.results import read_jsonl, strict_json

SHORT = ("--tokens", 5, "--repeats", 1, "--warmup-tokens", 0, "--context", 4, "--no-baselines", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", 0), "--context is 0; it must be at least 1"),
        (("--tokens", 1), "--tokens is 1; it must be at least 2"),
        (("--pattern", "5:4"), "N:M keeps N of M"),
        (("--profile",), "--device cpu: --profile counts a GPU's kernels; leave it out"),
    ],
)
def test_usage(arguments, message, sdbench, tmp_path):
    sdbench("decode", "--model", "demo", *SHORT, *arguments, "--output", "run").refuses(2, message)
    assert not list(tmp_path.iterdir())


def test_a_profile_without_a_gpu(sdbench, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sdbench("decode", "--model", "demo", "--profile", "--output", "run").refuses(1, "no CUDA device: --profile counts a GPU's kernels")
    assert not list(tmp_path.iterdir())


def test_csv_has_a_column_a_figure(sdbench, checkpoint, tmp_path):
    """What a row nests, a spread, memory and a profile by kind of kernel, has columns of its own."""
    model = checkpoint()
    assert sdbench("decode", "--model", f"random:{model}", *SHORT, "--output", "run").code == 0
    rows = read_jsonl(tmp_path / "run/rows.jsonl")
    rows[0] |= {"profile": {"pruned products": {"us": 1.5, "launches": 4.0}}, "decode_rate": None, "ms_per_token": None}
    (tmp_path / "run/rows.jsonl").write_text("".join(strict_json(row) + "\n" for row in rows))
    assert sdbench("report", "run", "--format", "csv", "--output", "rows.csv").code == 0
    dense, pruned = read_csv(tmp_path / "rows.csv").to_dict("records")
    assert (dense["arm"], dense["profile.pruned products.us"], dense["profile.pruned products.launches"]) == ("dense", "1.5", "4.0")
    assert [dense[f"decode_rate.{share}"] for share in ("p20", "p50", "p80")] == ["", "", ""]
    assert [pruned[f"decode_rate.{share}"] for share in ("p20", "p50", "p80")] == [
        repr(rows[1]["decode_rate"][share]) for share in ("p20", "p50", "p80")
    ]
    assert pruned["memory.packed"] == str(rows[1]["memory"]["packed"]) and pruned["profile.pruned products.us"] == ""
    assert not any("{" in cell for record in (dense, pruned) for cell in record.values())


def test_a_run_that_measures_nothing_says_so(sdbench, checkpoint, monkeypatch):
    """Its rows are out all the same."""

    def refuse(*arguments: object) -> None:
        raise SdbenchError("no fused step: no such attention")

    monkeypatch.setattr("sdbench.suites.decode.suite.named", refuse)
    done = sdbench("decode", "--model", f"random:{checkpoint()}", *SHORT)
    assert done.code == 1 and "constraint" in done.out
    assert "no way to decode could be measured; fused step: no fused step: no such attention" in done.err
