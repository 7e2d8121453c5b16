"""CASES 20: comparing lines that hold anything."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdbench.errors import SdbenchError
from sdbench.results import strict_json
from sdbench.suites.compare import COLUMNS, compare
from sdbench.suites.runs import SavedRun
from sdbench.tables import to_markdown

from .made_runs import answers, arm, fidelity, product, saved

ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["p20", "p50", "p80", "x"]), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def spoilt(draw: st.DrawFn, whole: dict[str, Any]) -> dict[str, Any]:
    """A line with some of its fields gone, or holding anything that JSON can."""
    line = dict(whole)
    for name in draw(st.lists(st.sampled_from([name for name in whole if name != "record"]), max_size=4)):
        if draw(st.booleans()):
            line.pop(name, None)
        else:
            line[name] = draw(ANY)
    return line


GOOD = {
    "kernels": [product((9.0, 10.0, 11.0)), product(8.0, variant="linear")],
    "e2e": [arm("decode", (9.0, 10.0, 11.0), answer_match=1, eos=0), *fidelity("decode", 1.0, 2.0)],
}


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(sorted(GOOD)))
def test_cases_20_no_line_however_damaged_is_a_crash(data: st.DataObject, command: str) -> None:
    def drawn() -> SavedRun:
        rows = [data.draw(spoilt(one)) for one in GOOD[command]]
        samples = [data.draw(spoilt(one | {"attempt": 1})) for one in answers("decode", "10")] if command == "e2e" else []
        return saved("run", command, rows, samples)

    try:
        found = compare(drawn(), drawn(), 0.05)
    except SdbenchError as error:
        assert "nothing to compare" in str(error)
        return
    strict_json(found.document())
    to_markdown(COLUMNS, found.cells())
    assert all(isinstance(line, str) for line in [*found.lines(), *(one.label for one in found.findings)])
