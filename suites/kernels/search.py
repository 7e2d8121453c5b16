"""Checks a config on fresh input, and finds the fastest right one of many; every config has an outcome."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from sdbench.errors import one_line
from sdbench.kernels.checked import exact
from sdbench.kernels.registry import Config, Variant
from sdbench.suites.kernels.operands import Operand
from sdbench.timing import TOLERANCE, Times, relative_error, within

Outcome = Literal["correct", "incorrect", "compile_error", "out_of_resources", "timeout", "crash", "constraint"]
"""``crash`` is any other exception (an illegal address, a failed device assertion), or the end of the process that ran the config."""

SHORT, LONG = 3, 20
"""Timed replays that order the configs of a search, and those of a figure that is published."""

FINALISTS, MOST_FINALISTS = 3, 8
"""Configs of the short timing that are timed again at length: at least so many, and all within the noise of the best up to the second."""

QUICK = 12
"""Most configs of a quick search."""


@dataclass(frozen=True)
class Trial:
    """One config of one variant on one operand.

    Attributes:
        config: Launch parameters.
        outcome: How it ended.
        error: Relative Frobenius error against the float64 product; None where nothing ran.
        times: Microseconds a call; None without a GPU or for any other outcome than ``correct``.
        message: What went wrong, in one line.
        nbytes: Bytes that one product must read of the weight; None where there is no weight.
        bandwidth: Read bandwidth measured at that byte count, bytes a second, where it was asked for.
    """

    config: Config
    outcome: Outcome
    error: float | None = None
    times: Times | None = None
    message: str | None = None
    nbytes: int | None = None
    bandwidth: float | None = None


BORDER = 128
"""Elements of NaN before and behind x; a multiple of the bytes that aligned kernels ask of its address, in any dtype."""


def check(variant: Variant, operand: Operand, config: Config, generator: torch.Generator, tokens: int = 1) -> Trial:
    """Runs a config twice on fresh random x between NaNs, into NaN-filled outputs, against the float64 product with the pruned matrix.

    The second run catches what the first leaves behind: counters, or sums that go on accumulating.

    Raises:
        Exception: Whatever else than a refusal by the compiler or the device the variant raises.
    """
    device, dtype = operand.device, operand.problem.dtype
    # The interpreter truncates float32 to bf16 where a GPU rounds, so that x stays float32 there.
    x_dtype = dtype if device.type == "cuda" else torch.float32
    if variant.kernel == "dense" and variant.needs == "torch":
        x_dtype = dtype
    worst, y_dtype = 0.0, torch.float32
    try:
        for _ in range(2):
            x = torch.randn(operand.x_shape(tokens), generator=generator, device=device).to(dtype)
            y = torch.full(operand.y_shape(tokens), float("nan"), device=device)
            got = variant.launch(operand.weight, _between_nans(x.to(x_dtype)), y, config)
            # Partial sums [splits, out] are right where they add up.
            summed = got.double().sum(0) if tokens == 1 and got.dim() == 2 else got
            error_now = relative_error(summed, exact(operand.dense, x))
            # max() would drop a NaN that comes second.
            worst = error_now if not error_now <= worst else worst
            y_dtype = got.dtype
    except (OutOfResources, torch.OutOfMemoryError) as error:
        return Trial(config, "out_of_resources", message=one_line(error))
    except TritonError as error:
        return Trial(config, "compile_error", message=one_line(error))
    if not within(worst, TOLERANCE[y_dtype]):
        return Trial(config, "incorrect", worst, message=f"relative error {worst:.2e}")
    return Trial(config, "correct", worst)


def _between_nans(x: torch.Tensor) -> torch.Tensor:
    memory = x.new_full((x.numel() + 2 * BORDER,), float("nan"))
    memory[BORDER:-BORDER] = x.flatten()
    return memory[BORDER:-BORDER].view(x.shape)


def search(configs: Sequence[Config], run: Callable[[Sequence[Config], int], Iterator[Trial]]) -> tuple[Trial | None, list[Trial]]:
    """Tries every config with a short timing and the fastest few at length.

    Args:
        configs: Launch parameters, none twice.
        run: ``run(configs, replays)`` yields a trial a config, in any order.

    Returns:
        The winner, or None where no config is right; and the last trial of every config.
    """
    trials = {identity(trial.config): trial for trial in run(configs, SHORT)}
    winner: Trial | None = None
    short = list(trials.values())
    while winner is None and (field := finalists(short)):
        chosen = {identity(trial.config) for trial in field}
        at_length = list(run([trial.config for trial in field], LONG))
        trials |= {identity(trial.config): trial for trial in at_length}
        winner = pick(at_length)
        short = [trial for trial in short if identity(trial.config) not in chosen]
    return winner, list(trials.values())


def finalists(trials: Sequence[Trial]) -> list[Trial]:
    """The fastest right trials: those that the noise of a short timing cannot tell from the best, and a few more."""
    right = sorted((t for t in trials if t.times), key=lambda t: (_p50(t), identity(t.config)))
    return right[: min(MOST_FINALISTS, max(FINALISTS, len(_level(right))))]


def pick(trials: Sequence[Trial]) -> Trial | None:
    """The winner: of the right trials whose p20 to p80 overlaps the fastest one's, the simplest, so that noise does not choose.

    Simplest is: fewest splits of K, without dependent launch before with, then the order of the sorted config.
    """
    level = _level([trial for trial in trials if trial.times])
    return min(level, key=lambda t: (t.config.get("splits", 1), t.config.get("pdl", 0), identity(t.config)), default=None)


def subset(space: Sequence[Config], first: Sequence[Config], most: int = QUICK) -> list[Config]:
    """A few configs of a space, always the same ones.

    Args:
        space: All configs.
        first: Configs to begin with, whether or not they are in the space: what is known to be good, and the default.
        most: How many to return at most.
    """
    # Steps of the golden section, since steps of a whole number meet only some values of a space's inner loops.
    step = (5**0.5 - 1) / 2
    spread = [space[int(number * step % 1 * len(space))] for number in range(4 * most)] if len(space) > most else space
    return list({identity(config): config for config in (*first, *spread)}.values())[:most]


def identity(config: Config) -> tuple[tuple[str, int], ...]:
    """A config as a value that can be compared and looked up."""
    return tuple(sorted(config.items()))


def _level(right: Sequence[Trial]) -> list[Trial]:
    best = min(right, key=_p50, default=None)
    return [trial for trial in right if best and best.times and trial.times and trial.times.p20 <= best.times.p80]


def _p50(trial: Trial) -> float:
    return trial.times.p50 if trial.times else float("inf")
