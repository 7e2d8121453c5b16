"""The bundled demo model: where it lies, and the data it was made for. `train.py` makes it; the model card is `README.md`."""

from pathlib import Path

from sdbench.suites.tasks.arithmetic import TRAIN_FILE, VALIDATION_FILE

DEMO_DIR = Path(__file__).parent
MODEL_DIR = DEMO_DIR / "model"
"""A `transformers` checkpoint folder: config, tokenizer with chat template, generation config, weights."""
TRAINING_LOG = DEMO_DIR / "training_log.jsonl"

__all__ = ["DEMO_DIR", "MODEL_DIR", "TRAINING_LOG", "TRAIN_FILE", "VALIDATION_FILE"]
