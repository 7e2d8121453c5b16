"""What code runs: versions of Python and of packages, and the commit of a source checkout."""

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from sdbench import __version__

PACKAGES = ("torch", "triton", "transformers")
"""Distributions whose versions a run records beside Python's."""

NO_COMMIT = "an installed copy, whose installer recorded no commit"
"""Why :func:`git_state` is None, for the field ``git_reason`` beside ``git``."""


def git_state() -> dict[str, Any] | None:
    """Commit of the code that runs and whether it differs: of the source checkout, else the one that pip installed; None without either."""
    return _of_checkout() or _of_installation()


def _of_checkout() -> dict[str, Any] | None:
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        # An installed copy may lie inside someone else's repository, whose commit would say nothing about sdbench.
        git("ls-files", "--error-unmatch", here.name)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _of_installation() -> dict[str, Any] | None:
    """What pip recorded (PEP 610): a commit where it installed from a repository's address, as by ``pip install git+https://...``."""
    try:
        recorded = json.loads(distribution("sdbench").read_text("direct_url.json") or "{}")
        return {"commit": str(recorded["vcs_info"]["commit_id"]), "dirty": False}
    except (PackageNotFoundError, ValueError, KeyError, TypeError):
        return None


def versions() -> dict[str, str | None]:
    """Versions of Python, sdbench and ``PACKAGES``."""
    # The package itself may run from a checkout, where nothing is installed under its name.
    return {"python": platform.python_version(), "sdbench": __version__} | {name: package_version(name) for name in PACKAGES}


def package_version(name: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
