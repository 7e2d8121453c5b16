"""What the check of a grid asks of the hub: nothing where the cache has the model, else one question, and no file."""

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors

from sdbench import hub
from sdbench.errors import ExitCode, SdbenchError
from sdbench.models import require_model, resolve_model

COMMIT = "c" * 40


def require(text, revision=None):
    require_model(resolve_model(text, revision, torch.device("cpu")))


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """An empty cache, and a hub that is asked nothing but for models, of which it has none (``answer`` is raised); what it was asked."""

    def model_info(self, repo_id, *, revision=None, **options):
        asked.append((repo_id, revision))
        if asked.answer:
            raise asked.answer.__new__(asked.answer, "first line")  # the hub's own want a response object

    def download(*arguments, **options):
        raise AssertionError("a check downloads nothing")

    class Asked(list):
        answer = None

    asked = Asked()
    hub.missing.cache_clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    yield asked
    hub.missing.cache_clear()


@pytest.mark.parametrize("text", ["demo", "random:qwen3-0.6b", "folder", "random:folder"])
def test_what_is_here_is_not_asked_for(text, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text("{}")
    require(text)
    assert asked == []


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_what_the_cache_has_is_not_asked_for(revision, asked, tmp_path):
    cached = tmp_path / "models--someone--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(COMMIT)
    (cached / "snapshots" / COMMIT).mkdir(parents=True)
    (cached / "snapshots" / COMMIT / "config.json").write_text("{}")
    require("someone/tiny", revision)
    assert asked == []


def test_what_the_hub_has_is_asked_for_once(asked):
    for name in ("a/b", "a/b", "random:a/b"):
        require(name, "v1")
    require("a/b")
    assert asked == [("a/b", "v1"), ("a/b", None)]


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        (hub_errors.RepositoryNotFoundError, ExitCode.USAGE, "no such folder here, and no such (public) model on the hub"),
        (hub_errors.RevisionNotFoundError, ExitCode.USAGE, "the hub has the model, but not this revision"),
        (ConnectionError, ExitCode.ERROR, "no such folder here, not in the hub cache, and the hub cannot be reached (offline?)"),
    ],
)
def test_a_missing_model_is_told_as_loading_it_would(kind, code, message, asked):
    asked.answer = kind
    for _ in range(2):
        with pytest.raises(SdbenchError) as error:
            require("a/b", "v1")
        assert (str(error.value), error.value.exit_code) == (f"model 'a/b' at revision v1: {message}", code)
    assert len(asked) == 1
