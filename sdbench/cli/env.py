"""``sdbench env``: what machine and software this is."""

import rich_click as click


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def command(as_json: bool) -> None:
    """Show what machine and software this is, as it stands in result files."""
    from sdbench.environment import describe
    from sdbench.records import flatten
    from sdbench.results import strict_json
    from sdbench.tables import Column, render_table

    facts = describe()
    if as_json:
        click.echo(strict_json({"schema": "sdbench.env/1", **facts}, indent=2))
    else:
        render_table(
            [Column("what", key=True), Column("value")],
            [(name, "-" if value is None else str(value)) for name, value in flatten(facts).items()],
        )
