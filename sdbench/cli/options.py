"""Options and steps that several commands share."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from sdbench.architectures import ARCHITECTURES
from sdbench.errors import ExitCode, SdbenchError, one_line

if TYPE_CHECKING:
    from sdbench.results import RunDirectory

OUTPUT_HELP = "Run directory for run.json, rows.jsonl and samples.jsonl; the same command with the same folder resumes."
NOTHING_KEPT = "without --output nothing is kept"
MORE_ROOM = {
    "e2e": "use a smaller --batch-size for calibration replies, fewer --max-tokens, --device-map over several GPUs, or a larger GPU",
    "decode": "use a shorter --context, a smaller --batch, --device-map over several GPUs, or a larger GPU",
    "kernels": "use smaller --shapes or a smaller --batch, or a larger GPU",
    "tune": "use smaller --shapes or a smaller --batch, or a larger GPU",
    "prune": "use a smaller --batch-size for replies, fewer --calibration-tokens, --stream, or a larger GPU",
}
"""What to do where a GPU's memory does not reach, by command."""

SPMV_VARIANTS = ("lane_row", "lane_row_nibble", "lsb_scan", "portable", "reference")
SPMM_VARIANTS = ("expand", "tile", "reference")
TUNABLE_VARIANTS = ("lane_row", "lane_row_nibble", "lsb_scan", "portable", "gemm", "gemv", "fp8", "int8", "tile")
"""Names for the help pages, written out since the registry imports torch; a test compares them with it."""

SPREAD = "--device-map spreads a model over GPUs; leave it out"
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DEMO_MAX_TOKENS, MAX_TOKENS = 160, 512
"""Longest reply where none is asked for: of the demo model, whose replies are short, and of any other."""


def output_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--output DIR``."""
    return click.option("--output", type=click.Path(path_type=Path), callback=_named, help=OUTPUT_HELP)(function)


def _named(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    # An empty text, as of an unset shell variable, is the path of the current folder.
    if path is not None and str(path) == ".":
        raise click.BadParameter("is empty, or the current folder; name a folder of its own")
    return path


def timeout_option(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--timeout`` of a config.

    Args:
        help: Its line of the help page.
    """
    seconds = click.FloatRange(min=0, min_open=True)
    return click.option("--timeout", type=seconds, callback=_a_number, default=30, show_default=True, help=help)


def min_speedup_option(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--min-speedup``.

    Args:
        help: Its line of the help page.
    """
    return click.option("--min-speedup", type=float, callback=_a_number, help=help)


def _a_number(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    # No comparison with a limit refuses NaN.
    if value is not None and math.isnan(value):
        raise click.BadParameter("is no number")
    return value


def variants_option(help: str, known: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--variant``, which may be repeated.

    Args:
        help: What the variants are chosen for.
        known: Their names, as the help tells them.
    """
    return click.option("--variant", "variants", multiple=True, help=f"{help}: {known}; may be repeated; all when left out.")


def batches_option(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--batch``, which may be repeated.

    Args:
        help: What for.
    """
    return click.option("--batch", "batches", type=int, multiple=True, default=(1,), show_default=True, help=help)


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")(function)


def device_map_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--device-map``."""
    help = "Spread the model over all visible GPUs, by accelerate's rule of this name; decodes by transformers' eager forward."
    return click.option("--device-map", type=click.Choice(DEVICE_MAPS), help=help)(function)


def device_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--device``."""
    return click.option("--device", default="auto", show_default=True, help="auto, cuda, cuda:N or cpu.")(function)


def model_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--model``."""
    default = "[default: Qwen3-4B-Instruct-2507 on a GPU, else demo]"
    return click.option("--model", help=f"Hub id, folder, .gguf file, random:<hub id or folder>, or demo.  {default}")(function)


def model_dtype_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--dtype`` of a model."""
    return click.option("--dtype", default="auto", show_default=True, help="auto (bf16 on a GPU, fp32 on a CPU), bf16, fp16 or fp32.")(
        function
    )


def products_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--pattern``, ``--shapes`` and ``--dtype`` of the products that a kernel suite multiplies."""
    for option in (
        click.option(
            "--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True, help="Dtype of the weights."
        ),
        click.option(
            "--shapes",
            default="qwen3-4b",
            show_default=True,
            help=f"A model's name ({', '.join(ARCHITECTURES)}), or a list such as 4096x2560,2560x9728 (OUTxIN).",
        ),
        click.option(
            "--pattern", "patterns", multiple=True, default=["2:4"], show_default=True, help="N:M, N kept of M; may be given several times."
        ),
    ):
        function = option(function)
    return function


class Checked(Exception):
    """What ``e2e`` was given is right: raised before it looks at the machine and opens its run directory, inside :func:`checking`."""

    def __init__(self, arguments: dict[str, Any]):
        super().__init__("checked")
        self.arguments = arguments


_checking = ContextVar("checking", default=False)


@contextmanager
def checking() -> Iterator[None]:
    """``e2e``, called inside, checks all that it was given and raises :class:`Checked`, before anything is created or loaded."""
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


def is_checking() -> bool:
    """Whether the command is called inside :func:`checking`."""
    return _checking.get()


@contextmanager
def run_directory(
    output: Path | None, command: str, arguments: dict[str, Any], environment: dict[str, Any]
) -> Iterator["RunDirectory | None"]:
    """Opens ``--output`` as a run directory, or yields None without one.

    Args:
        output: The folder.
        command: The command's name.
        arguments: Every option that changes a result.
        environment: The machine.

    Raises:
        SdbenchError: Ctrl-C, or a GPU without room, once the run directory has recorded it; says where the finished rows are.
    """
    from torch import OutOfMemoryError

    from sdbench.results import RunDirectory
    from sdbench.suites.saved import FAULTS

    try:
        with RunDirectory.open(output, command, arguments, environment, FAULTS) if output else nullcontext() as directory:
            yield directory
    except KeyboardInterrupt as error:
        kept = f"what is finished is in {output}, and the same command with --output {output} goes on" if output else NOTHING_KEPT
        raise SdbenchError(f"interrupted; {kept}", ExitCode.INTERRUPTED) from error
    except OutOfMemoryError as error:
        raise no_room(error, command, f"what is finished is in {output}" if output else NOTHING_KEPT) from error


def no_room(error: Exception, command: str, kept: str) -> SdbenchError:
    """The line for a GPU whose memory does not reach.

    Args:
        error: What torch says.
        command: The command's name.
        kept: What is left of the run.
    """
    return SdbenchError(f"out of GPU memory ({one_line(error, 150)}); {MORE_ROOM[command]}; {kept}")
