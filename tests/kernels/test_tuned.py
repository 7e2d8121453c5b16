"""Tuned configs on disk: what a key holds, what becomes of a bad file, which config applies, and that none is used unseen."""

import shutil
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdbench.errors import SdbenchError
from sdbench.kernels import registry, spmv, tuned
from sdbench.kernels.registry import Config, Problem, Variant
from sdbench.kernels.tuned.choice import KERNELS, source_hash
from sdbench.packing import pack
from sdbench.pattern import Pattern
from sdbench.suites.kernels.operands import make_operand

CPU = torch.device("cpu")
PROBLEM = Problem(4096, 2560, torch.bfloat16, Pattern(2, 4), 132, 90)
LANE_ROW = registry.find("spmv", "lane_row")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SDBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "shipped", lambda capability: ())
    tuned._choice.cache_clear()
    yield tmp_path / "cache"
    tuned._choice.cache_clear()


def choice_for(key: tuned.Key, **config: int) -> tuned.Choice:
    times = {"p20": 1.0, "p50": 2.0, "p80": 3.0}
    return tuned.Choice(
        schema=tuned.CHOICE_SCHEMA, key=key, config=config, us=times, effort="full", outcomes={"correct": 2, "timeout": 1}, created="now"
    )


def key_for(problem: Problem = PROBLEM, variant: Variant = LANE_ROW) -> tuned.Key:
    return tuned.key_of(variant, problem, CPU)


def test_all_that_a_choice_hangs_on_makes_another_key() -> None:
    """CASES 9: transposed, fp16, 16:32, another GPU, changed source; and whatever else a key holds."""
    key = key_for()
    keys = [
        key,
        key_for(replace(PROBLEM, out_features=2560, in_features=4096)),
        key_for(replace(PROBLEM, dtype=torch.float16)),
        key_for(replace(PROBLEM, pattern=Pattern(16, 32))),
        key_for(replace(PROBLEM, pattern=None)),
        key_for(replace(PROBLEM, capability=100)),
        key_for(replace(PROBLEM, tokens=4)),
        key_for(variant=registry.find("spmv", "portable")),
        replace(key, gpu="NVIDIA H200"),
        replace(key, gpu="NVIDIA-H200"),  # alike once made safe for a file's name
        replace(key, source="0" * 16),
        replace(key, triton="0"),
        replace(key, kernel="dense"),
    ]
    assert len({k.digest for k in keys}) == len({k.file for k in keys}) == len(keys)
    for k in keys:
        tuned.store(choice_for(k, n=keys.index(k)))
    for k in keys:
        choice = tuned.load(k)
        assert choice is not None and choice.config == {"n": keys.index(k)}
    changed = {field.name for field in fields(key) for other in keys if getattr(other, field.name) != getattr(key, field.name)}
    assert changed == {field.name for field in fields(key)}


def test_a_files_name_says_what_it_is_for_and_suits_every_file_system() -> None:
    key = replace(key_for(), gpu="NVIDIA H200 MIG 1g.18gb")
    assert key.file.parent.name == "nvidia-h200-mig-1g-18gb-sm90"
    assert key.file.name == f"spmv-lane_row-4096x2560-2of4-bf16-{key.digest}.json"
    assert key_for(replace(PROBLEM, pattern=None)).file.name.startswith("spmv-lane_row-4096x2560-dense-bf16-")


def test_the_source_hash_follows_the_kernels_files_alone(tmp_path: Path) -> None:
    shutil.copytree(KERNELS / "spmv", tmp_path / "spmv", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(KERNELS / "dense", tmp_path / "dense", ignore=shutil.ignore_patterns("__pycache__"))

    def hashes() -> tuple[str, str]:
        source_hash.cache_clear()
        return source_hash("spmv", tmp_path), source_hash("dense", tmp_path)

    before = hashes()
    assert before == (source_hash("spmv"), source_hash("dense"))
    (tmp_path / "spmv" / "README.md").write_text("other words")
    assert hashes() == before
    (tmp_path / "spmv" / "bits.py").write_text((tmp_path / "spmv" / "bits.py").read_text() + "\n")
    after = hashes()
    assert after[0] != before[0] and after[1] == before[1]
    (tmp_path / "spmv" / "bits.py").rename(tmp_path / "spmv" / "bit.py")
    assert hashes()[0] not in (before[0], after[0])


def test_the_source_hash_follows_what_the_kernels_files_import(tmp_path: Path) -> None:
    """spmm loads words and adds sums as spmv does; what chooses among configs is part of neither."""
    shutil.copytree(KERNELS, tmp_path, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    kernels = ("spmm", "spmv", "dense", "quantized")

    def hashes() -> dict[str, str]:
        source_hash.cache_clear()
        return {kernel: source_hash(kernel, tmp_path) for kernel in kernels}

    before = hashes()
    assert before == {kernel: source_hash(kernel) for kernel in kernels} and len(set(before.values())) == len(kernels)
    for changed, file in (
        ({"spmm", "spmv"}, "spmv/lane_row.py"),  # imported
        ({"spmm", "spmv"}, "spmv/chunks.py"),  # by what is imported
        ({"spmm"}, "spmm/tile.py"),
        ({"quantized"}, "quantized/weights.py"),
        (set(), "tuned/choice.py"),
    ):
        path = tmp_path / file
        text = path.read_text()
        path.write_text(text + "\n")
        assert {kernel for kernel, now in hashes().items() if now != before[kernel]} == changed, file
        path.write_text(text)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tuned.cache_folder() == tmp_path / "cache" / "tuned"
    monkeypatch.delenv("SDBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuned.cache_folder() == tmp_path / "xdg" / "sdbench" / "tuned"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuned.cache_folder() == tmp_path / "home" / ".cache" / "sdbench" / "tuned"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: "", "is damaged"),
        (lambda text: '{"config": {}}', "is damaged"),
        (lambda text: text.replace('"n": 1', '"n": "much"'), "is damaged .*n"),
        (lambda text: text.replace("tuned/1", "tuned/9"), "is damaged .*schema"),
        (lambda text: text.replace("bf16", "fp16"), "is for something else"),
    ],
)
def test_a_bad_file_is_an_error_to_load_and_a_warning_to_look_up(spoil: Any, message: str) -> None:
    """CASES 9: truncated, and foreign."""
    key = key_for()
    tuned.store(choice_for(key, n=1))
    assert tuned.lookup(LANE_ROW, PROBLEM, CPU) == ({"n": 1}, "cache")
    path = tuned.cache_folder() / key.file
    path.write_text(spoil(path.read_text()))
    with pytest.raises(SdbenchError, match=message):
        tuned.load(key)
    tuned._choice.cache_clear()
    with pytest.warns(UserWarning, match=message):
        assert tuned.lookup(LANE_ROW, PROBLEM, CPU) == (LANE_ROW.default(PROBLEM), "default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning, not one a call
        tuned.lookup(LANE_ROW, PROBLEM, CPU)
    tuned.store(choice_for(key, n=2))
    assert tuned.lookup(LANE_ROW, PROBLEM, CPU) == ({"n": 2}, "cache")
    assert [file.name for file in path.parent.iterdir()] == [key.file.name]  # drafts are gone


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SDBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(SdbenchError, match=r"cannot keep tuned configs in .*SDBENCH_CACHE"):
        tuned.store(choice_for(key_for(), n=1))


def test_the_users_choice_goes_before_what_ships_and_that_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned.lookup(LANE_ROW, PROBLEM, CPU) == (LANE_ROW.default(PROBLEM), "default")
    # What ships holds for any GPU, source and Triton of its capability.
    key = key_for()
    foreign = [
        choice_for(replace(key, gpu="NVIDIA H100", source="0" * 16, triton="0", **other), n=number)
        for number, other in enumerate([{}, {"shape": (2560, 4096)}, {"dtype": "fp16"}, {"pattern": "16:32"}, {"variant": "portable"}])
    ]
    monkeypatch.setattr(tuned, "shipped", lambda capability: tuple(foreign) if capability == 90 else ())
    tuned._choice.cache_clear()
    assert tuned.lookup(LANE_ROW, PROBLEM, CPU) == ({"n": 0}, "shipped")
    assert tuned.lookup(LANE_ROW, replace(PROBLEM, capability=80), CPU)[1] == "default"
    tuned.store(choice_for(key, n=7))
    assert tuned.lookup(LANE_ROW, PROBLEM, CPU) == ({"n": 7}, "cache")


def test_export_merges_by_task(tmp_path: Path) -> None:
    path, key = tmp_path / "sm_90.json", replace(key_for(), gpu="NVIDIA H200")
    other = replace(key, variant="portable")
    tuned.export(path, 90, [choice_for(key, n=1), choice_for(other, n=2)])
    before = path.read_text().splitlines()
    tuned.export(path, 90, [choice_for(replace(key, triton="9.9"), n=3)])
    found = tuned.read_shipped(path)
    assert found is not None and found.capability == 90
    assert [(choice.key.variant, choice.config) for choice in found.choices] == [("lane_row", {"n": 3}), ("portable", {"n": 2})]
    after = path.read_text().splitlines()
    assert len(after) == len(before) and sum(old != new for old, new in zip(before, after, strict=True)) == 1  # a choice a line
    with pytest.raises(SdbenchError, match="compute capability 90, not 100"):
        tuned.export(path, 100, [choice_for(key, n=1)])
    with pytest.raises(SdbenchError, match="folder does not exist"):
        tuned.open_set(tmp_path / "none" / "sm_90.json", 90)
    path.write_text("[]")
    with pytest.raises(SdbenchError, match="no file of tuned configs"):
        tuned.open_set(path, 90)


def test_configs_that_ship_are_of_their_variants_space() -> None:
    """A config with other names than its variant reads would fail at its first use on every user's machine."""
    for path in KERNELS.joinpath("tuned").glob("sm_*.json"):
        found = tuned.read_shipped(path)
        assert found is not None and path.name == f"sm_{found.capability}.json"
        for choice in found.choices:
            variant, key = registry.find(choice.key.kernel, choice.key.variant), choice.key
            pattern = Pattern.parse(key.pattern) if key.pattern else None
            problem = Problem(
                *key.shape, {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[key.dtype], pattern, 132, 90
            )
            assert choice.config.keys() == variant.default(problem).keys(), key


def wrong_or_right(packed: Any, x: torch.Tensor, y: torch.Tensor, config: Config) -> torch.Tensor:
    if config["how"] == 3:
        raise KeyError("block_out")
    return y.copy_(packed.unpack().float() @ x.float() + (config["how"] == 2))


def test_a_tuned_config_is_compared_before_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 9: a cache's choice is checked again before use; a wrong one is a warning."""
    variant = Variant("spmv", "fake", "for a test", wrong_or_right, lambda problem: [], lambda problem: {"how": 1}, needs="torch")
    weight = make_operand((8, 32), torch.bfloat16, Pattern(2, 4), CPU, 0).weight
    problem = spmv.problem_of(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spmv._is_right(weight, variant, problem, {"how": 1}, "cache")
    for how, trouble in ((2, "gives a wrong product"), (3, "KeyError: 'block_out'")):
        with pytest.warns(UserWarning, match=f"the shipped config .*{trouble}.*sdbench tune"):
            assert not spmv._is_right(weight, variant, problem, {"how": how}, "shipped")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once a process
            assert not spmv._is_right(weight, variant, problem, {"how": how}, "shipped")


def test_a_cpu_runs_the_default_and_asks_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "lookup", lambda *arguments: pytest.fail("tuned configs are for GPUs"))
    weight = make_operand((8, 32), torch.bfloat16, Pattern(2, 4), CPU, 0).weight
    bound = spmv.bind(weight, "lane_row")
    assert bound.config == LANE_ROW.default(spmv.problem_of(weight))


@pytest.mark.gpu
def test_on_a_gpu_the_tuned_config_runs_unless_it_is_wrong() -> None:
    """CASES 9."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    for kind, config in (("right", {}), ("wrong", {"nothing_that_it_reads": 1})):
        shape = (6144 if kind == "right" else 4096, 2560)
        dense = torch.randn(shape, device=device).bfloat16()
        keep = torch.tensor([True, True, False, False], device=device).repeat(shape[0], shape[1] // 4)
        packed = pack(dense, keep, Pattern(2, 4))
        problem = spmv.problem_of(packed)
        default = LANE_ROW.default(problem)
        given = next(c for c in LANE_ROW.space(problem) if c != default) if kind == "right" else config
        tuned.store(choice_for(tuned.key_of(LANE_ROW, problem, packed.device), **given))
        if kind == "right":
            bound = spmv.bind(packed, "lane_row")
            assert bound.config == given
        else:
            with pytest.warns(UserWarning, match="the cache config .* the default is used"):
                bound = spmv.bind(packed, "lane_row")
            assert bound.config == default
        x = torch.randn(2560, device=device)
        want = packed.unpack().double() @ x.double()
        assert ((bound(x).double() - want).norm() / want.norm()).item() < 1e-5


def test_a_pattern_without_a_choice_takes_that_of_one_with_as_many_values_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    two_of_four = choice_for(replace(key_for(), pattern="2:4", capability=90), n=1)
    monkeypatch.setattr(tuned, "shipped", lambda capability: (two_of_four,))
    for pattern, expected in (("2:4", two_of_four), ("16:32", two_of_four), ("1:4", None), (None, None)):
        assert tuned.find_shipped(replace(two_of_four.key, pattern=pattern)) == expected
    exact = choice_for(replace(two_of_four.key, pattern="16:32"), n=2)
    monkeypatch.setattr(tuned, "shipped", lambda capability: (two_of_four, exact))
    assert tuned.find_shipped(exact.key) == exact
    assert tuned.find_shipped(replace(exact.key, shape=(1, 32))) is None


def test_the_fastest_of_several_variants_by_their_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [registry.find("spmv", name) for name in ("lane_row_nibble", "lane_row")]
    assert tuned.fastest(both, PROBLEM, CPU) is both[0]
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(tuned, "shipped", lambda capability: ())
    assert tuned.fastest(both, PROBLEM, gpu) is both[0]
    for variant, time in zip(both, (3.0, 2.0), strict=True):
        tuned.store(choice_for(tuned.key_of(variant, PROBLEM, gpu), n=1).model_copy(update={"us": {"p20": time, "p50": time, "p80": time}}))
    assert tuned.fastest(both, PROBLEM, gpu) is both[1]
