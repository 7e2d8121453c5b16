"""``sdbench verify``: is a pruned checkpoint what it claims to be?"""

import sys
from pathlib import Path

import rich_click as click

from sdbench.cli.options import json_option
from sdbench.words import counted


@click.command("verify")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--pattern", help="N:M that it should hold.  [default: what config.json or sdbench.json names]")
@json_option
def command(path: Path, pattern: str | None, as_json: bool) -> None:
    """Check a pruned checkpoint: axis, exact N in every group, masks against values, shapes, tied weights and hashes.

    PATH is a folder: a packed checkpoint of 'sdbench prune', an old sparse-24-bitmask or sparse-bitmask one, or a dense one with zeros. A
    failed check is one line that names tensor and index, and exit code 3.

    \b
    sdbench verify pruned
    sdbench verify zeros --pattern 2:4
    sdbench verify pruned --json
    """
    from dataclasses import asdict

    from sdbench.checkpoint_files import CheckpointFiles
    from sdbench.checkpoints.verify import CHECKS, verify
    from sdbench.errors import CheckFailed
    from sdbench.pattern import Pattern
    from sdbench.progress import Progress
    from sdbench.results import strict_json
    from sdbench.tables import Column, render_table

    expected = Pattern.parse(pattern) if pattern else None
    with Progress() as progress:
        found = verify(CheckpointFiles.open(path), expected, progress)
    hashes = "checked" if found.provenance else "no sdbench.json, so no hash is checked"
    if as_json:
        document = {
            "schema": "sdbench.verify/1",
            "path": str(path),
            "format": found.kind,
            "pattern": str(found.pattern),
            "ok": not found.failures,
            "hashes": hashes,
            "layers": found.layers,
            "failures": [asdict(failure) for failure in found.failures],
        }
        sys.stdout.write(strict_json(document, indent=2) + "\n")
    else:
        columns = [Column("layer", key=True), Column("shape"), *(Column(check) for check in ("pruned", *CHECKS))]
        cells = [
            [
                layer.name,
                "x".join(map(str, layer.shape)),
                "yes" if layer.pruned else "no",
                *(layer.checks.get(name, "-") for name in CHECKS),
            ]
            for layer in found.layers
        ]
        render_table(columns, cells, title=f"{path}: {found.kind}, {found.pattern}")
        print(f"hashes: {hashes}")
        for failure in found.failures:
            print(f"{failure.check}: {failure}")
    if found.failures:
        count = len(found.failures)
        raise CheckFailed(f"{path}: {counted(count, 'failed check')}{', the first' if count > 1 else ':'} {found.failures[0]}")
