"""Trials and results as the rows of a run directory, and back."""

from collections.abc import Sequence
from typing import Any

from sdbench.kernels import tuned
from sdbench.kernels.registry import Config
from sdbench.results import RunDirectory
from sdbench.suites.kernels.operands import Shape
from sdbench.suites.kernels.runner import Case
from sdbench.suites.kernels.search import Trial, identity
from sdbench.timing import Times

_TELLING = ("correct", "incorrect", "crash", "timeout", "compile_error", "out_of_resources", "constraint")


class TrialLog:
    """The trials of a run directory: each is written as it finishes, and found again by a resumed run.

    Args:
        directory: The run directory; None to keep nothing.
    """

    def __init__(self, directory: RunDirectory | None):
        self._directory = directory
        self._known: dict[str, dict[tuple[object, int], Trial]] = {}
        for row in directory.rows if directory else ():
            if row["record"] == "trial" and row.get("key"):
                times = Times(**row["us"]) if row["us"] else None
                trial = Trial(row["config"], row["outcome"], row["error"], times, row["message"])
                self._known.setdefault(row["key"], {})[identity(trial.config), row["replays"]] = trial

    def holds(self, key: tuned.Key) -> bool:
        """Whether an earlier attempt tried any config for this key."""
        return key.digest in self._known

    def find(self, key: tuned.Key, config: Config, replays: int) -> Trial | None:
        """An earlier attempt's trial."""
        return self._known.get(key.digest, {}).get((identity(config), replays))

    def add(self, case: Case, replays: int, trial: Trial, key: tuned.Key | None = None) -> None:
        """Writes a trial; the key says what it can be used for again, and without one it cannot."""
        if self._directory:
            kept = {"replays": replays, "key": key.digest if key else None}
            self._directory.add_row({"record": "trial", **trial_row(case, trial), **kept})


def trial_row(case: Case, trial: Trial) -> dict[str, Any]:
    """A trial in the form of the schema."""
    return {
        "kernel": case.kernel,
        "variant": case.variant,
        "pattern": str(case.pattern) if case.pattern else None,
        "shape": list(case.shape),
        "dtype": tuned.DTYPE_NAMES[case.dtype],
        "tokens": case.tokens,
        "config": dict(trial.config),
        "outcome": trial.outcome,
        "error": trial.error,
        "us": trial.times.as_dict() if trial.times else None,
        "message": trial.message,
    }


def result_row(case: Case, layer: str, of_shape: Shape, best: Trial, trials: Sequence[Trial]) -> dict[str, Any]:
    """A variant's result on one shape.

    Args:
        case: What ran.
        layer: Name of the shape.
        of_shape: The model's own shape, where a smaller one ran.
        best: The trial whose figures stand in the row.
        trials: One a config that was tried.
    """
    nbytes = None if best.nbytes is None else best.nbytes + case.tokens * case.shape[1] * case.dtype.itemsize
    gbps = nbytes / best.times.p50 / 1e3 if nbytes and best.times else None
    timeable = best.outcome == "constraint" or case.device.type == "cuda"
    interpreted = "no GPU: checked in the interpreter" + ("" if case.shape == of_shape else " on a reduced shape")
    reason = best.message or "not timed" if timeable else interpreted
    return trial_row(case, best) | {
        "layer": layer,
        "of_shape": list(of_shape),
        "us_reason": None if best.times else reason,
        "bytes": nbytes,
        "gbps": gbps,
        "roofline": gbps * 1e9 / best.bandwidth if gbps and best.bandwidth else None,
        "configs": len(trials),
        "outcomes": count(trials),
    }


def count(trials: Sequence[Trial]) -> dict[str, int]:
    """Configs by outcome."""
    outcomes: dict[str, int] = {}
    for trial in trials:
        outcomes[trial.outcome] = outcomes.get(trial.outcome, 0) + 1
    return outcomes


def most_telling(trials: Sequence[Trial]) -> Trial:
    """Where no config won, the trial that says most about why."""
    return min(trials, key=lambda trial: _TELLING.index(trial.outcome))
