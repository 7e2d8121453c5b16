"""A corpus of texts as calibration windows."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sdbench.demo import MODEL_DIR
from sdbench.errors import SdbenchError, UsageError
from sdbench.suites.corpus import read_corpus, windows

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts))
    return path


def test_json_lines_are_documents_in_a_seeded_order(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(9)]
    path = write(tmp_path / "c4.jsonl", *texts, " ")
    assert sorted(read_corpus(path, 0)) == texts  # the blank one is no document
    assert read_corpus(path, 0) == read_corpus(path, 0) != read_corpus(path, 1)


def test_plain_text_is_one_document_that_goes_round(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("one\ntwo\nthree\n")
    found = {read_corpus(path, seed)[0] for seed in range(20)}
    assert found == {"one\ntwo\nthree\n", "two\nthree\none\n", "three\none\ntwo\n"}


def test_windows_are_cut_across_documents_with_eos_between() -> None:
    first, second = ("What is 1 plus 2?", "Three.")
    a, b = (TOKENIZER(text, add_special_tokens=False).input_ids for text in (first, second))
    joined = [*a, TOKENIZER.eos_token_id, *b]
    length = len(joined) // 2
    assert windows([first, second], TOKENIZER, 2, length) == [tuple(joined[:length]), tuple(joined[length : 2 * length])]


def test_no_more_is_tokenised_than_needed() -> None:
    windows(["1 2 3 4 5 6 7 8 9"], TOKENIZER, 1, 4)
    windows(["1 2 3 4 5 6 7 8 9", None], TOKENIZER, 1, 4)  # type: ignore[list-item]  # what a damaged file may hold


def test_a_corpus_that_is_too_short() -> None:
    with pytest.raises(UsageError, match=r"holds \d windows of 4 tokens, fewer than 50 calibration examples"):
        windows(["1 2 3 4 5 6 7 8 9"], TOKENIZER, 50, 4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', r"c\.jsonl, line 2: no text"),
        ("c.jsonl", b'{"text": "a"}\n{"text"\n', r"c\.jsonl, line 2: not JSON"),
        ("c.jsonl", b'["a"]\n', r"c\.jsonl, line 1: no text"),
        ("c.txt", b"\xff\xfe", r"c\.txt is not UTF-8"),
        ("c.txt", b" \n", r"c\.txt holds no text"),
        ("c.txt", b"", r"c\.txt holds no text"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SdbenchError, match=message):
        read_corpus(tmp_path / name, 0)


def test_missing_file_and_test_split(tmp_path: Path) -> None:
    with pytest.raises(SdbenchError, match=r"cannot read .*none\.txt: No such file"):
        read_corpus(tmp_path / "none.txt", 0)
    with pytest.raises(UsageError, match="says test split"):
        read_corpus(write(tmp_path / "wiki.test.jsonl", "a"), 0)
