"""Writing a checkpoint: what takes long is within the steps that progress counts."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from sdbench.checkpoints import write as write_file
from sdbench.checkpoints.provenance import file_sha256


def test_weight_files_are_hashed_as_they_are_written(write: Any, tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at the end, those of a large model would take a minute after the last step."""
    events: list[str] = []

    def hashed(path: Path) -> str:
        events.append("hash" if path.suffix == ".safetensors" else "other")
        return file_sha256(path)

    monkeypatch.setattr(write_file, "file_sha256", hashed)
    written = write(tiny_llama, shard_bytes=60_000, on_tensor=lambda: events.append("step"))
    files = sorted(path.name for path in written.folder.glob("*.safetensors"))
    assert len(files) > 2 and events.count("hash") == len(files)
    steps = [number for number, event in enumerate(events) if event == "step"]
    # The last file is full when there is no further tensor.
    assert events[steps[-1] :].count("hash") == 1
    assert list(written.provenance.files) == sorted(path.name for path in written.folder.iterdir() if path.name != "sdbench.json")
    assert all(written.provenance.files[name] == file_sha256(written.folder / name) for name in written.provenance.files)
