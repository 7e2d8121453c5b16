"""``sdbench prune`` by several processes: their statistics add up to those of one, and nothing that doesn't fit is added."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sdbench.calibrate.collect import InputSums
from sdbench.calibrate.store import merged, read_shards
from sdbench.checkpoint_files import CheckpointFiles
from sdbench.checkpoints import write
from sdbench.checkpoints.verify import verify
from sdbench.errors import UsageError
from sdbench.progress import Progress
from sdbench.suites import dense, prune
from sdbench.suites.e2e.calibration import Shard, sums_in_turn

SMALL = ("--calibration-examples", 5, "--max-tokens", 8, "--device", "cpu")
CPU = torch.device("cpu")


@pytest.fixture
def call(sdbench: Any) -> Callable[..., dict[str, Any]]:
    def run(*arguments: Any) -> dict[str, Any]:
        done = sdbench("prune", "--json", *SMALL, *arguments)
        assert done.code == 0, done.err
        return json.loads(done.out)

    return run


@pytest.fixture
def collected(call: Any, checkpoint: Any) -> Callable[..., Path]:
    """Collects some shards of a tiny model into ``shards``."""

    def run(count: int, *arguments: Any, only: tuple[int, ...] = ()) -> Path:
        model = Path("tiny") if Path("tiny").exists() else checkpoint()
        for number in only or range(1, count + 1):
            call("--model", model, "--shard", f"{number}/{count}", "--statistics", "shards", *arguments)
        return Path("shards")

    return run


def sums(turns: Any) -> dict[str, InputSums]:
    return {name: layer for turn in turns for name, layer in turn.items()}


def common(document: dict[str, Any]) -> dict[str, Any]:
    """The provenance that several processes and one have in common."""
    found = document["provenance"]
    report = {
        name: value for name, value in found["calibration"]["report"].items() if name not in ("replay_difference", "shards", "generation")
    }
    fields = ("method", "pattern", "seed", "source", "layers")
    return {name: found[name] for name in fields} | {"calibration": found["calibration"] | {"report": report}}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--method", "wanda", "--calib", "decode+sink"),
        ("--method", "sparsegpt", "--token-weighting", "late"),
        ("--method", "sparsegpt", "--calib", "mixed", "--mix", "decode=2", "--mix", "prefill=1", "--temperature", 1.5),
    ],
    ids=["wanda", "sparsegpt", "mixed"],
)
def test_shards_add_up_to_one_process(arguments, call, collected, monkeypatch):
    """Rows exactly, sums up to the order in which they are added; and the checkpoint says the same."""
    taken: dict[str, InputSums] = {}

    def spy(*given: Any) -> Any:
        for turn in sums_in_turn(*given):
            taken.update({name: InputSums(name, layer.rows, layer.weight, layer.total.clone()) for name, layer in turn.items()})
            yield turn

    folder = collected(2, *arguments)
    monkeypatch.setattr("sdbench.suites.e2e.calibration.sums_in_turn", spy)
    whole = call("--model", "tiny", "--output", "whole", *arguments)
    shards = read_shards(folder)
    assert [shard.record.numbers for shard in shards] == [[0, 2, 4], [1, 3]]
    found = sums(merged(shards, taken, CPU))
    assert len(found) == 14
    for name, layer in taken.items():
        assert found[name].rows == layer.rows and found[name].weight == pytest.approx(layer.weight, rel=1e-6)
        assert float((found[name].total - layer.total).norm() / layer.total.norm()) < 1e-6, name
    merge = call("--model", "tiny", "--output", "merged", "--merge", folder, *arguments)
    assert common(merge) == common(whole)
    assert merge["provenance"]["calibration"]["report"]["shards"] == 2
    assert verify(CheckpointFiles.open(Path("merged")), None, Progress()).failures == []
    one, other = (load_file(Path(name, "model.safetensors")) for name in ("whole", "merged"))
    same = sum(int(torch.equal(one[name], other[name])) for name in one if name.endswith(".bitmask"))
    assert same >= 13
    assert sorted(path.name for path in Path().iterdir()) == ["merged", "shards", "tiny", "whole"]


def test_devices_collect_in_processes_of_their_own(call, sdbench, checkpoint, monkeypatch):
    model = checkpoint()
    whole = call("--model", model, "--output", "whole", "--method", "sparsegpt")
    base = ("--model", model, "--output", "out", "--method", "sparsegpt", "--devices", "cpu,cpu")
    with monkeypatch.context() as patch:
        patch.setattr(prune, "run", lambda *arguments: stop())
        sdbench("prune", *SMALL, *base).refuses(130, "interrupted; the same command goes on with what is in out.work-")
    # The shards are there: no process is started again.
    monkeypatch.setattr("sdbench.suites.shards.ProcessPoolExecutor", None)
    found = call(*base)
    assert common(found) == common(whole)
    assert [shard["shard"] for shard in found["shards"]] == [1, 2]
    assert (
        sum(shard["speed"]["generated_tokens"] for shard in found["shards"])
        == found["provenance"]["calibration"]["report"]["replies"]["tokens"]
    )
    assert sorted(path.name for path in Path().iterdir()) == ["out", "tiny", "whole"]


def test_a_run_directory_keeps_what_the_run_did_not_make(call, checkpoint):
    """Shards collected by hand lie where a run of several devices has its own."""
    model, shards = checkpoint(), Path("run", "statistics")
    for number in (1, 2):
        call("--model", model, "--shard", f"{number}/2", "--statistics", shards)
    (shards / "notes.txt").write_text("mine")
    for name in ("layer-norms.safetensors", "layer-00099.safetensors", "layer-a.tmp"):
        Path("run", name).write_text("mine")
    kept = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    call("--model", model, "--merge", shards, "--run-directory", "run", "--output", "out")
    assert {path: path.read_bytes() for path in kept if path.exists()} == kept
    made = {path.name for path in Path("run").iterdir()} - {path.relative_to("run").parts[0] for path in kept}
    assert made == {"run.json", "rows.jsonl"}


def test_devices_leave_the_shards_that_were_there(call, checkpoint):
    model, shards = checkpoint(), Path("run", "statistics")
    call("--model", model, "--shard", "1/2", "--statistics", shards)
    call("--model", model, "--devices", "cpu,cpu", "--run-directory", "run", "--output", "out")
    assert [path.name for path in shards.iterdir()] == ["shard-1-of-2"]
    assert Path(shards, "shard-1-of-2", "statistics.json").is_file()
    call("--model", model, "--devices", "cpu,cpu", "--run-directory", "other", "--output", "another")
    assert sorted(path.name for path in Path("other").iterdir()) == ["rows.jsonl", "run.json"]


def test_hessians_serve_other_methods_and_patterns(call, collected):
    folder = collected(2, "--method", "sparsegpt")
    for method, pattern in (("wanda", "2:4"), ("sparsegpt-median", "16:32")):
        found = call("--model", "tiny", "--output", method, "--merge", folder, "--method", method, "--pattern", pattern)
        assert found["provenance"]["method"] == method and found["calibration"]["generated_tokens"] == 0


def test_a_token_budget_is_shared_out(call, collected):
    folder = collected(2, "--calibration-tokens", 11)
    rows = [{layer.rows for layer in shard.record.layers.values()} for shard in read_shards(folder)]
    assert rows == [{6}, {5}]


def test_an_interrupted_merge_goes_on(call, collected, sdbench, monkeypatch):
    folder = collected(2, "--method", "sparsegpt")
    base = ("--model", "tiny", "--merge", folder, "--method", "sparsegpt", "--output")
    whole = call(*base, "whole")
    save = prune._save
    with monkeypatch.context() as patch:
        patch.setattr(prune, "_save", lambda file, tensors: stop() if "00009" in file.name else save(file, tensors))
        sdbench("prune", *SMALL, *base, "out").refuses(130, "interrupted; the same command goes on with what is in out.work-")
    # Statistics of the same command that are not the same do not go on with it.
    shutil.rmtree(folder)
    collected(1, "--method", "sparsegpt")
    assert call(*base, "out")["resumed_layers"] == 0
    shutil.rmtree("out")
    shutil.rmtree(folder)
    collected(2, "--method", "sparsegpt")
    found = call(*base, "out")
    assert found["resumed_layers"] == 9
    assert found["provenance"]["tensors"] == whole["provenance"]["tensors"]


def stop() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("text", "numbers", "tokens"), [("1/3", [0, 3, 6], 4), ("2/3", [1, 4], 3), ("3/3", [2, 5], 3)])
def test_shares(text, numbers, tokens):
    shard = Shard.parse(text)
    assert (str(shard), shard.numbers(7), shard.tokens(10), shard.tokens(None)) == (text, numbers, tokens, None)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/", "a/b", "-1/2", "1/2/3"])
def test_no_shares(text):
    with pytest.raises(UsageError, match=r"--shard .*write I/N"):
        Shard.parse(text)


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--shard", "1/2"), "--shard and --statistics go together"),
            (("--statistics", "shards", "--output", "out"), "--shard and --statistics go together"),
            (("--shard", "1/2", "--statistics", "shards", "--output", "out"), "leave out --output and --run-directory"),
            (("--merge", "shards", "--devices", "cpu", "--output", "out"), "--shard, --merge and --devices exclude each other"),
            (("--merge", "shards", "--output", "out"), "shards holds no shard"),
            (("--shard", "3/2", "--statistics", "shards"), "--shard 3/2: write I/N with I from 1 to N"),
            (("--shard", "1/2", "--statistics", "shards", "--sequential"), "--sequential calibrates each block on the pruned ones"),
            (("--shard", "1/2", "--statistics", "shards", "--method", "magnitude"), "--method magnitude needs no calibration"),
            (("--devices", "cpu,cpu", "--output", "out", "--sequential"), "--sequential calibrates each block on the pruned ones"),
            (("--devices", "gpu", "--output", "out", "--device", "auto"), "device 'gpu': use auto, cpu, cuda or cuda:N"),
            (("--shard", "6/6", "--statistics", "shards"), "too few calibration examples (5); use fewer shards"),
            (("--devices", "cpu,cpu,cpu,cpu,cpu,cpu", "--output", "out"), "too few calibration examples (5); use fewer shards"),
        ],
    )
    def test_wrong_arguments(self, arguments, message, sdbench, checkpoint):
        sdbench("prune", *SMALL, "--model", checkpoint(), *arguments).refuses(2, message)
        assert not Path("out").exists() and not Path("shards/shard-6-of-6").exists()

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (("--seed", 1), 3, "--seed is 1, and the shards in shards were collected with 0"),
            (
                ("--sink-tokens", 2, "--calib", "decode+sink"),
                3,
                "--calib is ['decode+sink'], and the shards in shards were collected with ['decode']",
            ),
            (("--method", "sparsegpt"), 2, "--method sparsegpt needs Hessians, and the shards hold sums of squares"),
            (("--method", "magnitude"), 2, "statistics that were collected before cannot be used: magnitude needs none"),
            (("--sequential",), 2, "--sequential calibrates each block on the pruned ones before it"),
        ],
    )
    def test_a_merge_by_another_command(self, arguments, code, message, sdbench, collected):
        sdbench("prune", *SMALL, "--model", "tiny", "--merge", collected(1), "--output", "out", *arguments).refuses(code, message)
        assert sorted(path.name for path in Path().iterdir()) == ["shards", "tiny"]

    def test_another_model(self, sdbench, collected, monkeypatch):
        folder = collected(1)
        monkeypatch.setattr(dense, "state_sha256", lambda parts: "0" * 64)
        sdbench("prune", *SMALL, "--model", "tiny", "--merge", folder, "--output", "out").refuses(3, "are of another model than tiny")

    def test_a_missing_and_a_doubled_shard(self, sdbench, collected):
        folder = collected(3, only=(1, 3))
        merge = ("prune", *SMALL, "--model", "tiny", "--merge", folder, "--output", "out")
        sdbench(*merge).refuses(3, "shards: shard 2/3 is missing; collect it with --shard 2/3")
        shutil.copytree(folder / "shard-1-of-3", folder / "twin")
        sdbench(*merge).refuses(3, "shards/shard-1-of-3 and shards/twin both are shard 1; remove one of them")
        shutil.rmtree(folder / "twin")
        collected(2, only=(2,))
        sdbench(*merge).refuses(3, "differ in the number of shards (3 there, 2 here)")

    def test_shards_of_different_commands(self, sdbench, collected):
        collected(2, only=(1,))
        collected(2, "--seed", 1, only=(2,))
        sdbench("prune", *SMALL, "--model", "tiny", "--merge", "shards", "--output", "out").refuses(3, "differ in seed (0 there, 1 here)")

    def test_a_layer_that_was_not_collected(self, sdbench, collected):
        folder = collected(1, "--targets", "down_proj")
        done = sdbench("prune", *SMALL, "--model", "tiny", "--merge", folder, "--output", "out")
        done.refuses(3, "layer model.layers.0.self_attn.q_proj: the shards in shards hold no statistics of it")

    @pytest.mark.parametrize("damage", ["changed", "missing", "record"])
    def test_a_damaged_shard(self, damage, sdbench, collected):
        folder = collected(2)
        file = folder / "shard-2-of-2" / "sums-00000.safetensors"
        if damage == "changed":
            file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
        elif damage == "missing":
            file.unlink()
        else:
            (file.parent / "statistics.json").write_text("{}")
        message = "is no sdbench.statistics/1 record" if damage == "record" else f"{file} is missing or was changed"
        sdbench("prune", *SMALL, "--model", "tiny", "--merge", folder, "--output", "out").refuses(3, message)

    def test_a_shard_that_is_there(self, sdbench, collected):
        folder = collected(1)
        done = sdbench("prune", *SMALL, "--model", "tiny", "--shard", "1/1", "--statistics", folder)
        done.refuses(2, "shards/shard-1-of-1 is there already")

    def test_not_enough_disk(self, sdbench, checkpoint, monkeypatch):
        usage = shutil.disk_usage(".")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=write.SLACK_BYTES + 1000))
        done = sdbench("prune", *SMALL, "--model", checkpoint(), "--shard", "1/2", "--statistics", "shards", "--method", "sparsegpt")
        done.refuses(1, "not enough disk for shards/shard-1-of-2")
        assert not Path("shards/shard-1-of-2").exists()

    def test_what_a_process_could_not_do_is_told_in_one_line(self, sdbench, checkpoint):
        done = sdbench("prune", *SMALL, "--model", checkpoint(), "--devices", "cpu", "--output", "out", "--max-tokens", 1)
        done.refuses(1, "no calibration text has a row that counts")
