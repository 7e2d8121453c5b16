"""``sdbench env``: what machine and software this is."""

from collections.abc import Iterator, Mapping
from typing import Any

import rich_click as click


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def command(as_json: bool) -> None:
    """Show what machine and software this is, as it stands in result files."""
    from sdbench.environment import describe
    from sdbench.results import strict_json
    from sdbench.tables import Column, render_table

    facts = describe()
    if as_json:
        click.echo(strict_json({"schema": "sdbench.env/1", **facts}, indent=2))
    else:
        render_table([Column("what", key=True), Column("value")], list(_flat(facts)))


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "-" if value is None else str(value)
