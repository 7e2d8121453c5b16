"""A task's data: where it is looked for, and its records as examples."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sdbench.errors import SdbenchError, UsageError
from sdbench.suites.data import Example, hold_out
from sdbench.suites.tasks.records import load_records, locate
from sdbench.suites.tasks.registry import find_task

CLASS = {
    "task_id": "Plum_1",
    "skeleton": "class Plum:\n    def eat(self): ...",
    "solution_code": "class Plum:\n    def eat(self): return 1",
    "class_name": "Plum",
    "import_statement": ["import math"],
    "test": "class T: ...",
    "test_classes": ["T"],
}
TALK: dict[str, Any] = {"index": 7, "query": "Write {two} lines.", "checklist": [{"name": "length"}]}


def silent(line: str) -> None: ...


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class TestRecords:
    def test_numbers(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", {"question": "1 + 1?", "answer": "#### 2"}, {"question": "0.1?", "answer": 0.10, "id": 7})
        assert load_records(find_task("gsm8k"), path) == [Example("a-1", "1 + 1?", "#### 2"), Example("7", "0.1?", "0.1")]

    def test_classes_in_an_array(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_text(json.dumps([CLASS]))
        [example] = load_records(find_task("classeval"), path)
        assert example.id == "Plum_1"
        assert example.question.endswith("```python\nclass Plum:\n    def eat(self): ...\n```")
        assert example.answer == "```python\nclass Plum:\n    def eat(self): return 1\n```"
        assert dict(example.grading) == {name: CLASS[name] for name in ("class_name", "import_statement", "test", "test_classes")}
        assert "return 1" not in example.question and "class T" not in example.question

    def test_texts_have_no_answer(self, tmp_path: Path) -> None:
        [example] = load_records(find_task("writingbench"), write(tmp_path / "a.jsonl", TALK))
        assert example == Example("writingbench-7", "Write {two} lines.", None, {"checklist": [{"name": "length"}]})

    @pytest.mark.parametrize("field", ["prompt", "question", "query", "instruction", "text"])
    def test_any_prompt(self, tmp_path: Path, field: str) -> None:
        path = write(tmp_path / "a.jsonl", {field: "Hello"})
        assert load_records(find_task("fidelity"), path) == [Example("a-1", "Hello", None)]

    def test_a_prompt_a_line(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("Hello\n\nGood \u2028 day\n")
        assert load_records(find_task("fidelity"), path) == [Example("a-1", "Hello", None), Example("a-3", "Good \u2028 day", None)]

    @pytest.mark.parametrize(
        ("task", "name", "content", "message"),
        [
            ("gsm8k", "a.jsonl", '{"question": "a"}', "a.jsonl, line 1: no text 'answer', which task gsm8k needs"),
            ("gsm8k", "a.jsonl", '{"question": " ", "answer": "1"}', "no text 'question'"),
            ("gsm8k", "a.jsonl", '{"question": "a", "answer": "1"}\n{', "a.jsonl, line 2: not JSON"),
            ("gsm8k", "a.jsonl", "", "a.jsonl holds no records"),
            ("gsm8k", "a.json", '[{"question": "a", "answer": "1"}, 3]', "a.json, record 2: not a JSON object"),
            ("gsm8k", "a.txt", "hello", "needs records with several fields"),
            ("gsm8k", "test.jsonl", '{"question": "a", "answer": "1"}', "says test split"),
            ("gsm8k", "a.jsonl", '{"question": "a", "answer": "1", "split": "test"}', "line 1: marked as a test split"),
            ("writingbench", "a.jsonl", '{"index": 1, "query": "a"}', "line 1: checklist: Field required; task writingbench needs it"),
            (
                "writingbench",
                "a.jsonl",
                '{"index": 1, "query": "a", "checklist": ["x"]}',
                "line 1: checklist.0: Input should be",
            ),
            ("classeval", "a.jsonl", json.dumps(CLASS | {"test_classes": []}), "line 1: test_classes: List should have at least 1 item"),
            ("writingbench", "a.jsonl", "\n".join([json.dumps(TALK)] * 2), "line 2: id 'writingbench-7' occurs twice"),
            ("fidelity", "a.jsonl", "{}", "no text 'prompt' or 'question' or"),
        ],
    )
    def test_bad_records(self, tmp_path: Path, task: str, name: str, content: str, message: str) -> None:
        (tmp_path / name).write_text(content)
        with pytest.raises(SdbenchError) as caught:
            load_records(find_task(task), tmp_path / name)
        assert message in str(caught.value)


class TestPlaces:
    @pytest.fixture(autouse=True)
    def places(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("SDBENCH_DATA", raising=False)
        monkeypatch.setenv("SDBENCH_CACHE", str(tmp_path / "cache"))

    def test_the_named_file_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SDBENCH_DATA", "/nowhere")
        assert locate(find_task("gsm8k"), Path("mine.jsonl"), silent) == Path("mine.jsonl")

    def test_the_folder_of_the_variable(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("SDBENCH_DATA", str(tmp_path))
        with pytest.raises(SdbenchError, match=r"holds no gsm8k/train\.jsonl; put it there"):
            locate(find_task("gsm8k"), None, silent)
        (tmp_path / "gsm8k").mkdir()
        (tmp_path / "gsm8k/train.jsonl").touch()
        assert locate(find_task("gsm8k"), None, silent) == tmp_path / "gsm8k/train.jsonl"

    def test_a_bundled_task_takes_no_file(self) -> None:
        assert locate(find_task("arithmetic"), None, silent) is None
        with pytest.raises(UsageError, match="comes with its data; leave out --data"):
            locate(find_task("arithmetic"), Path("a"), silent)

    def test_a_task_that_no_hub_has(self) -> None:
        with pytest.raises(UsageError, match=r"needs its data: put it at \$SDBENCH_DATA/writingbench/.*, or give --data FILE"):
            locate(find_task("writingbench"), None, silent)

    def test_without_the_library_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(UsageError, match=r"pip install 'sdbench\[hub\]'"):
            locate(find_task("gsm8k"), None, silent)

    def test_the_hub_is_asked_once_and_never_for_a_test_split(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked, told = [], []

        def load_dataset(*place: Any, **options: Any) -> list[dict[str, str]]:
            asked.append((place, options))
            return [{"question": "1 + 1?\u2028", "answer": "#### 2"}]

        library = ModuleType("datasets")
        library.load_dataset, library.disable_progress_bars = load_dataset, lambda: None  # type: ignore[attr-defined]  # a stand-in module
        monkeypatch.setitem(sys.modules, "datasets", library)
        for _ in range(2):
            path = locate(find_task("gsm8k"), None, told.append)
            assert path
        commit = "e53f048856ff4f594e959d75785d2c2d37b678ee"
        assert asked == [(("openai/gsm8k", "main"), {"data_files": None, "split": "train", "revision": commit})]
        assert told == [f"fetching openai/gsm8k (revision {commit}) from the hub"]
        assert [example.question for example in load_records(find_task("gsm8k"), path)] == ["1 + 1?\u2028"]

    def test_a_download_that_fails_is_one_line(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def load_dataset(*place: Any, **options: Any) -> None:
            raise ConnectionError("no\nroute")

        library = ModuleType("datasets")
        library.load_dataset, library.disable_progress_bars = load_dataset, lambda: None  # type: ignore[attr-defined]  # a stand-in module
        monkeypatch.setitem(sys.modules, "datasets", library)
        with pytest.raises(SdbenchError, match="FudanSELab/ClassEval cannot be fetched from the hub: no route"):
            locate(find_task("classeval"), None, silent)
        assert not (tmp_path / "cache").exists()


def test_what_is_held_out_is_apart_and_the_same_every_time() -> None:
    examples = [Example(f"e{n}", f"How many are {n}?", str(n)) for n in range(50)]
    train, validation = hold_out(examples, 0.2, 0)
    assert (len(train), len(validation)) == (40, 10)
    assert not {e.id for e in train} & {e.id for e in validation}
    assert hold_out(list(reversed(examples)), 10, 0)[1] == list(reversed(validation))
    assert hold_out(examples, 10, 1)[1] != validation
