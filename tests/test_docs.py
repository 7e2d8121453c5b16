"""What the documents promise: links resolve, quoted ``sdbench`` commands parse, and what committed runs show is quoted as it is."""

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click import ClickException

from sdbench.cli import COMMANDS, main
from sdbench.errors import ExitCode

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "results", "kernels", "calibrate", "suites", "sdbench", "tests")

FENCE = re.compile(r"^( *)```([\w-]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="a source distribution: the documents stay in the repository")


def documents() -> list[Path]:
    """README, the guides and the modules' own READMEs, each once: the symlinks are other names of the same folders."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")) if path.resolve() == path]
    return [*sorted(ROOT.glob("*.md")), *(path for path in found if "local" not in path.relative_to(ROOT).parts)]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(text: str) -> set[str]:
    """Where a link into a document may point, as GitHub names its headings."""
    headings = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(path: Path, text: str) -> list[str]:
    """Relative links of a document that lead nowhere."""
    dead = []
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = path.parent / file if file else path
        there = place.exists() and (not anchor or anchor in anchors(text if place == path else place.read_text(encoding="utf-8")))
        if not there:
            dead.append(target)
    return dead


def shown(text: str) -> Iterator[tuple[str, list[str]]]:
    """Command lines of the fenced shell blocks, each with what it printed: in a console block the lines below it, up to the next prompt."""
    for indent, language, block in FENCE.findall(text):
        lines = [line.removeprefix(indent) for line in block.replace("\\\n", " ").splitlines()]
        if language == "bash":
            yield from ((line, []) for line in lines)
        if language == "console":
            for part in "\n".join(["", *lines]).split("\n$ ")[1:]:
                line, *printed = part.splitlines()
                yield line, printed


def commands(text: str) -> Iterator[list[str]]:
    """Arguments of each ``sdbench`` command in the fenced shell blocks."""
    for line, _ in shown(text):
        yield from called(line)


def called(line: str) -> Iterator[list[str]]:
    """Arguments of each ``sdbench`` command in a line of shell."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.wordchars += "%:,+@"
    command: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set("();<>|&"):
            if command and Path(command[0]).name == "sdbench":
                yield command[1:]
            command = []
        else:
            command.append(word)


def problem(arguments: list[str]) -> str | None:
    """Why a command line would be refused before it runs; None where it would not."""
    command, *rest = arguments or [""]
    if command not in COMMANDS:
        return f"no command {command!r}"
    try:
        importlib.import_module(f"sdbench.cli.{command}").command.make_context(command, rest)
    except ClickException as error:
        return error.format_message()
    return None


@pytest.mark.parametrize("path", documents(), ids=name)
def test_links_resolve(path: Path) -> None:
    assert dead_links(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", documents(), ids=name)
def test_quoted_commands_parse(path: Path) -> None:
    quoted = commands(path.read_text(encoding="utf-8"))
    assert {" ".join(arguments): why for arguments in quoted if (why := problem(arguments))} == {}


def of_committed_runs() -> list[tuple[str, list[str], list[str]]]:
    """Document, arguments and printed lines of the commands that read committed runs."""
    found = []
    for path in documents():
        for line, printed in shown(path.read_text(encoding="utf-8")):
            for arguments in called(line):
                if printed and any(word.startswith("results/") for word in arguments) and arguments[0] in ("report", "compare", "pool"):
                    found.append((name(path), arguments, printed))
    return found


@pytest.mark.parametrize(("where", "arguments", "printed"), of_committed_runs())
def test_what_committed_runs_show_is_quoted_as_it_is(
    where: str, arguments: list[str], printed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the output, which is cut at ``...`` and whose lines may have lost blanks at their end."""
    monkeypatch.chdir(ROOT)
    expanded = [path for word in arguments for path in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    monkeypatch.setattr(sys, "argv", ["sdbench", *expanded])
    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    lines = iter([line.rstrip() for line in (out + err).splitlines()])
    assert [line for line in printed if line != "..." and line not in lines] == []


def test_the_readme_leads_to_every_guide() -> None:
    targets = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")} <= set(targets)


def test_the_readme_has_every_exit_code() -> None:
    _, _, table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| exit code |")
    codes = re.findall(r"^\| (\d+) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert codes == [str(int(code)) for code in ExitCode]


def test_dead_links_are_found() -> None:
    text = "# A title, `this`\n[a](test_docs.py) [b](gone.md) [c](#a-title-this) [d](#other) [e](https://example.org/x) `[f](code.md)`\n"
    assert dead_links(Path(__file__), text) == ["gone.md", "#other"]


def test_commands_are_found_and_wrong_ones_refused() -> None:
    text = (
        "```bash\npip install x && .venv/bin/sdbench e2e --calib decode+sink  # why\nsdbench compare a b --fail-over 3% > out\n"
        "sdbench kernels \\\n    --no-such 1\n```\n"
        "```console\n$ sdbench pool\nsdbench verify --output\n```\n```text\nsdbench nothing\n```\n"
    )
    found = list(commands(text))
    assert found == [["e2e", "--calib", "decode+sink"], ["compare", "a", "b", "--fail-over", "3%"], ["kernels", "--no-such", "1"], ["pool"]]
    assert problem(found[0]) is None and problem(found[1]) is None
    assert "--no-such" in str(problem(found[2])) and "RUN" in str(problem(found[3]))
    assert "e3e" in str(problem(["e3e"]))
