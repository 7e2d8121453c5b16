"""Whether there is room, before anything is written."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdbench.checkpoints import write
from sdbench.errors import SdbenchError

FREE = 1_000_000


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=write.SLACK_BYTES + FREE))


def test_what_lies_on_one_disk_is_added_up(tmp_path: Path) -> None:
    write.require_disk({tmp_path / "out": FREE // 2, tmp_path / "work": FREE // 2})
    with pytest.raises(SdbenchError, match=r"not enough disk for \S+/out: 0.07 GB are needed"):
        write.require_disk({tmp_path / "out": FREE // 2, tmp_path / "work": FREE // 2 + 1})


def test_each_disk_is_asked_for_what_it_will_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "mounted" / "work"
    work.mkdir(parents=True)
    stat = Path.stat

    def mounted(path: Path, **options: bool) -> object:
        found = stat(path, **options)
        return SimpleNamespace(st_dev=-1, st_mode=found.st_mode) if path == work else found

    monkeypatch.setattr(Path, "stat", mounted)
    write.require_disk({tmp_path / "out": FREE, work: FREE})
    with pytest.raises(SdbenchError, match=r"not enough disk for \S+/work"):
        write.require_disk({tmp_path / "out": FREE, work: FREE + 1})


def test_what_a_killed_run_left_is_gone_before_room_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / ".out.draft").mkdir()
    (tmp_path / ".out.draft" / "part-00001.safetensors").write_bytes(b"half")
    with write.draft_of(tmp_path / "out") as draft:
        assert draft == tmp_path / ".out.draft" == write.clear_draft(tmp_path / "out") and not draft.exists()
        draft.mkdir()
    assert not list((tmp_path / "out").iterdir())
