"""A step allocates nothing: layers hold weights and call ops, and make arrays only where they are built."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LAYERS = Path(__file__).resolve().parents[2] / "metrale" / "layers"
# Functions that run once, when a model is opened.
BUILDING = {"stack.py": {"__init__", "_rope"}, "buffers.py": {"__init__", "plain", "quantized"}, "embed.py": {"rounded_scale"}}
HOST_TABLES = {"rope.py"}  # NumPy on the host, before any step
FORBIDDEN = {"alloc", "alloc_q", "alloc_pinned", "upload", "download", "copy", "astype", "zeros", "empty", "array", "asarray"}


def calls(path: Path) -> list[tuple[str, str, int]]:
    """Return (function, called attribute, line) of every method call in a file."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                found.append((function, child.func.attr, child.lineno))
            visit(child, inner)

    visit(ast.parse(path.read_text()), "")
    return found


@pytest.mark.parametrize("path", sorted(p for p in LAYERS.glob("*.py") if p.name not in HOST_TABLES), ids=lambda p: p.name)
def test_layers_make_no_arrays_in_a_step(path: Path) -> None:
    for function, attribute, line in calls(path):
        allowed = function in BUILDING.get(path.name, set())
        assert allowed or attribute not in FORBIDDEN, f"{path.name}:{line}: {function} calls {attribute}"


def test_the_check_sees_calls() -> None:
    assert any(attribute == "alloc" for _, attribute, _ in calls(LAYERS / "buffers.py"))
