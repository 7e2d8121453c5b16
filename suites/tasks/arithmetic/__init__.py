"""Arithmetic word problems with written-out steps: the task of the bundled demo model."""

from pathlib import Path

TRAIN_FILE = Path(__file__).parent / "train.jsonl"
"""400 problems: what calibration draws from."""
VALIDATION_FILE = Path(__file__).parent / "validation.jsonl"
"""200 problems: what a model is judged on."""
MANIFEST_FILE = Path(__file__).parent / "manifest.json"
"""Pins both parts."""
