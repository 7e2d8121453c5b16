from typing import Any

import torch

from sdbench.calibrate import stages
from sdbench.calibrate.stages import Stages


def test_only_what_it_takes_to_make_an_item_counts(monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(stages, "clock", lambda device: now[0])
    found = Stages(torch.device("cpu"))

    def items() -> Any:
        for number in range(3):
            now[0] += 1
            yield number
        now[0] += 0.5

    seen = []
    for item in found.timed("making", items()):
        with found("using"):
            now[0] += 10
        now[0] += 100
        seen.append(item)
    assert seen == [0, 1, 2]
    assert found.seconds == {"making": 3.5, "using": 30.0}
