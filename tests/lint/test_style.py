"""ruff, mypy and cython-lint are clean; files and functions stay readable in size."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "metrale").rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_TOTAL_LINES = 25_000

# path -> reason, for files and functions that may be longer.
LONG_FILES: dict[str, str] = {
    "metrale/backends/base.py": "the contract reads in one place",
}
LONG_FUNCTIONS: dict[str, str] = {}


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff() -> None:
    run("ruff", "check", ".")


def test_mypy() -> None:
    run("mypy")


def test_cython_lint() -> None:
    files = [str(p.relative_to(ROOT)) for p in (ROOT / "metrale" / "_ext").glob("*.pyx")]
    folder = Path(sys.executable).parent  # cython-lint starts pycodestyle from the PATH
    done = subprocess.run(
        [str(folder / "cython-lint"), "--max-line-length=128", *files],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    text = path.read_text()
    lines = len(text.splitlines())
    assert lines <= MAX_FILE_LINES or name in LONG_FILES, f"{name}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            assert size <= MAX_FUNCTION_LINES or f"{name}:{node.name}" in LONG_FUNCTIONS, f"{name}:{node.name}: {size} lines"


def test_total_size() -> None:
    kinds = ("*.py", "*.pyx", "*.c", "*.h", "*.inc", "*.cu", "*.cuh")
    total = sum(
        len(p.read_text().splitlines())
        for kind in kinds
        for p in (ROOT / "metrale").rglob(kind)
        if not (p.suffix == ".c" and p.parent.name == "_ext")
    )
    assert total <= MAX_TOTAL_LINES, f"{total} lines"


def test_every_folder_is_a_package() -> None:
    for folder in {p.parent for p in SOURCES}:
        assert (folder / "__init__.py").exists(), f"{folder.relative_to(ROOT)} has no __init__.py"
