"""An end-to-end run that is over in seconds, for tests to change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sdbench.models import resolve_model
from sdbench.pattern import Pattern
from sdbench.suites.e2e.options import E2EOptions

CPU = torch.device("cpu")


def small_run(model: Path | str, **changes: Any) -> E2EOptions:
    """Options of a run of a few examples and tokens on a CPU.

    Args:
        model: As ``--model`` takes it.
        changes: Attributes of the options that are different.
    """
    standard = E2EOptions(
        spec=resolve_model(str(model), None, CPU),
        device=CPU,
        dtype=torch.float32,
        pattern=Pattern(2, 4),
        method="wanda",
        calib=("decode",),
        prefill="pruned",
        train=None,
        validation=None,
        split_manifest=None,
        dataset_revision=None,
        calibration_examples=2,
        validation_examples=3,
        max_tokens=8,
        equal_tokens=12,
        warmup_tokens=2,
        rate_repeats=1,
        prompt_tokens=16,
        batch_size=2,
        targets=(),
        ignore=(),
        seed=0,
    )
    return replace(standard, **changes)
