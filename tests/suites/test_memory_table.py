"""The table of the weights' memory: ratios to the dense arm, a dash and a reason for what is missing, readable at 80 columns."""

import io
from typing import Any

from rich.console import Console

from sdbench.suites.memory import beside_dense, memory_table
from sdbench.tables import Column, render_table

ARM = (Column("arm", key=True),)
DENSE = {"weights": 8_044_936_192, "allocated": 8_100_000_000, "process": 8_600_000_000, "gpu": None, "originals": None}
PRUNED = {"weights": 4_870_000_000, "allocated": 4_950_000_000, "process": None, "gpu": None, "originals": "main memory"}


def test_ratios() -> None:
    found = beside_dense(PRUNED | {"process_reason": "no NVML"}, DENSE)
    assert found["weights_ratio"] == 4_870_000_000 / 8_044_936_192 and found["allocated_ratio"] == 4_950 / 8_100
    assert (found["process_ratio"], found["gpu_ratio"], found["process_reason"]) == (None, None, "no NVML")
    assert beside_dense(PRUNED, None)["weights_ratio"] is None


def test_table() -> None:
    rows: list[Any] = [(["dense"], beside_dense(DENSE, DENSE)), (["2:4"], beside_dense(PRUNED | {"process_reason": "no NVML"}, DENSE))]
    table = memory_table(ARM, rows)
    assert table is not None
    assert [column.name for column in table.columns] == ["arm", "weights GB", "x dense", "alloc GB", "x dense", "process GB", "x dense"]
    assert table.cells == [["dense", "8.04", "1.00", "8.10", "1.00", "8.60", "1.00"], ["2:4", "4.87", "0.605", "4.95", "0.611", "-", "-"]]
    assert "2:4: the original weights of pruned linears wait in main memory" in table.lines
    assert table.lines[-1] == "no figure of the process: no NVML"
    told = io.StringIO()
    render_table(table.columns, table.cells, console=Console(file=told, width=80))
    assert told.getvalue().count("2:4") == 1 and max(map(len, told.getvalue().splitlines())) <= 80  # one piece


def test_the_whole_gpu_stands_in_for_the_process_alone() -> None:
    hidden = DENSE | {"process": None, "gpu": 8_700_000_000, "process_reason": "no NVML"}
    for memory, last in ((hidden, "GPU GB"), (DENSE | {"gpu": 8_700_000_000}, "process GB")):
        table = memory_table(ARM, [(["dense"], beside_dense(memory, memory))])
        assert table is not None and table.columns[-2].name == last
        assert (f"{last.split()[0]}: what {'the whole GPU' if memory is hidden else 'this process'} holds") in table.lines[0]


def test_no_table_for_earlier_runs() -> None:
    assert memory_table(ARM, [(["dense"], None), (["2:4"], {"packed": 5, "parameters": 7})]) is None
