"""Datasets, splits and manifests."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdbench.errors import CheckFailed, SdbenchError, UsageError
from sdbench.suites.data import Example, load_examples, make_manifest, normalise_question, read_manifest, select, split, verify_manifest

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A shared machine is slow at times; these tests are about values."""

EXAMPLES = [
    Example(f"e{n}", f"Ada has {n} pears and buys {n} more. How many has she?", f"{n} + {n} = {2 * n}\n#### {2 * n}") for n in range(40)
]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def plain(n: int) -> dict[str, str]:
    return {"question": EXAMPLES[n].question, "answer": EXAMPLES[n].answer}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "pears.jsonl", [plain(n) for n in range(40)])


def outputs(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "train.jsonl", folder / "validation.jsonl", folder / "manifest.json"


# --- loading ---


def test_ids_are_texts_and_default_to_the_line(tmp_path: Path) -> None:
    file = write(tmp_path / "pears.jsonl", [{"id": "007", **plain(0)}, {"id": 8, **plain(1)}, plain(2)])
    assert [example.id for example in load_examples(file)] == ["007", "8", "pears-3"]


def test_texts_are_verbatim(tmp_path: Path) -> None:
    """CASES 20: a record ends at a newline only, and a file need not end with one."""
    file = tmp_path / "pears.jsonl"
    record = {"question": " a\u2028b\u0085c\r\n", "answer": "None"}
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(record, ensure_ascii=False).encode() + b"\r\n\n" + json.dumps(plain(1)).encode())
    first, second = load_examples(file)
    assert first == Example("pears-1", " a\u2028b\u0085c\r\n", "None")
    assert second.id == "pears-3"


def test_numeric_answers_keep_their_digits(tmp_path: Path) -> None:
    file = tmp_path / "pears.jsonl"
    file.write_text('{"question": "a", "answer": 12345678901234567890}\n{"question": "b", "answer": 0.10}\n')
    assert [example.answer for example in load_examples(file)] == ["12345678901234567890", "0.10"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no examples"),
        (b"\n \n", "holds no examples"),
        (b'{"question": "a", "answer": "1"}\n{"question": "b"}\n', "line 2: answer: Field required; each line is a JSON object"),
        (b'{"question": null, "answer": "1"}', "line 1: question: "),
        (b'{"question": "a", "answer": ["1"]}', "line 1: answer: "),
        (b'{"question": " ", "answer": "1"}', "line 1: question is empty"),
        (b'{"question": "a", "answer": "1"}\n{"question": "b", "ans', "line 2: not JSON in UTF-8"),
        (b'{"question": "\xff", "answer": "1"}', "line 1: not JSON in UTF-8"),
        (b'[{"question": "a", "answer": "1"}]', "line 1: "),
        (b'{"id": 1, "question": "a", "answer": "1"}\n{"id": "1", "question": "b", "answer": "1"}', "line 2: id '1' occurs twice"),
        (b'{"question": "a", "answer": "1"}\n{"question": "b", "answer": "1", "split": "Test"}', "line 2: marked as a test split"),
    ],
)
def test_bad_files_name_line_and_fault(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "pears.jsonl"
    file.write_bytes(content)
    with pytest.raises(SdbenchError) as caught:
        load_examples(file)
    text = str(caught.value)
    assert "pears.jsonl" in text and message in text and "\n" not in text


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SdbenchError, match=r"cannot read .*pears.jsonl: No such file"):
        load_examples(tmp_path / "pears.jsonl")


@pytest.mark.parametrize(
    "name", ["test.jsonl", "gsm8k_test.jsonl", "gsm8k-test-main.jsonl", "TEST.jsonl", "gsm8k.test.jsonl", "test-00000-of-00001.jsonl"]
)
def test_official_test_splits_are_refused_by_name(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, [plain(0)])
    link = tmp_path / "train.jsonl"
    link.symlink_to(file)
    for path in (file, link):
        with pytest.raises(UsageError, match="says test split"):
            load_examples(path)


@pytest.mark.parametrize("name", ["latest.jsonl", "contest.jsonl", "attested.jsonl", "testament.jsonl", "train.jsonl"])
def test_other_names_are_read(tmp_path: Path, name: str) -> None:
    assert len(load_examples(write(tmp_path / name, [plain(0)]))) == 1


# --- questions ---


@pytest.mark.parametrize("other", ["ada  has\n3 PEARS.", " Ada has\u00a03 pears. ", "Ada has \uff13 pears.", "Ada\u2028has\u00853 pears."])
def test_questions_equal_after_normalising(other: str) -> None:
    assert normalise_question(other) == normalise_question("Ada has 3 pears.") == "ada has 3 pears."


@UNHURRIED
@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    once = normalise_question(text)
    assert normalise_question(once) == once


def test_select_is_deterministic_nested_and_independent_of_order() -> None:
    four = select(EXAMPLES, 4, seed=0)
    assert four == select(EXAMPLES[::-1], 4, seed=0) == select(EXAMPLES, 9, seed=0)[:4]
    assert four != select(EXAMPLES, 4, seed=1)
    assert sorted(select(EXAMPLES, 40, seed=0), key=EXAMPLES.index) == EXAMPLES


def test_select_draws_the_same_examples_on_every_machine() -> None:
    """The expected draw is ranked here by hand."""
    ranked = sorted(EXAMPLES, key=lambda example: hashlib.sha256(f"select\n7\n{example.question.lower()}".encode()).hexdigest())
    assert select(EXAMPLES, 3, seed=7) == ranked[:3]


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    """Of the same length, at the same time: only what is in it tells."""
    file = write(tmp_path / "a.jsonl", [plain(1)])
    times = file.stat()
    (first,) = load_examples(file)
    write(file, [plain(2)])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    (second,) = load_examples(file)
    assert (first.question, second.question) == (plain(1)["question"], plain(2)["question"])


@pytest.mark.parametrize("n", [0, -1, 41])
def test_select_refuses_what_is_not_there(n: int) -> None:
    with pytest.raises(UsageError, match=f"n {n}: the data has 40 to draw from; choose between 1 and 40"):
        select(EXAMPLES, n, seed=0)


# --- splitting ---


@pytest.mark.parametrize(("size", "held_out"), [(5, 5), (0.1, 4), (0.001, 1)])
def test_split_parts_and_manifest(source: Path, tmp_path: Path, size: int | float, held_out: int) -> None:
    train, validation, manifest = outputs(tmp_path / "out")
    made = split(source, train, validation, manifest, size, seed=0, revision="abc")
    trained, held = load_examples(train), load_examples(validation)
    assert (len(trained), len(held)) == (40 - held_out, held_out)
    assert sorted((e.id, e.question, e.answer) for e in trained + held) == sorted(
        (f"pears-{n + 1}", EXAMPLES[n].question, EXAMPLES[n].answer) for n in range(40)
    )
    document = json.loads(manifest.read_text())
    assert document == {
        "schema": "sdbench.split/1",
        "revision": "abc",
        "source": {"file": "pears.jsonl", "sha256": hashlib.sha256(source.read_bytes()).hexdigest()},
        "seed": 0,
        "normalisation": "nfkc-casefold-whitespace",
        "dropped_duplicates": 0,
        "dropped_contradictions": 0,
        "shared_questions": 0,
        "parts": {
            "train": {"file": "train.jsonl", "sha256": hashlib.sha256(train.read_bytes()).hexdigest(), "examples": 40 - held_out},
            "validation": {"file": "validation.jsonl", "sha256": hashlib.sha256(validation.read_bytes()).hexdigest(), "examples": held_out},
        },
    }
    assert read_manifest(manifest) == made == verify_manifest(manifest, train, validation, "abc")


def test_split_is_deterministic_and_follows_the_seed(source: Path, tmp_path: Path) -> None:
    def held(folder: str, seed: int) -> bytes:
        paths = outputs(tmp_path / folder)
        split(source, *paths, validation_size=8, seed=seed, revision="abc")
        return paths[1].read_bytes()

    assert held("a", 0) == held("b", 0) != held("c", 1)


def test_repeated_questions_are_kept_once(tmp_path: Path) -> None:
    twins = [{**plain(n), "question": plain(n)["question"].upper() + "  "} for n in range(10)]
    source = write(tmp_path / "pears.jsonl", [plain(n) for n in range(10)] + twins)
    train, validation, manifest = outputs(tmp_path)
    made = split(source, train, validation, manifest, 0.5, seed=0)
    assert made.dropped_duplicates == 10
    assert made.revision == "sha256-" + hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    questions = [example.question for example in load_examples(train) + load_examples(validation)]
    assert sorted(questions) == sorted(plain(n)["question"] for n in range(10))


@pytest.mark.parametrize("size", [0, 40, 41, -1, 0.0, 1.0, 1.5, float("nan"), 0.999])
def test_split_refuses_an_empty_part(source: Path, tmp_path: Path, size: int | float) -> None:
    with pytest.raises(UsageError, match="validation size"):
        split(source, *outputs(tmp_path), validation_size=size, seed=0, revision="abc")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pears.jsonl"]


def test_split_never_overwrites_unless_forced(source: Path, tmp_path: Path) -> None:
    paths = outputs(tmp_path)
    split(source, *paths, validation_size=4, seed=0, revision="abc")
    before = [path.read_bytes() for path in paths]
    with pytest.raises(UsageError, match=r"already there: .*train.jsonl, .*use --force"):
        split(source, *paths, validation_size=4, seed=1, revision="abc")
    assert [path.read_bytes() for path in paths] == before
    split(source, *paths, validation_size=4, seed=1, revision="abc", force=True)
    assert [path.read_bytes() for path in paths] != before


def test_split_never_replaces_its_source_nor_writes_a_test_split(source: Path, tmp_path: Path) -> None:
    train, validation, manifest = outputs(tmp_path)
    for paths in ((source, validation, manifest), (train, train, manifest)):
        with pytest.raises(UsageError, match="four different files"):
            split(source, *paths, validation_size=4, seed=0, revision="abc", force=True)
    with pytest.raises(UsageError, match="says test split"):
        split(source, train, tmp_path / "test.jsonl", manifest, validation_size=4, seed=0, revision="abc")
    with pytest.raises(UsageError, match="revision is empty"):
        make_manifest(source, source, " ")


def test_split_into_an_unwritable_folder_is_one_line(source: Path) -> None:
    with pytest.raises(SdbenchError, match=r"cannot write .*Not a directory"):
        split(source, *outputs(source / "below"), validation_size=4, seed=0, revision="abc")


# --- verifying ---


@pytest.fixture
def parts(source: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    train, validation, manifest = outputs(tmp_path)
    split(source, train, validation, manifest, validation_size=8, seed=0, revision="abc")
    return manifest, train, validation


def test_a_changed_file_is_refused(parts: tuple[Path, Path, Path]) -> None:
    manifest, train, validation = parts
    expected = hashlib.sha256(validation.read_bytes()).hexdigest()[:12]
    validation.write_bytes(validation.read_bytes() + b"\n")
    actual = hashlib.sha256(validation.read_bytes()).hexdigest()[:12]
    with pytest.raises(CheckFailed, match=f"validation.jsonl is not the validation part .*: SHA-256 {expected} expected, {actual} found"):
        verify_manifest(manifest, train, validation)


def test_swapped_parts_are_refused(parts: tuple[Path, Path, Path]) -> None:
    manifest, train, validation = parts
    with pytest.raises(CheckFailed, match=r"validation.jsonl is not the train part"):
        verify_manifest(manifest, validation, train)


def test_another_revision_is_refused(parts: tuple[Path, Path, Path]) -> None:
    with pytest.raises(CheckFailed, match="pins dataset revision 'abc', not 'abd'"):
        verify_manifest(*parts, dataset_revision="abd")


def test_shared_questions_are_looked_for_again(parts: tuple[Path, Path, Path]) -> None:
    """A manifest whose hashes fit but whose parts share a question was not made by sdbench."""
    manifest, train, validation = parts
    stolen = load_examples(validation)[0]
    train.write_bytes(train.read_bytes() + json.dumps({"question": stolen.question.upper(), "answer": "1"}).encode() + b"\n")
    document = json.loads(manifest.read_text())
    document["parts"]["train"]["sha256"] = hashlib.sha256(train.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(document))
    with pytest.raises(CheckFailed, match=rf"share 1 question, first 'train-33' and '{stolen.id}'"):
        verify_manifest(manifest, train, validation)
    with pytest.raises(CheckFailed, match=r"share 1 question,"):
        make_manifest(train, validation, "abc")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"schema": "sdbench.split/9"}, "schema: "),
        ({"shared_questions": 3}, "shared_questions: "),
        ({"parts": {}}, "parts.train: Field required"),
    ],
)
def test_a_foreign_manifest_is_refused(parts: tuple[Path, Path, Path], change: dict[str, Any], fault: str) -> None:
    manifest, train, validation = parts
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(SdbenchError) as caught:
        verify_manifest(manifest, train, validation)
    assert f"manifest.json is no sdbench.split/1 manifest ({fault}" in str(caught.value)


def test_a_broken_or_missing_manifest_is_one_line(parts: tuple[Path, Path, Path]) -> None:
    manifest, train, validation = parts
    manifest.write_text("{")
    with pytest.raises(SdbenchError, match=r"is no sdbench.split/1 manifest"):
        verify_manifest(manifest, train, validation)
    manifest.unlink()
    with pytest.raises(SdbenchError, match=r"cannot read .*manifest.json"):
        verify_manifest(manifest, train, validation)


def test_a_manifest_for_two_existing_parts(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [plain(n) for n in range(5)])
    validation = write(tmp_path / "validation.jsonl", [plain(n) for n in range(5, 8)])
    manifest = make_manifest(train, validation, "generator-1", seed=3)
    manifest.write(tmp_path / "manifest.json")
    assert verify_manifest(tmp_path / "manifest.json", train, validation, "generator-1") == manifest
    assert (manifest.source, manifest.seed, manifest.parts.validation.examples) == (None, 3, 3)
