"""Models of the Hugging Face hub: downloading one, asking whether there is one, and what is wrong in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from sdbench.errors import SdbenchError, UsageError

TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
ASKING_SECONDS = 10


def download(source: str, revision: str | None, *, weights: bool) -> Path:
    """The folder of a model in the cache, after downloading what it lacks.

    Args:
        source: Hub id.
        revision: Branch, tag or commit.
        weights: With its weights; else its texts alone.

    Raises:
        UsageError: The hub knows no such model or revision.
        SdbenchError: The hub cannot be reached, or keeps the model to itself.
    """
    # Sub-folders and consolidated files repeat the weights in other formats.
    patterns, ignored = [*TEXT_FILES, *(["*.safetensors"] if weights else [])], ["*/*", "consolidated*"]
    with _one_line(source, revision):
        return Path(huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))


@cache
def missing(source: str, revision: str | None) -> SdbenchError | None:
    """Why :func:`download` would not find a model; None where the cache or the hub has it.

    The hub is asked only for what the cache lacks, for a name and revision once in a process; no file is downloaded.
    """
    if isinstance(huggingface_hub.try_to_load_from_cache(source, "config.json", revision=revision), str):
        return None
    try:
        with _one_line(source, revision):
            try:
                huggingface_hub.HfApi().model_info(source, revision=revision, timeout=ASKING_SECONDS)
            except (GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError):
                raise
            except Exception as error:
                raise LocalEntryNotFoundError(str(error)) from error
    except SdbenchError as error:
        return error
    return None


@contextmanager
def _one_line(source: str, revision: str | None) -> Iterator[None]:
    what = f"model {source!r}" + (f" at revision {revision}" if revision else "")
    what += " (did you mean demo?)" if get_close_matches(source, ["demo"]) else ""
    try:
        yield
    except GatedRepoError as error:
        raise SdbenchError(f"{what}: the hub wants you to accept its licence and log in first (hf auth login)") from error
    except RevisionNotFoundError as error:
        raise UsageError(f"{what}: the hub has the model, but not this revision") from error
    except RepositoryNotFoundError as error:
        raise UsageError(f"{what}: no such folder here, and no such (public) model on the hub") from error
    except LocalEntryNotFoundError as error:
        raise SdbenchError(f"{what}: no such folder here, not in the hub cache, and the hub cannot be reached (offline?)") from error
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "no message")
        raise SdbenchError(f"{what}: the download failed: {reason}") from error
