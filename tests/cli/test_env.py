import json

import pytest
from click.testing import CliRunner

from sdbench import environment
from sdbench.cli.env import command
from sdbench.environment import describe


@pytest.fixture(autouse=True)
def git(monkeypatch):
    """A checkout that nobody edits meanwhile."""
    monkeypatch.setattr(environment, "git_state", lambda: {"commit": "0123abc", "dirty": False})


def test_json_is_one_document():
    result = CliRunner().invoke(command, ["--json"])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document.pop("schema") == "sdbench.env/1"
    assert document == json.loads(json.dumps(describe()))


def test_table_shows_every_fact():
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 0
    facts = describe()
    for value in (facts["sdbench"], facts["torch"], facts["transformers"], facts["cpu"]["model"]):
        assert str(value) in result.stdout
    assert "cpu.count" in result.stdout
