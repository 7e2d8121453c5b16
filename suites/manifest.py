"""The manifest that pins both parts of a split."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from sdbench.errors import SdbenchError
from sdbench.results import strict_json, write_atomic

NORMALISATION: Literal["nfkc-casefold-whitespace"] = "nfkc-casefold-whitespace"
"""Name of what ``normalise_question`` does, recorded in the manifest."""


class Part(BaseModel):
    """One file of a split: its name, the SHA-256 of its bytes, and how many examples it holds."""

    file: str
    sha256: str
    examples: int


class Source(BaseModel):
    """The file that was split."""

    file: str
    sha256: str


class Parts(BaseModel):
    """The two parts of a split."""

    train: Part
    validation: Part


class Manifest(BaseModel):
    """What a split is: where it came from, the exact bytes of both parts, and that they share no question."""

    schema_: Literal["sdbench.split/1"] = Field(alias="schema")
    revision: str = Field(min_length=1)
    source: Source | None
    seed: int | None
    normalisation: Literal["nfkc-casefold-whitespace"]
    dropped_duplicates: int
    dropped_contradictions: int | None = None  # of the duplicates; None where nothing was split, or by an older sdbench
    shared_questions: Literal[0]
    parts: Parts

    def write(self, path: Path | str) -> None:
        """Writes the manifest as JSON.

        Raises:
            SdbenchError: The file cannot be written.
        """
        write_file(Path(path), strict_json(self, indent=2) + "\n")


def write_file(path: Path, text: str) -> None:
    """Writes a file as a whole, and the folders that it lacks.

    Raises:
        SdbenchError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise SdbenchError(f"cannot write {path}: {error.strerror}") from error
