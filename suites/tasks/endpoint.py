"""A judge model behind an OpenAI-compatible endpoint: a reply's score, criterion by criterion."""

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdbench.errors import UsageError

KEY_VARIABLE = "SDBENCH_JUDGE_KEY"
TRIES = 3
BANDS = ("1-2", "3-4", "5-6", "7-8", "9-10")

PROMPT = """You judge a text that was written on request, by one criterion alone.

# Request
{request}

# Text
{reply}

# Criterion: {name}
{description}

What the scores from 1 (worst) to 10 (best) mean:
{bands}

Answer with one JSON object and nothing else: {{"reason": "one sentence", "score": a whole number from 1 to 10}}"""


@dataclass(frozen=True)
class Judge:
    """Who judges.

    Attributes:
        url: The endpoint's base, up to and without ``/chat/completions``.
        model: The model's name there.
        timeout: Seconds that one request may take.
        pause: Seconds before the second try of a request; twice as many before the third.
    """

    url: str
    model: str
    timeout: float = 120.0
    pause: float = 2.0

    def __post_init__(self) -> None:
        if re.match(r"https?://[^/\s]+", self.url) is None:
            raise UsageError(f"--judge-url {self.url!r}: give an address such as http://localhost:8000/v1")
        if "@" in self.url:
            raise UsageError(f"--judge-url holds a user or password; put the key into ${KEY_VARIABLE}")
        if not self.model.strip():
            raise UsageError("--judge-model is empty; name the model that judges")

    def score(self, request: str, reply: str, criteria: Sequence[Mapping[str, str]]) -> tuple[float | None, str | None]:
        """The mean over the criteria of what the judge gives, from 1 to 10.

        Args:
            request: What was asked for.
            reply: What was written.
            criteria: Each with ``name``, ``criteria_description`` and a text for each of ``BANDS``.

        Returns:
            (score, None), or (None, why there is none): a mean over some of the criteria would be another figure.
        """
        if not reply.strip():
            return None, "the reply is empty"
        if not criteria:
            return None, "the request has no criteria"
        scores = []
        for criterion in criteria:
            bands = "\n".join(f"{band}: {criterion[band]}" for band in BANDS if band in criterion)
            description = criterion.get("criteria_description", "")
            name = criterion.get("name", "quality")
            try:
                found = self._ask(PROMPT.format(request=request, reply=reply, name=name, description=description, bands=bands))
            except _Unanswered as error:
                return None, f"{name}: {error}"
            scores.append(found)
        return sum(scores) / len(scores), None

    def _ask(self, prompt: str) -> int:
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        return _retried(lambda: _parse(self._post(body)), self.pause)

    def _post(self, body: Mapping[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        address = f"{self.url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                content = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise _Unanswered(f"the judge answered with HTTP {error.code}", again=error.code == 429 or error.code >= 500) from error
        except (OSError, ValueError) as error:
            raise _Unanswered(f"the judge cannot be asked: {' '.join(str(error).split())[:120]}") from error
        try:
            return str(content["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError) as error:
            raise _Unanswered("the judge's answer has no choices[0].message.content") from error


class _Unanswered(Exception):
    def __init__(self, message: str, again: bool = True):
        super().__init__(message)
        self.again = again


def _retried(ask: Callable[[], int], pause: float) -> int:
    for trial in range(1, TRIES + 1):
        try:
            return ask()
        except _Unanswered as error:
            if trial == TRIES or not error.again:
                raise
            time.sleep(pause * trial)
    raise AssertionError


def _parse(text: str) -> int:
    """The score in the last JSON object of the judge's answer; a reasoning judge's thoughts come before it."""
    found = re.findall(r'"score"\s*:\s*"?(\d+)"?\s*[,}]', text.rpartition("</think>")[2])
    if not found or not 1 <= int(found[-1]) <= 10:
        raise _Unanswered(f"the judge gave no score from 1 to 10: {' '.join(text.split())[:80]!r}")
    return int(found[-1])
