"""Imports go downward (ARCHITECTURE.md section 2), and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "metrale"

# Lower number = lower layer; a module may import only from its own layer's group or below.
LAYERS = {
    "errors": 0,
    "env": 0,
    "log": 0,
    "dtypes": 0,
    "paths": 0,
    "_ext": 1,
    "config": 1,
    "formats": 1,
    "quant": 1,
    "hub": 1,
    "text": 2,
    "backends": 3,
    "cache": 3,
    "weights": 4,
    "layers": 4,
    "circuit": 4,
    "families": 5,
    "model": 6,
    "spec": 6,
    "engine": 7,
    "api": 8,
    "server": 9,
    "cli": 9,
    "capi": 9,
}
ONLY_UNDER = {"cupy": "backends/cuda", "numba": "backends/cpu", "cuda": "backends/cuda"}
NEVER = {"torch", "transformers", "gguf", "sentencepiece", "ctranslate2", "llama_cpp"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            inner = [f"metrale.{a.name}" for a in node.names if node.module == "metrale" and is_module(a.name)]
            found += [(name, node.lineno) for name in inner or [node.module or ""]]
    return found


def is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    mine = LAYERS.get(parts[0], 99)  # the package's own __init__ sees everything, lazily
    for name, line in imported(path):
        top, *rest = name.split(".")
        if top == "metrale" and rest:
            assert rest[0] in LAYERS, f"{path}:{line}: {name} has no layer; add it to LAYERS"
            assert LAYERS[rest[0]] <= mine, f"{path}:{line}: {parts[0]} (layer {mine}) imports {name} (layer {LAYERS[rest[0]]})"
        assert top not in NEVER, f"{path}:{line}: {top} is a test dependency"
        if top in ONLY_UNDER:
            assert ONLY_UNDER[top] in path.as_posix(), f"{path}:{line}: {top} belongs under {ONLY_UNDER[top]}"


def test_the_walk_sees_every_form_of_import(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text("import metrale.api\nfrom metrale import cli, __version__\nfrom metrale.engine import engine\n")
    assert imported(path) == [("metrale.api", 1), ("metrale.cli", 2), ("metrale.engine", 3)]


def test_importing_metrale_loads_nothing_heavy() -> None:
    heavy = ["numba", "numpy", "cupy", "tokenizers", "jinja2", "huggingface_hub", "safetensors", "tqdm"]
    code = f"import sys, metrale; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_numba_files_are_self_contained() -> None:
    """Numba's cache does not see edits in other files, so a kernel file imports no other kernel file."""
    for path in (PACKAGE / "backends" / "cpu" / "kernels").glob("*.py"):
        for name, line in imported(path):
            assert not name.startswith("metrale.backends.cpu.kernels"), f"{path}:{line}: imports {name}"
