"""``sdbench split``: one training file into calibration and validation parts, pinned by a manifest."""

import shlex
from functools import partial
from pathlib import Path

import rich_click as click

from sdbench.cli.tasks import NAMES, find_data
from sdbench.errors import UsageError
from sdbench.words import counted

FILE = click.Path(path_type=Path)


class Size(click.ParamType):
    """A count such as ``200``, or a fraction such as ``0.1``."""

    name = "count|fraction"

    def convert(self, value: str | int | float, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """Reads digits as a count and a decimal number as a fraction."""
        try:
            return int(value) if str(value).isdecimal() else float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a count such as 200 nor a fraction such as 0.1", param, ctx)


@click.command("split", epilog="Example: sdbench split train.jsonl --output data --validation-size 200")
@click.argument("source", type=FILE, required=False)
@click.option("--task", help=f"Read SOURCE in the form of a task: {NAMES}; without SOURCE it is taken from $SDBENCH_DATA or the hub.")
@click.option("--output", type=FILE, help="Folder for train.jsonl, validation.jsonl and manifest.json.")
@click.option("--train-out", type=FILE, help="File for the training part.  [default: OUTPUT/train.jsonl]")
@click.option("--validation-out", type=FILE, help="File for the held-out part.  [default: OUTPUT/validation.jsonl]")
@click.option("--manifest-out", type=FILE, help="File for the manifest.  [default: OUTPUT/manifest.json]")
@click.option(
    "--validation-size", type=Size(), help="Held-out questions: a count (200) or a fraction (0.1).  [default: 0.1, or what the task says]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed holds out other questions.")
@click.option("--revision", help="The dataset's revision, e.g. its commit on the hub.  [default: start of the source file's SHA-256]")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as one JSON document.")
def command(
    source: Path | None,
    task: str | None,
    output: Path | None,
    train_out: Path | None,
    validation_out: Path | None,
    manifest_out: Path | None,
    validation_size: int | float | None,
    seed: int,
    revision: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Split SOURCE into calibration and validation parts, pinned by a manifest.

    SOURCE is a training file in JSONL: one object a line with the texts "question" and "answer", and optionally "id". Questions that are
    equal after normalising are kept once, so that no question is in both parts. Official test splits are refused. With --task, SOURCE is a
    file as its authors publish it, and the parts are those that 'sdbench e2e --task NAME --data SOURCE' takes.
    """
    from sdbench.results import strict_json
    from sdbench.suites.data import load_examples, split
    from sdbench.suites.tasks.records import load_records
    from sdbench.tables import Column, render_table

    if output is not None:
        train_out = train_out or output / "train.jsonl"
        validation_out = validation_out or output / "validation.jsonl"
        manifest_out = manifest_out or output / "manifest.json"
    if train_out is None or validation_out is None or manifest_out is None:
        raise UsageError("say where the parts go: --output DIR, or all of --train-out, --validation-out and --manifest-out")

    chosen, source = find_data(task, source)
    if source is None:
        raise UsageError(f"task {task} comes with its split" if chosen else "name the file to split, or a --task whose data can be found")
    if validation_size is None:
        validation_size = chosen.holdout if chosen else 0.1
    load = partial(load_records, chosen) if chosen else load_examples
    manifest = split(source, train_out, validation_out, manifest_out, validation_size, seed, revision, force, load)
    if manifest.dropped_duplicates:
        click.echo(
            f"dropped {counted(manifest.dropped_duplicates, 'example')} whose question an earlier one asks, lest it be in both parts; "
            f"{manifest.dropped_contradictions} of them have another answer than that one, which is kept",
            err=True,
        )
    if as_json:
        click.echo(strict_json(manifest, indent=2))
        return
    parts = (("train", train_out, manifest.parts.train), ("validation", validation_out, manifest.parts.validation))
    render_table(
        [Column("part", key=True), Column("examples", figure=True), Column("SHA-256"), Column("file")],
        [[name, str(part.examples), part.sha256[:12], str(path)] for name, path, part in parts],
        title=f"{source}, revision {manifest.revision}, seed {seed}",
    )
    click.echo(f"\ndropped as repeated questions: {manifest.dropped_duplicates}; shared questions: {manifest.shared_questions}")
    named = f"--task {task} " if task else ""
    paths = ("--train", train_out), ("--validation", validation_out), ("--split-manifest", manifest_out)
    click.echo(f"next: sdbench e2e {named}" + " ".join(f"{option} {shlex.quote(str(path))}" for option, path in paths))
