import pytest
import torch

from sdbench.engine.phase import Phase, current_phase, phase


def test_outside_any_phase_there_is_none():
    assert current_phase() is None


def test_phase_is_visible_inside_and_gone_after():
    rows = torch.tensor([[True, False]])
    with phase("prefill", rows) as opened:
        assert current_phase() is opened
        assert opened == Phase("prefill", rows)
    with phase("decode"):
        assert current_phase() == Phase("decode", None)
    assert current_phase() is None


def test_nested_phases_are_refused_and_the_outer_one_survives():
    with phase("prefill"):
        with pytest.raises(RuntimeError, match="a decode phase inside a prefill phase"), phase("decode"):
            pass
        assert current_phase() == Phase("prefill")
    assert current_phase() is None


def test_an_exception_closes_the_phase():
    with pytest.raises(KeyError), phase("decode"):
        raise KeyError
    assert current_phase() is None
