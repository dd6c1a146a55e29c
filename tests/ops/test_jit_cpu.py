"""The kernel cache: written once, loaded by the next process, never stale, never in the way."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from metrale.backends.cpu import jit
from metrale.backends.cpu.object_code import LoadedObject, NotLoadable

ROOT = Path(__file__).resolve().parents[2]
THROUGH_NUMBA = platform.machine() != "x86_64"  # elsewhere a kept kernel is placed into memory directly
SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from metrale.backends.cpu import jit
address = jit.address("rows_commit")
print("numba" in sys.modules, address > 0)
"""


def start(cache: Path) -> str:
    """Resolve one kernel in a fresh process; return what it says."""
    environ = {"METRALE_CACHE": str(cache), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip() + (", warned" if "cannot be kept" in done.stderr else "")


def test_compiled_once_then_loaded_and_damage_is_noticed(tmp_path: Path) -> None:
    assert start(tmp_path) == "True True"
    (kept,) = (tmp_path / "kernels").iterdir()
    assert start(tmp_path) == f"{THROUGH_NUMBA} True"
    data = bytearray(kept.read_bytes())
    data[-9] ^= 1
    kept.write_bytes(data)
    assert start(tmp_path) == "True True"
    assert start(tmp_path) == f"{THROUGH_NUMBA} True"
    assert list((tmp_path / "kernels").iterdir()) == [kept]


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("not a folder")
    assert start(tmp_path) == "True True, warned"


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("not a folder")
    environ = {"METRALE_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    script = SCRIPT + "jit.address('rows_begin')"
    done = subprocess.run([sys.executable, "-c", script], env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.count("cannot be kept") == 1


def test_the_name_follows_the_source(tmp_path: Path) -> None:
    names = set()
    for text in ("a", "b"):
        source = tmp_path / f"{text}.py"
        source.write_text(text)
        names |= {jit.KernelFile(name, source).path().name for name in ("one", "two")}
    assert len(names) == 4


def test_a_kept_kernel_runs_as_the_compiled_one() -> None:
    """Every kept kernel can be placed, and both ways of loading choose the same tokens."""
    for name in jit.KERNELS:
        assert jit.address(name)
        assert THROUGH_NUMBA or jit.KernelFile(name, jit._source(name)).load_direct() is not None, name
    logits = np.random.default_rng(0).standard_normal((3, 1001)).astype(np.float32)
    found = []
    for address in (jit.address("argmax"), jit._compiled("argmax").address):
        ids = np.full(3, -7, np.int32)
        args = np.array([ids.ctypes.data, logits.ctypes.data, 1001, 3, 1001], np.int64)
        kernel = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)(address)
        assert [kernel(args.ctypes.data, row, 3) for row in range(3)] == [0, 0, 0]
        found.append(ids.tolist())
    assert found[0] == found[1] == logits.argmax(1).tolist()


@pytest.mark.parametrize("change", ["cut", "machine", "symbol"])
def test_objects_that_cannot_be_placed_are_refused(change: str) -> None:
    jit.address("rows_commit")
    parts = jit.KernelFile("rows_commit", jit._source("rows_commit"))._read()
    assert parts is not None
    symbol, code, _ = parts
    if change == "cut":
        code = code[: len(code) // 2]
    elif change == "machine":
        code = code[:18] + b"\xb7\x00" + code[20:]
    else:
        symbol = b"another"
    with pytest.raises(NotLoadable):
        LoadedObject(code, symbol.decode())


def test_importing_the_backend_does_not_import_numba() -> None:
    code = "import sys, metrale.backends.cpu.ops, metrale.backends.cpu.backend; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_warm_up_tells_its_progress() -> None:
    told: list[tuple[int, int, str]] = []
    jit.warm_up(lambda done, total, name: told.append((done, total, name)))
    assert [name for _, _, name in told] == [*jit.KERNELS, ""]
    assert [done for done, _, _ in told] == list(range(len(jit.KERNELS) + 1))
    assert all(jit.address(name) for name in jit.KERNELS)
