"""A text corpus as calibration windows: the fixed-text control (C4 and its like), or the answers of another model."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.errors import SdbenchError, UsageError, cannot_read
from sdbench.suites.data import refuse_test_name
from sdbench.words import counted

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
FORMAT = 'each line is a JSON object with a "text"'


def read_corpus(path: Path, seed: int) -> list[str]:
    """The documents of a corpus in a seeded order.

    JSON lines are documents, shuffled. Plain text is one document, which starts at a line drawn by the seed and goes round to it.

    Args:
        path: Plain text, or JSON lines by the suffix ``.jsonl`` (``.ndjson``, ``.json``).
        seed: Seed of the order.

    Raises:
        SdbenchError: The file cannot be read, is no UTF-8, is empty, or a line has no text (file and line named).
        UsageError: It is not there, or its name says test split.
    """
    refuse_test_name(path)
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise cannot_read(path, error) from error
    except UnicodeDecodeError as error:
        raise SdbenchError(f"{path} is not UTF-8 text (byte {error.start}); convert it") from error
    generator = random.Random(seed)
    if path.suffix.lower() in JSON_SUFFIXES:
        lines = content.split("\n")
        documents = [_document(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
        generator.shuffle(documents)
    else:
        lines = content.splitlines(keepends=True)
        start = generator.randrange(len(lines)) if lines else 0
        documents = ["".join(lines[start:] + lines[:start])]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise SdbenchError(f"{path} holds no text")
    return documents


def windows(documents: Sequence[str], tokenizer: Any, count: int, length: int) -> list[tuple[int, ...]]:
    """Cuts the tokenised documents, joined by EOS, into windows; stops at the last one needed.

    Args:
        documents: Texts in order.
        tokenizer: The model's.
        count: Windows to cut.
        length: Tokens of each.

    Raises:
        UsageError: The documents hold fewer windows.
    """
    ids: list[int] = []
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for document in documents:
        if ids:
            ids += separator
        ids += tokenizer(document, add_special_tokens=False, verbose=False).input_ids
        if len(ids) >= count * length:
            break
    else:
        raise UsageError(
            f"the calibration text holds {counted(len(ids) // length, 'window')} of {counted(length, 'token')}, fewer than "
            f"{counted(count, 'calibration example')}; "
            "use a longer text, a shorter --text-window or fewer examples"
        )
    return [tuple(ids[start : start + length]) for start in range(0, count * length, length)]


def _document(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise SdbenchError(f"{where}: not JSON ({error}); {FORMAT}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise SdbenchError(f"{where}: no text; {FORMAT}")
    return text
