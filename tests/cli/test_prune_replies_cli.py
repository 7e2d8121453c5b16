"""``sdbench prune --replies``: the model's own replies, made elsewhere and replayed, give what decoding them gives."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from sdbench.suites.data import sha256_of

SMALL = ("--calibration-examples", 3, "--max-tokens", 12, "--device", "cpu")


def pruned(sdbench: Any, *arguments: Any) -> dict[str, Any]:
    done = sdbench("prune", "--json", *SMALL, *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


def tensors(document: dict[str, Any]) -> dict[str, str]:
    return document["provenance"]["tensors"]


def lines(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write(records: list[dict[str, Any]], name: str = "given.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return name


@pytest.fixture
def decoded(sdbench, checkpoint):
    """A run that decodes its own replies, and keeps them; of a model whose replies end at several lengths."""

    def run(*arguments: Any) -> dict[str, Any]:
        found = pruned(sdbench, "--model", checkpoint(), *arguments, "--output", "whole", "--run-directory", "run")
        assert found["calibration"]["generated_tokens"] > 3
        return found

    return run


def test_a_calibration_on_next_to_nothing_is_told(decoded, sdbench):
    decoded("--calibration-examples", 3)
    few = [record | {"ids": record["ids"][:2], "reply": None, "finish_reason": "length"} for record in lines("run/replies.jsonl")]
    done = sdbench("prune", "--model", "tiny", "--replies", write(few[:1]), "--calibration-examples", 1, "--output", "out")
    assert done.code == 0 and "warning: calibrated on 1 row a layer, too few to tell columns apart" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--calib", "decode"),
        ("--calib", "decode+sink", "--method", "sparsegpt", "--format", "dense"),
        ("--calib", "self", "--method", "sparsegpt", "--sequential"),
        ("--calib", "decode", "--dtype", "bf16", "--calibration-tokens", 20, "--last-decode", 8),
        ("--calib", "mixed", "--mix", "decode=1", "--mix", "teacher-forced=1"),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_tensors_of_the_run_whose_replies_they_are_streamed_or_not(arguments, decoded, sdbench):
    """Bit for bit."""
    own = decoded(*arguments)
    given = ("--model", "tiny", *arguments, "--replies", "run/replies.jsonl")
    whole, streamed = pruned(sdbench, *given, "--output", "out"), pruned(sdbench, *given, "--output", "streamed", "--stream")
    assert tensors(whole) == tensors(streamed) == tensors(own)
    assert all((load_file("out/model.safetensors")[name] == tensor).all() for name, tensor in load_file("whole/model.safetensors").items())
    first, *others = (found["provenance"]["calibration"] for found in (own, whole, streamed))
    for other in others:
        assert (other["examples"], other["rows"], other["report"]["replies"]) == (
            first["examples"],
            first["rows"],
            first["report"]["replies"],
        )
        assert other["arguments"]["replies_sha256"] == sha256_of(Path("run/replies.jsonl")) and other["arguments"]["task"] == "own"
        assert other["report"]["generation"]["file"] == "replies.jsonl"
    assert "replies_sha256" not in first["arguments"]
    assert others[0]["report"]["replay_difference"] < 1e-1 and others[1]["report"]["replay_difference"] is None
    assert "once a token" in others[1]["report"]["replay_difference_reason"]
    assert "generation" not in whole["seconds"] and whole["calibration"]["generated_tokens"] == 0


def test_shares_of_the_examples(decoded, sdbench):
    """Two processes, streamed, with a file that holds more questions than are drawn."""
    own = decoded("--calib", "decode")
    file = write([*lines("run/replies.jsonl"), {"question": "1 + 1?", "reply": "2"}])
    base = ("prune", "--model", "tiny", "--replies", file, "--calibration-examples", 4, "--max-tokens", 12, "--device", "cpu", "--stream")
    for number in (1, 2):
        assert sdbench(*base, "--shard", f"{number}/2", "--statistics", "shards").code == 0
    done = sdbench(*base, "--merge", "shards", "--output", "out", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["provenance"]["calibration"]["rows"]["min"]
    assert rows >= own["provenance"]["calibration"]["rows"]["min"]
    Path(file).write_text(Path(file).read_text().replace("1 + 1", "1 + 2"))
    sdbench(*base, "--merge", "shards", "--output", "other").refuses(3, "--replies-sha256 is ", "were collected with")


def test_rows_and_eos_of_each_form(sdbench, checkpoint):
    """T tokens are T - 1 rows, EOS among the T where the file says that the model ended: as text, as ids, with and without the end."""
    model = checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "3 + 4 = 7"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    end = tokenizer.eos_token_id
    forms: list[tuple[dict[str, Any], int]] = [
        ({"question": "3 + 4?", "reply": text}, len(ids) - 1),
        ({"question": "3 + 4?", "reply": text, "finish_reason": "length"}, len(ids) - 1),
        ({"prompt": "3 + 4?", "reply": text, "finish_reason": "stop"}, len(ids)),
        ({"question": "3 + 4?", "token_ids": ids, "eos": True}, len(ids)),
        ({"question": "3 + 4?", "ids": [*ids, end], "reply": "not read"}, len(ids)),
        ({"question": "3 + 4?", "ids": [*ids, end], "finish_reason": "stop"}, len(ids)),
        ({"question": "3 + 4?", "ids": ids, "eos": False}, len(ids) - 1),
    ]
    found = {}
    for number, (form, rows) in enumerate(forms):
        call = ("--model", model, "--calibration-examples", 1, "--max-tokens", 40, "--replies", write([form]), "--output", f"out{number}")
        found[number] = pruned(sdbench, *call)
        assert found[number]["provenance"]["calibration"]["rows"] == {"min": rows, "max": rows}, form
    assert tensors(found[2]) == tensors(found[3]) == tensors(found[4]) == tensors(found[5]) != tensors(found[0])


def test_what_people_read(decoded, sdbench):
    decoded("--calib", "decode")
    file = write([{"question": record["question"], "ids": [*record["ids"][:11], 9, 9, 9]} for record in lines("run/replies.jsonl")])
    done = sdbench("prune", *SMALL, "--model", "tiny", "--replies", file, "--output", "other")
    assert "given.jsonl: 3 replies, 0 of them ended by EOS, 3 cut off at --max-tokens 12" in done.err
    assert "calibration replies: 36 tokens of 3 replies from given.jsonl, replayed" in done.out.splitlines()


GOOD = {"question": "1 + 1?", "reply": "2"}


class TestRefused:
    @pytest.mark.parametrize(
        ("line", "code", "messages"),
        [
            ("{", 1, ["not JSON in UTF-8", 'each line is a JSON object with a text "question"']),
            ({"reply": "2"}, 1, ["question: Field required", "each line is"]),
            ({"question": "2 + 2?"}, 1, ["neither a reply nor its ids", "each line is"]),
            ({"question": "2 + 2?", "reply": " "}, 1, ["neither a reply nor its ids"]),
            ({"question": "2 + 2?", "ids": [5, "6"]}, 1, ["ids.1: Input should be a valid integer"]),
            ({"question": "2 + 2?", "ids": []}, 1, ["the reply has no token; leave the line out"]),
            ({"question": "2 + 2?", "ids": [5, 1024]}, 1, ["token id 1024, and the model has 1024; take this model's own replies"]),
            ({"question": "2 + 2?", "ids": [5, 2, 6]}, 1, ["token 2 of 3 is EOS (2)"]),
            ({"question": "2 + 2?", "ids": [5, 2], "eos": False}, 1, ["ends by EOS (2), but is said to be cut off"]),
            ({"question": "2 + 2?", "reply": "4", "finish_reason": "tool_calls"}, 1, ["finish_reason 'tool_calls' is no end"]),
            ({"question": "2 + 2?", "reply": "4", "id": "given-1"}, 1, ["id 'given-1' occurs twice"]),
            ({"question": "2 + 2?", "reply": "4", "split": "test"}, 2, ["marked as a test split"]),
            ({"arm": "dense", "example": "a", "prompt_hash": "0", "ids": [5]}, 1, ["an answer of an e2e run", "replies.jsonl"]),
            ({"question": "a " * 600, "reply": "4"}, 1, ["prompt and reply are", "tokens, and the model has 512 positions"]),
        ],
        ids=str,
    )
    def test_a_line(self, line, code, messages, sdbench, checkpoint):
        Path("given.jsonl").write_text(json.dumps(GOOD) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
        done = sdbench(
            "prune", "--device", "cpu", "--calibration-examples", 2, "--model", checkpoint(), "--replies", "given.jsonl", "--output", "o"
        )
        done.refuses(code, "given.jsonl, line 2", *messages)
        assert not Path("o").exists()

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (("--calib", "prefill"), 2, "--replies changes nothing without the calibration source decode, decode+sink or self"),
            (("--temperature", 0.5), 2, "--temperature samples replies, and --replies gives them"),
            (
                ("--train", "t.jsonl", "--split-manifest", "m.json"),
                2,
                "--replies brings its own questions; leave out --train, --split-manifest",
            ),
            (("--dataset-revision", "r"), 2, "leave out --dataset-revision"),
            (("--calibration-examples", 2), 2, "--calibration-examples 2: given.jsonl has 1 to draw from"),
            (("--model", "random:tiny"), 2, "a random: model gives no replies that mean anything; leave out --replies"),
            (("--replies", "none.jsonl"), 2, "cannot read none.jsonl: No such file"),
            (("--replies", "test.jsonl"), 2, "says test split"),
            (("--method", "magnitude"), 2, "--method magnitude needs no calibration, and "),
        ],
        ids=str,
    )
    def test_a_command(self, arguments, code, message, sdbench, checkpoint):
        checkpoint()
        shutil.copy(write([GOOD]), "test.jsonl")
        base = ("prune", "--device", "cpu", "--calibration-examples", 1, "--model", "tiny", "--replies", "given.jsonl", "--output", "out")
        sdbench(*base, *arguments).refuses(code, message)
