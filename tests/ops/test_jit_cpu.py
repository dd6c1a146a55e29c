"""The kernel cache: written once, loaded by the next process, never stale, never in the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from metrale.backends.cpu import jit

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from metrale.backends.cpu import jit
kernel = jit._compiled("rows_commit")
print(kernel.cache_hits, "numba" in sys.modules, kernel.address > 0)
"""


def start(cache: Path) -> str:
    """Resolve one kernel in a fresh process; return what it says."""
    environ = {"METRALE_CACHE": str(cache), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip() + (", warned" if "cannot be kept" in done.stderr else "")


def test_compiled_once_then_loaded_and_damage_is_noticed(tmp_path: Path) -> None:
    assert start(tmp_path) == "0 True True"
    (kept,) = (tmp_path / "kernels").iterdir()
    assert start(tmp_path) == "1 True True"
    data = bytearray(kept.read_bytes())
    data[-9] ^= 1
    kept.write_bytes(data)
    assert start(tmp_path) == "0 True True"
    assert start(tmp_path) == "1 True True"
    assert list((tmp_path / "kernels").iterdir()) == [kept]


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("not a folder")
    assert start(tmp_path) == "0 True True, warned"


def test_the_name_follows_the_source(tmp_path: Path) -> None:
    from numba.core.registry import cpu_target

    target, names = cpu_target.target_context, set()
    for text in ("a", "b"):
        source = tmp_path / f"{text}.py"
        source.write_text(text)
        names |= {jit.KernelCache(name, source).path(target).name for name in ("one", "two")}
    assert len(names) == 4


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
