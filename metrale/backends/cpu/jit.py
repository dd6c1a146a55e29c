"""Compile the Numba kernels on first use, or load them from the user's cache folder.

A kernel file under `kernels/` holds plain functions ``f(args, tile, tiles)``; `address` makes one a C callback
``int32 f(void *args, int32 tile, int32 tiles)``. The machine code is kept in ``<cache>/kernels``, under a name made of
everything that decides it (the file's text, Numba, llvmlite, Python, the processor and its features), so an edit or an
upgrade never meets old code. Numba's own cache is not used: it would write beside the sources and its folder is a
process-wide setting.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from metrale.log import get_logger
from metrale.paths import cache_dir

log = get_logger(__name__)

# Kernel -> file under kernels/.
KERNELS: Final[dict[str, str]] = {
    "rms_norm": "norm",
    "elementwise": "elementwise",
    "gather_rows": "elementwise",
    "rows_patch": "rows",
    "rows_begin": "rows",
    "rows_prefill": "rows",
    "rows_commit": "rows",
    "publish": "rows",
    "penalize": "penalize",
    "argmax": "sample",
    "sample": "sample",
    "logprobs": "logprobs",
}
FORMAT: Final = b"metrale kernel 1\n"  # begins each cache file; then the SHA-256 of the rest


@cache
def address(name: str) -> int:
    """Return the address of a kernel; the first call imports Numba and loads or compiles it.

    Raises: KeyError for an unknown name.
    """
    return int(_compiled(name).address)


def warm_up(progress: Callable[[int, int, str], None] | None = None) -> None:
    """Load or compile every kernel; `progress` is told (done, of how many, the next one's name)."""
    for done, name in enumerate(KERNELS):
        if progress is not None:
            progress(done, len(KERNELS), name)
        address(name)
    if progress is not None:
        progress(len(KERNELS), len(KERNELS), "")


@cache
def _compiled(name: str) -> Any:
    """Return the callback; kept for the life of the process, since programs hold its address."""
    from numba import types
    from numba.core.ccallback import CFunc

    module = importlib.import_module(f"metrale.backends.cpu.kernels.{KERNELS[name]}")
    function = getattr(module, name)
    signature = (types.voidptr, types.int32, types.int32), types.int32
    callback: Any = CFunc(function, signature, locals={}, options={"error_model": "numpy"})
    callback._cache = KernelCache(name, Path(str(module.__file__)))
    callback.compile()
    return callback


class KernelCache:
    """One kernel's machine code on disk, in the form Numba's `CFunc` asks for.

    A file that cannot be read or written costs a compilation and a line in the log, never an error.
    """

    def __init__(self, name: str, source: Path) -> None:
        """Serve kernel `name` of the file `source`."""
        self.name = name
        self.source = source

    def path(self, target: Any) -> Path:
        """Return where the code for Numba's target context lies."""
        import llvmlite
        import numba

        parts = (self.name, numba.__version__, llvmlite.__version__, sys.version, str(target.codegen().magic_tuple()))
        digest = hashlib.sha256("\n".join(parts).encode() + self.source.read_bytes()).hexdigest()
        return cache_dir() / "kernels" / f"{self.name}-{digest[:24]}.bin"

    def load_overload(self, _signature: Any, target: Any) -> Any | None:
        """Return the compiled kernel, or None when it has to be compiled."""
        from numba.core import compiler

        target.refresh()
        try:
            data = self.path(target).read_bytes()
        except OSError:
            return None
        head = len(FORMAT) + 32
        if data[:head] != FORMAT + hashlib.sha256(data[head:]).digest():
            log.warning("kernel %s: its cache file is damaged; compiling it again", self.name)
            return None
        rebuild: Any = compiler.CompileResult._rebuild
        return rebuild(target, *pickle.loads(data[head:]))

    def save_overload(self, _signature: Any, result: Any) -> None:
        """Keep a compiled kernel; the file appears whole or not at all."""
        from numba.core import serialize

        dumps: Any = serialize.dumps
        payload: bytes = dumps(result._reduce())
        path = self.path(result.target_context)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".part", delete=False) as file:
                try:
                    file.write(FORMAT + hashlib.sha256(payload).digest() + payload)
                    file.close()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            log.warning("kernel %s: its machine code cannot be kept (%s); it is compiled at every start", self.name, error)
