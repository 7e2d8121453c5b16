"""Rows as data frames and CSV, and back, with every cell as it was."""

import csv
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.results import strict_json

if TYPE_CHECKING:
    import pandas as pd


def rows_to_frame(rows: Iterable[Mapping[str, Any]]) -> "pd.DataFrame":
    """Rows as a data frame of Python objects: no guessing of types, so id ``"007"`` and answer ``"NA"`` stay texts."""
    import pandas as pd  # half a second that reading and writing JSON does not need

    frame = pd.DataFrame(list(rows), dtype=object)
    return frame.where(frame.notna(), None)


def csv_text(frame: "pd.DataFrame") -> str:
    """A frame as CSV: texts quoted, lists and dicts as JSON, None empty."""
    import pandas as pd

    cells = [[strict_json(cell) if isinstance(cell, list | dict) else cell for cell in row] for row in frame.itertuples(index=False)]
    # Without dtype=object pandas would turn the integers of a column with a gap into floats.
    texts = pd.DataFrame(cells, columns=frame.columns, dtype=object)
    return texts.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")


def read_csv(path: Path | str) -> "pd.DataFrame":
    """Reads a CSV file with every cell as the text that stands there: ``007``, ``None`` and ``NA`` unchanged, a missing one empty."""
    import pandas as pd

    # Not pandas' own parser: before version 3 it ended a text at a NUL byte.
    csv.field_size_limit(sys.maxsize)  # the default, 128 KiB, is less than the ids of a long reply
    with Path(path).open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        return pd.DataFrame(list(reader), columns=list(reader.fieldnames or ()), dtype=object)
