"""Memory of the weights beside that of the dense model, as figures and as a table. Nothing here needs torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.suites.runs import Table
from sdbench.tables import Column

Row = dict[str, Any]

FIGURES = {"weights": "weights GB", "allocated": "alloc GB", "process": "process GB", "gpu": "GPU GB"}
"""Figures of memory that are compared with the dense model's, and their columns."""

KEPT = {
    "in use": "a dense prefill reads the original weights of pruned linears, which count",
    "kept": "the original weights of pruned or rounded linears stay, to be put back; weights GB leaves them out, peak GB does not",
    "main memory": "the original weights of pruned linears wait in main memory",
}


def beside_dense(memory: Row, dense: Mapping[str, Any] | None) -> Row:
    """The same with ``..._ratio`` of each figure over the dense model's; None where either is missing."""
    ratios = {}
    for name in FIGURES:
        mine, theirs = memory.get(name), (dense or {}).get(name)
        ratios[f"{name}_ratio"] = mine / theirs if mine is not None and theirs else None
    return memory | ratios


def memory_table(names: Sequence[Column], rows: Sequence[tuple[Sequence[str], Mapping[str, Any] | None]]) -> Table | None:
    """A row an arm; None where no memory was measured so.

    Args:
        names: Columns that tell rows apart.
        rows: Their cells, and the row's memory.
    """
    known = [(cells, memory) for cells, memory in rows if memory and memory.get("weights")]
    if not known:
        return None
    shown = [name for name in FIGURES if any(memory.get(name) is not None for _, memory in known)]
    if "process" in shown and all(memory.get("process") is not None for _, memory in known):
        # The whole GPU's account stands in for the process's where that one cannot be had.
        shown.remove("gpu")
    columns = [*names, *(Column(text, figure=True) for name in shown for text in (FIGURES[name], "x dense"))]
    cells = [[*key, *(cell for name in shown for cell in (_figure(memory.get(name), 1e-9), _figure(memory.get(f"{name}_ratio"))))]
             for key, memory in known]  # fmt: skip
    lines = ["weights: parameters and packed weights, each memory once; x dense: over the dense arm's"]
    if "allocated" in shown:
        accounts = {"allocated": "torch's allocator", "process": "this process", "gpu": "the whole GPU"}
        held = ", ".join(f"{FIGURES[name].split()[0]}: what {accounts[name]} holds" for name in shown if name in accounts)
        lines[0] += f"; {held} more than before the model was loaded, without the fused step's keys and values"
    for where, text in KEPT.items():
        arms = dict.fromkeys(key[0] for key, memory in known if memory.get("originals") == where)
        lines += [f"{', '.join(arms)}: {text}"] if arms else []
    reasons = dict.fromkeys(memory[key] for _, memory in known for key in ("allocated_reason", "process_reason") if memory.get(key))
    return Table("memory of the weights", columns, cells, [*lines, *(f"no figure of the process: {reason}" for reason in reasons)])


def _figure(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:#.3g}"
