"""``sdbench compare``: regressions between two runs."""

import sys
from pathlib import Path

import rich_click as click

from sdbench.cli.options import json_option
from sdbench.words import counted

NAMED = 3
"""Regressions that the error line names."""


class Percent(click.ParamType):
    """A share such as ``5%``, as a fraction."""

    name = "percent"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Takes a number with its sign: 0.05 could mean either."""
        if isinstance(value, float):
            return value
        try:
            share = float(value.removesuffix("%")) / 100
        except ValueError:
            share = -1
        if not value.endswith("%") or not 0 <= share < float("inf"):
            self.fail(f"{value!r} is no share of the time; write it as 5%", param, ctx)
        return share


@click.command("compare")
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option(
    "--fail-over",
    type=Percent(),
    default="5%",
    show_default=True,
    help="A time that is longer by up to this much is noise and no regression.",
)
@json_option
def command(base: Path, new: Path, fail_over: float, as_json: bool) -> None:
    """Compare run NEW with run BASE: what is wrong now, what got worse, what got slower.

    Both are run directories of the same command: e2e, kernels, tune or decode. Rows are matched by what they measured; a row of one run
    alone is listed. Slower means by more than --fail-over and beyond the spread (p20 to p80) of both runs; less is called noise, and
    where either has one sample alone, more is not judged. Answers and EOS got worse only where an exact McNemar test over the examples
    that both judged says so (p < 0.05), fidelity where the 95% interval of the ratio of KLs does. Exit code 4 for a regression, 5 without
    a row in common.

    \b
    sdbench compare before after
    sdbench compare before after --fail-over 2%
    sdbench compare before after --json
    """
    from sdbench.errors import ExitCode, SdbenchError
    from sdbench.results import strict_json
    from sdbench.suites.compare import COLUMNS, compare
    from sdbench.suites.runs import read_run
    from sdbench.tables import render_table

    found = compare(read_run(base), read_run(new), fail_over)
    if as_json:
        sys.stdout.write(strict_json(found.document(), indent=2) + "\n")
    else:
        for line in found.warnings:
            print(f"warning: {line}")
        render_table(COLUMNS, found.cells(), title=f"{new} against {base} (x BASE above 1 is faster)")
        for line in found.lines():
            print(line)
    worst = found.regressions
    if worst:
        named = "; ".join(f"{one.label} ({one.figure}) {'not measured any more' if one.lost else one.verdict}" for one in worst[:NAMED])
        more = f"; {len(worst) - NAMED} more" if len(worst) > NAMED else ""
        raise SdbenchError(f"{counted(len(worst), 'regression')}: {named}{more}", ExitCode.SLOWER)
