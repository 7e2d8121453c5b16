"""The command line: one module a command, loaded when it is called, so that ``--help`` never imports torch."""

import importlib
import os
import sys
from difflib import get_close_matches
from typing import Any

import rich_click as click
from click.exceptions import Abort, ClickException, Exit

from sdbench import __version__
from sdbench.errors import ExitCode, SdbenchError

click.rich_click.TEXT_PARAGRAPH_LINEBREAKS = "\n\n"

COMMANDS = {
    "e2e": "Calibrate, prune, decode and judge: dense, control and chosen arms in one table.",
    "kernels": "Check, search and time every SpMV variant on a model's shapes.",
    "decode": "Time decoding, dense, int8 and pruned, over context lengths and batches; profile a step.",
    "tune": "Find the fastest right config of every kernel variant on this GPU, and keep it for all later runs.",
    "report": "Show runs again: tables, sums and notes from their run directories.",
    "runs": "List the run directories below a folder: of what, how they ended, when, with how many rows and attempts.",
    "compare": "Compare run NEW with run BASE: what is wrong now, what got worse, what got slower.",
    "pool": "Pool several draws of e2e, runs or a sweep's folder: fidelity and answers over all, with intervals over questions.",
    "sweep": "Run a grid of end-to-end runs: models, patterns, calibrations, methods, seeds, tasks; one table at the end.",
    "prune": "Calibrate, prune and write a checkpoint that sdbench.load and transformers read.",
    "verify": "Check a pruned checkpoint: axis, exact N in every group, masks against values, shapes, tied weights and hashes.",
    "split": "Split SOURCE into calibration and validation parts, pinned by a manifest.",
    "env": "Show what machine and software this is, as it stands in result files.",
}
"""Command name -> its one-line help; the module is ``sdbench.cli.<name>`` and holds ``command``."""


class LazyGroup(click.RichGroup):
    """A command group that imports a command's module only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A stand-in for the help page, which needs the name and the line but not the options; None for an unknown name."""
        return click.RichCommand(name=cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Imports the command that was called; an unknown name is answered with the closest one."""
        if args[0] not in COMMANDS:
            close = get_close_matches(args[0], COMMANDS, n=1, cutoff=0.6)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{hint} Commands: {', '.join(COMMANDS)}.")
        name = args[0]
        command = importlib.import_module(f"sdbench.cli.{name}").command
        _refuse_patterns(command, ctx, args[1:])
        return name, command, args[1:]


def _refuse_patterns(command: click.Command, ctx: click.Context, args: list[str]) -> None:
    """Refuses several patterns where a command takes one, of which the last would win without a word: other commands take them all."""
    _, _, given = command.make_parser(ctx).parse_args(list(args))
    patterns = [option for option in given if isinstance(option, click.Option) and option.name == "pattern" and not option.multiple]
    if len(patterns) > 1:
        grid = "; 'sdbench sweep' runs a grid" if command.name == "e2e" else ""
        ctx.fail(f"--pattern is given {len(patterns)} times, and {command.name} takes one{grid}")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sdbench")
def group() -> None:
    """Do N:M pruned weights pay at decode time, on your own GPU and model?

    \b
    sdbench e2e --calib decode          the whole answer, in one table
    sdbench kernels --pattern 2:4       the SpMV kernels alone
    sdbench tune --pattern 2:4          the best launch parameters for this GPU
    sdbench report RUN                  the tables of a run again
    sdbench compare BASE NEW            what got worse between two runs
    """


def main() -> None:
    """Entry point: turns errors meant for the user into one line on stderr and an exit code."""
    # Memory that one layer's check needed goes back to the driver although the next layer's weights lie beside it.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    try:
        code = group.main(prog_name="sdbench", standalone_mode=False)
        sys.stdout.flush()
    except SdbenchError as error:
        _fail(str(error), error.exit_code)
    except Exit as error:
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, Abort):
        _fail("interrupted", ExitCode.INTERRUPTED)
    except ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.ERROR)
    except Exception as error:
        if os.environ.get("SDBENCH_DEBUG"):
            raise
        _fail(f"unexpected {type(error).__name__}: {error} (SDBENCH_DEBUG=1 shows where)", ExitCode.ERROR)
    sys.exit(code if isinstance(code, int) else ExitCode.OK)


def _fail(message: str, code: int) -> None:
    # One line, whatever a library or a file name put into the message.
    print("sdbench: error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(int(code))
