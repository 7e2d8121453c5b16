"""Runs configs and keeps the outcome of each, whatever it does: here in this process, for a GPU in a process of its own (worker.py)."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch

from sdbench.errors import one_line
from sdbench.kernels import registry
from sdbench.kernels.launching import capability, sm_count
from sdbench.kernels.read import read_bandwidth
from sdbench.kernels.registry import Config, Problem, Variant
from sdbench.pattern import Pattern
from sdbench.suites.kernels.compiling import compile_all
from sdbench.suites.kernels.operands import Operand, Shape, make_operand
from sdbench.suites.kernels.search import Outcome, Trial, check
from sdbench.timing import Times

SETUP_SECONDS, COMPILE_SECONDS = 300.0, 180.0
"""Limits of a new process with its operand, and of one config's compilation."""


class Timer(Protocol):
    """As :func:`sdbench.timing.graph_times`; one that goes to a process of its own is a function of a module."""

    def __call__(self, calls: Sequence[Callable[[], object]], *, replays: int) -> Times | None:
        """Microseconds a call."""


@dataclass(frozen=True)
class Case:
    """A variant and what it multiplies, in a form that goes to another process.

    Attributes:
        kernel: Kernel of the variant.
        variant: Its name.
        module: Module that its launch function stands in, imported there first.
        shape: (out_features, in_features) that run.
        dtype: Dtype of the weight.
        pattern: N:M of the weight, or None.
        device: Where to run.
        seed: Seed of the weight and the inputs.
        tokens: Rows of x.
    """

    kernel: str
    variant: str
    module: str
    shape: Shape
    dtype: torch.dtype
    pattern: Pattern | None
    device: torch.device
    seed: int
    tokens: int = 1

    @classmethod
    def of(
        cls,
        variant: Variant,
        shape: Shape,
        dtype: torch.dtype,
        pattern: Pattern | None,
        device: torch.device,
        seed: int,
        tokens: int = 1,
    ) -> Self:
        """The case of a registered variant."""
        return cls(variant.kernel, variant.name, variant.launch.__module__, shape, dtype, pattern, device, seed, tokens)

    def find(self) -> Variant:
        """The variant itself."""
        return registry.find(self.kernel, self.variant)

    @property
    def problem(self) -> Problem:
        """The registry's description."""
        return Problem(*self.shape, self.dtype, self.pattern, sm_count(self.device), capability(self.device), self.tokens)


@dataclass(frozen=True)
class Request:
    """What a bench is asked for: a check, and a timing where it has a timer, of each config.

    Attributes:
        case: The variant and what it multiplies.
        configs: Launch parameters.
        replays: Timed replays.
        roofline: Measure the read bandwidth at the weight's bytes as well.
    """

    case: Case
    configs: tuple[Config, ...]
    replays: int
    roofline: bool


@dataclass(frozen=True)
class Ready:
    """The operand is made."""

    nbytes: int
    bandwidth: float | None


Message = Ready | str | Trial | None
"""The answer to a request, in this order: Ready; for each config None, or why it does not compile; a Trial of each that compiles."""


class Lost(Exception):
    """Nothing more comes from a bench.

    Args:
        outcome: What that makes of the config that was at work.
        message: Why, in one line.
    """

    def __init__(self, outcome: Outcome, message: str):
        super().__init__(outcome, message)
        self.outcome = outcome
        self.message = message

    @classmethod
    def by(cls, error: Exception) -> Self:
        """What an exception of the operand or a config makes of it."""
        if isinstance(error, torch.OutOfMemoryError):
            return cls("out_of_resources", one_line(error))
        return cls("crash", f"{type(error).__name__}: {one_line(error)}")


class Bench:
    """Answers requests; keeps the operand in use, since those of one shape and pattern follow one another.

    Args:
        timer: Times calls on the device; None where there is nothing to time.
    """

    def __init__(self, timer: Timer | None):
        self.timer = timer
        self._key: object = None
        self._operand: Operand | None = None
        self._copies: list[Any] = []

    def answer(self, request: Request) -> Iterator[Message]:
        """Yields the messages of a request.

        Raises:
            Exception: Whatever a config raises; on a GPU the process is of no use after that.
        """
        case = request.case
        variant = case.find()
        generator = torch.Generator(case.device).manual_seed(case.seed + 1)
        operand = self._get(case, variant)
        bandwidth = read_bandwidth(operand.nbytes, case.device) if request.roofline and case.device.type == "cuda" else None
        yield Ready(operand.nbytes, bandwidth)
        good = []
        for config, refusal in zip(request.configs, compile_all(variant, operand, request.configs, case.tokens), strict=True):
            if refusal is None:
                good.append(config)
            yield refusal
        for config in good:
            trial = check(variant, operand, config, generator, case.tokens)
            if self.timer and trial.outcome == "correct":
                trial = self._timed(self.timer, variant, operand, trial, generator, request)
            yield trial

    def _get(self, case: Case, variant: Variant) -> Operand:
        key = variant.prepare, case.shape, case.dtype, case.pattern, case.device, case.seed
        if self._operand is None or self._key != key:
            self._operand, self._copies = None, []
            if case.device.type == "cuda":
                torch.cuda.set_device(case.device)
            operand = make_operand(case.shape, case.dtype, case.pattern, case.device, case.seed, variant.prepare)
            self._copies = operand.copies() if case.device.type == "cuda" else [operand.weight]
            self._key, self._operand = key, operand
        return self._operand

    def _timed(self, timer: Timer, variant: Variant, operand: Operand, trial: Trial, generator: torch.Generator, request: Request) -> Trial:
        tokens = request.case.tokens
        x = torch.randn(operand.x_shape(tokens), generator=generator, device=operand.device).to(operand.problem.dtype)
        y = torch.empty(operand.y_shape(tokens), device=operand.device)
        calls = [lambda weight=weight: variant.launch(weight, x, y, trial.config) for weight in self._copies]
        try:
            times = timer(calls, replays=request.replays)
        except torch.OutOfMemoryError as error:
            return replace(trial, outcome="out_of_resources", message=one_line(error))
        return replace(trial, times=times, message=None if times else "the device gave no finite time")


class Runner:
    """Turns the answers of a bench into a trial for every config. A context manager.

    Attributes:
        timed: Whether right configs are timed.
        compile_seconds: Seconds spent compiling so far; they are in no trial's times.
    """

    timed: bool
    _timeout = float("inf")

    def __init__(self) -> None:
        self.compile_seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of what the runner holds."""

    def run(self, case: Case, configs: Sequence[Config], replays: int, roofline: bool = False) -> Iterator[Trial]:
        """Yields one trial a config: those that do not compile first.

        Args:
            case: The variant and what it multiplies.
            configs: Launch parameters, none twice.
            replays: Timed replays.
            roofline: Measure the read bandwidth as well.
        """
        rest = list(configs)
        try:
            while rest:
                self._ask(Request(case, tuple(rest), replays, roofline))
                yield from self._trials(rest)
        except BaseException:
            # Ctrl-C, or a caller that wants no more: what is still to come would be taken for the next request's answer.
            self.close()
            raise

    def _trials(self, rest: list[Config]) -> Iterator[Trial]:
        """Trials of one request, each taken from ``rest``; ends early where the bench is lost, which costs one config its outcome."""
        try:
            ready = self._receive(SETUP_SECONDS)
        except Lost as lost:
            # No config is at fault; none could run.
            while rest:
                yield Trial(rest.pop(0), lost.outcome, message=lost.message)
            return
        assert isinstance(ready, Ready)
        at_work, start = rest[0], time.monotonic()
        try:
            for at_work in tuple(rest):
                refusal = self._receive(COMPILE_SECONDS)
                if refusal is not None:
                    rest.remove(at_work)
                    yield Trial(at_work, "compile_error", message=str(refusal), nbytes=ready.nbytes)
            self.compile_seconds += time.monotonic() - start
            for at_work in tuple(rest):
                trial = self._receive(self._timeout)
                assert isinstance(trial, Trial)
                rest.remove(at_work)
                yield replace(trial, nbytes=ready.nbytes, bandwidth=ready.bandwidth)
        except Lost as lost:
            rest.remove(at_work)
            yield Trial(at_work, lost.outcome, message=lost.message, nbytes=ready.nbytes)

    def _ask(self, request: Request) -> None:
        raise NotImplementedError

    def _receive(self, seconds: float) -> Message:
        """The next message.

        Raises:
            Lost: It does not come within that time, or never.
        """
        raise NotImplementedError


class Local(Runner):
    """Runs configs in this process: for a CPU, where a config can neither hang a device nor poison it.

    Args:
        timer: Times the right ones; None to check alone.
    """

    def __init__(self, timer: Timer | None = None):
        super().__init__()
        self._bench = Bench(timer)
        self.timed = timer is not None
        self._answer: Iterator[Message] = iter(())

    def _ask(self, request: Request) -> None:
        self._answer = self._bench.answer(request)

    def _receive(self, seconds: float) -> Message:
        try:
            return next(self._answer)
        except Exception as error:
            raise Lost.by(error) from error
