import pytest
import torch

from sdbench import memory
from sdbench.memory import peak_memory, resident_bytes

CPU = torch.device("cpu")
MIB = 1 << 20


def needs_reset():
    reason = memory._reset_peak_resident()
    if reason:
        pytest.skip(reason)


def test_peak_is_of_its_own_region():
    needs_reset()
    before = resident_bytes(CPU)
    with peak_memory(CPU) as large:
        del_me = torch.ones(64 * MIB // 4)
        del del_me
    with peak_memory(CPU) as small:
        torch.ones(10)
    assert large.reason is None and small.reason is None
    assert 60 * MIB < large.bytes - before < 96 * MIB
    assert large.bytes - small.bytes > 40 * MIB


def test_no_figure_without_permission(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
    with peak_memory(CPU) as peak:
        assert peak.reason == "the region has not ended"
    assert peak.bytes is None
    assert "does not let a process reset its peak" in peak.reason


def test_a_reset_without_effect_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "clear_refs")
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmHWM:\t  500000 kB\nVmRSS:\t  100000 kB\n")
    monkeypatch.setattr(memory, "_STATUS", status)
    with peak_memory(CPU) as peak:
        pass
    assert (peak.bytes, peak.reason) == (None, "this system kept an earlier peak 409600000 bytes above the present size")
    status.write_text("VmHWM:\t  101000 kB\nVmRSS:\t  100000 kB\n")
    with peak_memory(CPU) as peak:
        pass
    assert (peak.bytes, peak.reason) == (101000 * 1024, None)


def test_a_status_without_the_fields_gives_no_figure(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "clear_refs")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("Name:\tx\n")
    with peak_memory(CPU) as peak:
        pass
    assert peak.bytes is None and "no VmHWM" in peak.reason


@pytest.mark.gpu
def test_cuda_peak_and_resident():
    device = torch.device("cuda", 0)
    before = resident_bytes(device)
    with peak_memory(device) as peak:
        x = torch.ones(16 * MIB, dtype=torch.uint8, device=device)
        del x
    assert peak.bytes - before == 16 * MIB
    assert resident_bytes(device) == before
