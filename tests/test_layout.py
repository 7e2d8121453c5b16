"""What the layout promises: import names, one way of dependencies, and no clash with a package called ``kernels``."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
JOINED = ("kernels", "calibrate", "suites")
SOURCE = ("sdbench", *JOINED)
MAX_LINES = 400

LAYERS = (
    ("sdbench/cli", "sdbench/__main__.py", "sdbench/__init__.py"),
    ("suites",),
    ("calibrate",),
    ("sdbench/checkpoints",),
    ("sdbench/engine", "sdbench/models.py"),
    ("kernels",),
)
"""From the top down: a layer imports its own and lower ones; what is in none of them lies below all."""


def python_files() -> list[Path]:
    """Every Python file of the tree, each once: the symlinks are other names of the same folders."""
    return [path for folder in (*SOURCE, "tests") for path in (ROOT / folder).rglob("*.py") if path.resolve() == path]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(where: str) -> int:
    for index, folders in enumerate(LAYERS):
        if any(where == folder or where.startswith(f"{folder}/") for folder in folders):
            return index
    return len(LAYERS)


def home(module: str) -> str:
    """The folder or file of one of our modules, as ``LAYERS`` writes it."""
    path = module.removeprefix("sdbench.").replace(".", "/")
    return path if path.partition("/")[0] in JOINED else f"sdbench/{path}"


def tracked(*names: str) -> dict[str, str]:
    """Mode of each file in git's index; skips outside a checkout."""
    try:
        done = subprocess.run(["git", "ls-files", "-s", "--", *names], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return {line.split("\t")[1]: line.split()[0] for line in done.stdout.splitlines()}


def test_files_are_found() -> None:
    found = {relative(path) for path in python_files()}
    assert {"sdbench/pattern.py", "kernels/registry.py", "calibrate/wanda.py", "suites/data.py", "tests/test_layout.py"} <= found


def test_transformers_is_imported_beside_our_kernels_folder() -> None:
    """transformers probes for the Hugging Face package ``kernels``: what it finds of ours must hold no code."""
    code = (
        "import sys; from transformers import Qwen3ForCausalLM; assert sys.path[0] == ''; "
        f"print([m for m in sys.modules.values() if m.__name__.partition('.')[0] in {JOINED} and getattr(m, '__file__', None)])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_root_folders_are_no_packages_of_their_own() -> None:
    for name in JOINED:
        assert (ROOT / name).is_dir() and not (ROOT / name / "__init__.py").exists()


def test_the_package_is_joined_by_relative_tracked_symlinks() -> None:
    modes = tracked(*(f"sdbench/{name}" for name in JOINED))
    for name in JOINED:
        link = ROOT / "sdbench" / name
        assert link.is_symlink() and str(link.readlink()) == f"../{name}"
        assert modes[f"sdbench/{name}"] == "120000"


def test_nobody_imports_the_root_folders_by_their_bare_names() -> None:
    bare = {f"{relative(path)}: {name}" for path in python_files() for name in imports(path) if name.partition(".")[0] in JOINED}
    assert bare == set()


def test_dependencies_point_one_way() -> None:
    upward = set()
    for path in python_files():
        where = relative(path)
        for module in imports(path):
            if not where.startswith("tests/") and module.startswith("sdbench.") and layer(home(module)) < layer(where):
                upward.add(f"{where}: {module}")
    # The demo model's own files tell where it lies; training it is a script beside the package.
    assert {line for line in upward if not line.startswith("sdbench/demo/")} == set()


def test_no_module_is_long() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_only_the_command_line_prints() -> None:
    prints = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files()
        if not relative(path).startswith(("sdbench/cli/", "tests/"))
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert prints == []
