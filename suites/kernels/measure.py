"""Gives each variant of a shape its config, then measures all of them one after the other in one process, and writes their rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import torch

from sdbench.errors import SdbenchError, UsageError
from sdbench.kernels import tuned
from sdbench.kernels.launching import can_run
from sdbench.kernels.registry import Config, Variant
from sdbench.pattern import Pattern
from sdbench.progress import Progress, Task
from sdbench.results import RunDirectory
from sdbench.suites.kernels.operands import Shape, reduced
from sdbench.suites.kernels.rows import TrialLog, count, most_telling, result_row
from sdbench.suites.kernels.runner import Case, Local, Runner
from sdbench.suites.kernels.search import LONG, SHORT, Trial, search, subset
from sdbench.suites.kernels.worker import Worker
from sdbench.suites.runs import require_same_gpu

Effort = Literal["none", "quick", "full"]
"""How much of a variant's space is searched: its default alone, about a dozen configs, all of it."""

EFFORTS: tuple[Effort, ...] = ("none", "quick", "full")

Product = tuple[Variant, str, Pattern | None, int]
"""A variant, the layer whose shape it multiplies, the pattern of the weight, and the rows of x."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """What to check, search and time.

    Attributes:
        patterns: Patterns of the pruned weights.
        shapes: Layer name -> (out_features, in_features).
        dtype: Dtype of the weights.
        device: Where to run; a CPU checks the defaults in the interpreter, large shapes reduced, without timings.
        variants: Names of variants; empty for all.
        seed: Seed of weights and inputs.
        effort: How much is searched where the user's cache holds no choice.
        timeout: Seconds that a compiled config may take.
        use_cache: Use the user's cache of tuned configs, and add to it.
        batches: Rows of x, each a table of its own; 1 is a decode step.

    Raises:
        UsageError: A width that a pattern does not divide, or a batch out of range.
    """

    patterns: Sequence[Pattern]
    shapes: Mapping[str, Shape]
    dtype: torch.dtype
    device: torch.device
    variants: Sequence[str]
    seed: int
    effort: Effort = "quick"
    timeout: float = 30.0
    use_cache: bool = True
    batches: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        for batch in self.batches:
            if batch < 1:
                raise UsageError(f"--batch is {batch}; it must be at least 1")
        for name, shape in self.shapes.items():
            for pattern in self.patterns:
                pattern.require_width(shape[1], name)

    def arguments(self, shapes: str) -> dict[str, Any]:
        """Every option that changes a result, for the run directory.

        Args:
            shapes: The text of ``--shapes``.
        """
        return {
            "pattern": [str(pattern) for pattern in self.patterns],
            "shapes": shapes,
            "dtype": tuned.DTYPE_NAMES[self.dtype],
            "variant": list(self.variants),
            "effort": self.effort,
            "timeout": self.timeout,
            "seed": self.seed,
            "device": self.device.type,
            "batch": list(self.batches),
        }

    def case(self, product: Product) -> Case:
        """What runs for a product: on a CPU a smaller shape where it is large."""
        variant, layer, pattern, tokens = product
        shape = self.shapes[layer] if self.device.type == "cuda" else reduced(self.shapes[layer], pattern)
        return Case.of(variant, shape, self.dtype, pattern, self.device, self.seed, tokens)

    def runner(self) -> Runner:
        """A process of its own for a GPU, this one for a CPU."""
        return Worker(self.timeout) if self.device.type == "cuda" else Local()


@dataclass(frozen=True)
class Found:
    """The config of a case.

    Attributes:
        config: Launch parameters; None where no config is right.
        source: "cache", "search" or "default".
        trials: The search's, one a config.
        compile_seconds: What the search spent compiling.
    """

    config: Config | None
    source: Literal["cache", "search", "default"]
    trials: Sequence[Trial] = ()
    compile_seconds: float = 0.0


def measure(
    products: Sequence[Product], options: Measurement, directory: RunDirectory | None, progress: Progress, runner: Runner | None = None
) -> list[Row]:
    """Measures every product; the timings of one shape come from one process, one after the other.

    A resumed run keeps the shapes whose rows are complete and the trials of the others. The rows of a shape are written together, so that
    a kill leaves all of them or none; should a failing disk leave some, all are written again, and the later ones hold.

    Args:
        products: What to multiply by what.
        options: How.
        directory: Where trials go as they finish and results a shape at a time; None to keep them in memory alone.
        progress: Where to report.
        runner: What runs the configs; None for what suits the device.

    Returns:
        A result row a product, in their order.

    Raises:
        SdbenchError: The directory holds rows of another GPU.
    """
    if directory and options.device.type == "cuda":
        require_same_gpu(directory)
    done = {_key(row): row for row in (directory.rows if directory else []) if row["record"] == "result"}
    with runner or options.runner() as runner, progress.task("kernels", len(products)) as task:
        tuner = _Tuner(options, runner, TrialLog(directory), progress)
        for layer in options.shapes:
            ours = [product for product in products if product[1] == layer]
            if all(_product_key(product) in done for product in ours):
                task.advance(len(ours))
                continue
            rows = tuner.rows(ours, task)
            if directory:
                directory.add_rows([{"record": "result", **row} for row in rows])
            done |= {_key(row): row for row in rows}
    found = [done[_product_key(product)] for product in products]
    return [{name: value for name, value in row.items() if name not in ("record", "attempt")} for row in found]


def choice_of(key: tuned.Key, config: Config, us: dict[str, float], effort: Effort, outcomes: dict[str, int]) -> tuned.Choice:
    """A search's result as the cache holds it."""
    assert effort != "none"
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return tuned.Choice(schema=tuned.CHOICE_SCHEMA, key=key, config=dict(config), us=us, effort=effort, outcomes=outcomes, created=created)


def _key(row: Row) -> tuple[Any, ...]:
    return row["kernel"], row["variant"], row["pattern"], row["layer"], row.get("tokens", 1)


def _product_key(product: Product) -> tuple[Any, ...]:
    variant, layer, pattern, tokens = product
    return variant.kernel, variant.name, str(pattern) if pattern else None, layer, tokens


class _Tuner:
    """Chooses configs and measures them."""

    def __init__(self, options: Measurement, runner: Runner, log: TrialLog, progress: Progress):
        self._options = options
        self._runner = runner
        self._log = log
        self._progress = progress
        self._noted: set[str] = set()

    def rows(self, products: Sequence[Product], task: Task) -> list[Row]:
        """Result rows of one shape."""
        options = self._options
        cases = [options.case(product) for product in products]
        refusals = [can_run(v.needs, options.device) or v.constraint(c.problem) for (v, *_), c in zip(products, cases, strict=True)]
        found = [None if refusal else self._choose(case) for case, refusal in zip(cases, refusals, strict=True)]
        rows = []
        for (_, layer, *_), case, refusal, chosen in zip(products, cases, refusals, found, strict=True):
            if chosen is None:
                chosen, trial = Found(None, "default"), Trial({}, "constraint", message=refusal)
            else:
                chosen, trial = self._measure(case, chosen)
            row = result_row(case, layer, options.shapes[layer], trial, chosen.trials or [trial])
            rows.append(row | {"config_source": chosen.source, "compile_seconds": round(chosen.compile_seconds, 3)})
            task.advance()
        return rows

    def _measure(self, case: Case, found: Found) -> tuple[Found, Trial]:
        """The figure to publish; a cached choice that is wrong now is replaced by a new search."""
        if found.config is None:
            return found, most_telling(found.trials)
        (trial,) = self._runner.run(case, [found.config], LONG, roofline=True)
        self._log.add(case, LONG if self._runner.timed else 0, trial)
        if found.source == "cache" and trial.outcome != "correct":
            self._note(
                f"{_label(case)}: the tuned config in the cache is no longer right ({trial.outcome}: {trial.message}); searching again"
            )
            return self._measure(case, self._choose(case, use_cache=False))
        return found, trial

    def _choose(self, case: Case, use_cache: bool = True) -> Found:
        options, variant, problem = self._options, case.find(), case.problem
        default = variant.default(problem)
        if not self._runner.timed or options.effort == "none":
            return Found(default, "default")
        key = tuned.key_of(variant, problem, case.device)
        cached = self._cached(key) if options.use_cache else None
        # A search that was interrupted is finished first, so that its row counts all of its configs.
        if cached and use_cache and EFFORTS.index(cached.effort) >= EFFORTS.index(options.effort) and not self._log.holds(key):
            return Found(cached.config, "cache")
        known = [choice.config for choice in (cached, tuned.find_shipped(key)) if choice]
        space = variant.space(problem)
        configs = subset(space, [*known, default], *([len(space) + 3] if options.effort == "full" else []))
        if len(configs) == 1:
            return Found(configs[0], "default")
        before = self._runner.compile_seconds
        with self._progress.task(_label(case), len(configs)) as task:
            winner, trials = search(configs, partial(self._try, case, key, task))
        if winner and winner.times and options.use_cache:
            self._keep(choice_of(key, winner.config, winner.times.as_dict(), options.effort, count(trials)))
        return Found(winner.config if winner else None, "search", trials, self._runner.compile_seconds - before)

    def _try(self, case: Case, key: tuned.Key, task: Task, configs: Sequence[Config], replays: int) -> Iterator[Trial]:
        """Trials of a search, those of an earlier attempt first."""
        known = [self._log.find(key, config, replays) for config in configs]
        for trial in known:
            if trial:
                task.advance(replays == SHORT)
                yield trial
        missing = [config for config, trial in zip(configs, known, strict=True) if trial is None]
        for trial in self._runner.run(case, missing, replays):
            self._log.add(case, replays, trial, key)
            task.advance(replays == SHORT)
            yield trial

    def _cached(self, key: tuned.Key) -> tuned.Choice | None:
        try:
            return tuned.load(key)
        except SdbenchError as error:
            self._note(f"{error}; searching again")
            return None

    def _keep(self, choice: tuned.Choice) -> None:
        try:
            tuned.store(choice)
        except SdbenchError as error:
            self._note(str(error))

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._progress.note(f"warning: {text}")


def _label(case: Case) -> str:
    parts = [f"{case.kernel}/{case.variant}", "x".join(map(str, case.shape))]
    parts += [str(case.pattern)] if case.pattern else []
    return " ".join(parts + ([f"{case.tokens} tokens"] if case.tokens > 1 else []))
