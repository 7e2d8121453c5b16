"""Several prompts at once: what all of them together give, and up to how many pruning pays."""

from collections.abc import Sequence
from typing import Any

from sdbench.engine.paths import MERGED, SHORT
from sdbench.suites.metrics import crossover
from sdbench.suites.runs import Table
from sdbench.tables import Column, spread

Row = dict[str, Any]


def way_of(row: Row) -> str:
    """The short name of a row's way to decode."""
    path = str(row["path"])
    return SHORT.get(path, path)


def batch_of(row: Row) -> int:
    """Prompts at once."""
    return int(row.get("batch", 1))


def batch_table(rows: Sequence[Row]) -> Table:
    """Each arm's ways at each batch, and for each pattern the batch from which it no longer pays.

    Args:
        rows: Judged rows of the suite, of one prompt and of several.
    """
    best: dict[tuple[str, int, int], Row] = {}
    for row in rows:
        key = row["arm"], row["context"], batch_of(row)
        if row["decode_rate"] and (key not in best or row["decode_rate"]["p50"] > best[key]["decode_rate"]["p50"]):
            best[key] = row
    columns = (
        *(Column(name, key=True) for name in ("arm", "context", "batch")),
        Column("way"),
        *(Column(name, figure=True) for name in ("tok/s", "p20-p80", "x dense", "% ceiling")),
    )
    cells = []
    for row in rows:
        arm, context, batch = row["arm"], row["context"], batch_of(row)
        # All ways of one prompt are in the table above.
        if not row["decode_rate"] or (batch == 1 and best[arm, context, batch] is not row):
            continue
        rate, gain = row["decode_rate"], row["speedup"]
        share = row["of_ceiling"]
        figures = [f"{rate['p50']:.1f}", spread(rate), "-" if gain is None else f"{gain:.2f}"]
        cells.append([arm, str(context), str(batch), way_of(row), *figures, "-" if share is None else f"{100 * share:.0f}"])
    note = (
        "tok/s: of all prompts together; x dense: over the fastest dense way that was timed at the same context and batch; int8 weights "
        "are for one prompt; % ceiling: as below, of the rate that the bytes of a step allow"
    )
    lines = [note, *_crossovers(best)]
    ways: tuple[set[str], set[str]] = set(), set()
    for row in rows:
        if row["decode_rate"] and ":" in row["arm"]:
            ways[batch_of(row) > 1].add(way_of(row))
    one, several = ways
    if several - {"fused"}:
        another = "; one prompt has the fused step, so that its line is of another loop" if "fused" in one else ""
        lines.append(f"several pruned prompts by transformers' step ({', '.join(sorted(several - {'fused'}))}): {MERGED}{another}")
    return Table("several prompts at once", columns, cells, lines)


def _crossovers(best: dict[tuple[str, int, int], Row]) -> list[str]:
    lines = []
    for arm, context in dict.fromkeys((arm, context) for arm, context, _ in best if ":" in arm):
        at = sorted((batch, row["speedup"]) for (name, place, batch), row in best.items() if (name, place) == (arm, context))
        gains = [(batch, gain) for batch, gain in at if gain is not None]
        if gains:
            each = ", ".join(f"{gain:.2f}x at {batch}" for batch, gain in gains)
            lines.append(f"{arm} at {context} of context {crossover(gains, 'batch')}: {each}")
    return lines
