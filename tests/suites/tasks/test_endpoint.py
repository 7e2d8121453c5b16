"""A judge behind a local endpoint."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from sdbench.errors import UsageError
from sdbench.suites.tasks.endpoint import Judge

LENGTH = {"name": "length", "criteria_description": "how long it is", "1-2": "none", "9-10": "just right"}
STYLE = {"name": "style", "criteria_description": "how it reads"}


class Endpoint:
    """Says what it is told to, in turn, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.answers: list[tuple[int, str]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.asked.append((self.path, self.headers.get("Authorization"), body))
                code, text = endpoint.answers.pop(0)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *anything: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.judge = Judge(f"http://127.0.0.1:{self.server.server_port}/v1/", "a-judge", timeout=10, pause=0)

    def says(self, *texts: str) -> None:
        self.answers += [(200, json.dumps({"choices": [{"message": {"content": text}}]})) for text in texts]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.delenv("SDBENCH_JUDGE_KEY", raising=False)
    made = Endpoint()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_the_mean_over_the_criteria(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDBENCH_JUDGE_KEY", "secret")
    endpoint.says('{"reason": "fine", "score": 8}', '<think>"score": 2}</think>```json\n{"score": "5", "reason": "dull"}\n```')
    assert endpoint.judge.score("Write {a} line.", "A line.", [LENGTH, STYLE]) == (6.5, None)
    (path, key, first), (_, _, second) = endpoint.asked
    assert (path, key, first["model"], first["temperature"]) == ("/v1/chat/completions", "Bearer secret", "a-judge", 0)
    prompt = first["messages"][0]["content"]
    for part in ("Write {a} line.", "A line.", "length\nhow long it is", "1-2: none\n9-10: just right"):
        assert part in prompt
    assert "style\nhow it reads" in second["messages"][0]["content"]


def test_a_busy_judge_is_asked_again(endpoint: Endpoint) -> None:
    endpoint.answers += [(503, ""), (429, "")]
    endpoint.says('{"score": 10}')
    assert endpoint.judge.score("a", "b", [STYLE]) == (10.0, None)


@pytest.mark.parametrize(
    ("code", "text", "tries", "reason"),
    [
        (401, "", 1, "style: the judge answered with HTTP 401"),
        (500, "", 3, "style: the judge answered with HTTP 500"),
        (200, "no json", 3, "style: the judge cannot be asked"),
        (200, "{}", 3, "style: the judge's answer has no choices"),
        (200, '{"choices": [{"message": {"content": "A good text."}}]}', 3, "style: the judge gave no score from 1 to 10: 'A good text.'"),
        (200, '{"choices": [{"message": {"content": "{\\"score\\": 11}"}}]}', 3, "style: the judge gave no score from 1 to 10"),
        (200, '{"choices": [{"message": {"content": "{\\"score\\": 7.5}"}}]}', 3, "style: the judge gave no score from 1 to 10"),
    ],
)
def test_no_score_has_a_reason(endpoint: Endpoint, code: int, text: str, tries: int, reason: str) -> None:
    """The first criterion was scored: a mean of it alone would be another figure."""
    endpoint.says('{"score": 3}')
    endpoint.answers += [(code, text)] * 3
    score, why = endpoint.judge.score("a", "b", [LENGTH, STYLE])
    assert score is None and why is not None and why.startswith(reason)
    assert len(endpoint.asked) == 1 + tries


def test_nobody_listens() -> None:
    score, why = Judge("http://127.0.0.1:9", "m", pause=0).score("a", "b", [STYLE])
    assert score is None and why is not None and "Connection refused" in why


def test_nothing_to_judge(endpoint: Endpoint) -> None:
    assert endpoint.judge.score("a", " ", [STYLE]) == (None, "the reply is empty")
    assert endpoint.judge.score("a", "b", []) == (None, "the request has no criteria")
    assert endpoint.asked == []


@pytest.mark.parametrize(
    ("url", "model", "message"),
    [
        ("localhost:8000", "m", "give an address such as"),
        ("file:///etc/passwd", "m", "give an address such as"),
        ("http://me:secret@host/v1", "m", "put the key into"),
        ("http://host/v1", " ", "--judge-model is empty"),
    ],
)
def test_bad_addresses(url: str, model: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Judge(url, model)
    assert "secret" not in str(caught.value)
