"""Which commit runs: of a checkout, of what pip installed, or none and why."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdbench import environment, versions
from sdbench.results import RunDirectory
from sdbench.versions import NO_COMMIT, git_state

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GIT = {"url": "https://example.org/sdbench.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT, "requested_revision": "main"}}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A copy outside any repository, and a function that writes what pip recorded of it."""
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "site-packages/sdbench/versions.py"))

    def record(text: str | None) -> None:
        monkeypatch.setattr(versions, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))

    return record


def test_a_copy_that_pip_installed_from_a_repository(installed: Any) -> None:
    installed(json.dumps(GIT))
    assert git_state() == {"commit": COMMIT, "dirty": False}
    assert environment.describe()["git_reason"] is None


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", json.dumps({"url": "file:///x", "dir_info": {}}), '{"vcs_info": {"vcs": "git"}}'])
def test_one_of_which_nothing_is_known(text: str | None, installed: Any, tmp_path: Path) -> None:
    installed(text)
    assert git_state() is None
    facts = environment.describe()
    assert (facts["git"], facts["git_reason"]) == (None, NO_COMMIT)
    with RunDirectory.open(tmp_path / "run", "e2e", {}, {}):
        pass
    document = json.loads((tmp_path / "run/run.json").read_text())
    assert (document["git"], document["git_reason"]) == (None, NO_COMMIT)
