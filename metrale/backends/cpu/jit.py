"""Compile the Numba kernels on first use, or load them from the user's cache folder.

A kernel file under `kernels/` holds plain functions ``f(args, tile, tiles)``; `address` makes one a C callback
``int32 f(void *args, int32 tile, int32 tiles)``. The machine code is kept in ``<cache>/kernels``, under a name made of
everything that decides it (the file's text, Numba, llvmlite, Python, the processor and its features), so an edit or an
upgrade never meets old code. A kept kernel is placed into memory by `object_code`, without importing Numba: that import
and LLVM's pages cost 0.5 s and 70 MB a process. Where that loader does not apply (other processors), Numba loads it.
Numba's own cache is not used: it would write beside the sources and its folder is a process-wide setting.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import pickle
import platform
import struct
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from metrale.backends.cpu.object_code import LoadedObject, NotLoadable
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
FORMAT: Final = b"metrale kernel 2\n"  # begins each cache file
LENGTHS: Final = struct.Struct("<QQ")


@cache
def address(name: str) -> int:
    """Return the address of a kernel; the first call loads it, or imports Numba and compiles it.

    Raises: KeyError for an unknown name.
    """
    kept = KernelFile(name, _source(name))
    direct = kept.load_direct()
    if direct is not None:
        _LOADED.append(direct)
        return direct.address
    return int(_compiled(name).address)


_NOT_KEPT: Final[set[str]] = set()  # folders that have been warned of

# Code that programs hold addresses of stays for the life of the process.
_LOADED: Final[list[LoadedObject]] = []


def warm_up(progress: Callable[[int, int, str], None] | None = None) -> None:
    """Load or compile every kernel; `progress` is told (done, of how many, the next one's name)."""
    for done, name in enumerate(KERNELS):
        if progress is not None:
            progress(done, len(KERNELS), name)
        address(name)
    if progress is not None:
        progress(len(KERNELS), len(KERNELS), "")


def _source(name: str) -> Path:
    return Path(__file__).with_name("kernels") / f"{KERNELS[name]}.py"


@cache
def _compiled(name: str) -> Any:
    """Return the callback as Numba compiles it or loads it; kept for the life of the process."""
    from numba import types
    from numba.core.ccallback import CFunc

    module = importlib.import_module(f"metrale.backends.cpu.kernels.{KERNELS[name]}")
    function = getattr(module, name)
    signature = (types.voidptr, types.int32, types.int32), types.int32
    callback: Any = CFunc(function, signature, locals={}, options={"error_model": "numpy"})
    callback._cache = KernelFile(name, _source(name))
    callback.compile()
    return callback


@cache
def _identity() -> str:
    """Return what decides the machine code beside the source: versions, interpreter, processor, Numba's own settings."""
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite")]
    settings = sorted(f"{key}={value}" for key, value in os.environ.items() if key.startswith("NUMBA_"))
    return "\n".join([*versions, sys.version, platform.machine(), *settings, *_processor()])


def _processor() -> list[str]:
    """Return the lines of /proc/cpuinfo that name the first processor and its features; empty where there is none."""
    keys = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return [platform.processor()]
    return [line for line in first.splitlines() if line.split("\t")[0].split(":")[0].strip() in keys]


def _warn_not_kept(folder: str, error: str) -> None:
    """Warn once a folder that kernels cannot be kept there, whichever kernel met it first and how."""
    if folder not in _NOT_KEPT:
        _NOT_KEPT.add(folder)
        log.warning("kernels: their machine code cannot be kept in %s (%s); it is compiled at every start", folder, error)


class KernelFile:
    """One kernel's machine code on disk; also in the form Numba's `CFunc` asks a cache for.

    The file: FORMAT, SHA-256 of the rest, lengths of the next two, the symbol, the object file, Numba's own pickle. One
    that cannot be read or written costs a compilation and a line in the log, never an error.
    """

    def __init__(self, name: str, source: Path) -> None:
        """Serve kernel `name` of the file `source`."""
        self.name = name
        self.source = source

    def path(self) -> Path:
        """Return where the code lies."""
        digest = hashlib.sha256(f"{self.name}\n{_identity()}\n".encode() + self.source.read_bytes()).hexdigest()
        return cache_dir() / "kernels" / f"{self.name}-{digest[:24]}.bin"

    def load_direct(self) -> LoadedObject | None:
        """Return the kernel placed into memory, or None when it must go through Numba."""
        parts = self._read() if platform.machine() == "x86_64" else None
        if parts is None:
            return None
        try:
            return LoadedObject(parts[1], parts[0].decode())
        except NotLoadable as error:
            log.info("kernel %s: loaded through Numba, not directly: %s", self.name, error)
            return None

    def load_overload(self, _signature: Any, target: Any) -> Any | None:
        """Return the compiled kernel for Numba, or None when it has to be compiled."""
        from numba.core import compiler

        target.refresh()
        parts = self._read()
        if parts is None:
            return None
        rebuild: Any = compiler.CompileResult._rebuild
        return rebuild(target, *pickle.loads(parts[2]))

    def save_overload(self, _signature: Any, result: Any) -> None:
        """Keep a compiled kernel; the file appears whole or not at all."""
        from numba.core import serialize

        dumps: Any = serialize.dumps
        symbol = result.fndesc.llvm_cfunc_wrapper_name.encode()
        pickled: bytes = dumps(result._reduce())  # finishes the library, which has no object before
        code: bytes = result.library._get_compiled_object()
        payload = LENGTHS.pack(len(symbol), len(code)) + symbol + code + pickled
        path = self.path()
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
            _warn_not_kept(str(path.parent), str(error))

    def _read(self) -> tuple[bytes, bytes, bytes] | None:
        """Return symbol, object file and pickle, or None when there is no whole file."""
        try:
            data = self.path().read_bytes()
        except OSError:
            return None
        head = len(FORMAT) + 32
        if data[:head] != FORMAT + hashlib.sha256(data[head:]).digest():
            log.warning("kernel %s: its cache file is damaged; compiling it again", self.name)
            return None
        name_bytes, code_bytes = LENGTHS.unpack_from(data, head)
        start = head + LENGTHS.size
        middle = start + name_bytes
        return data[start:middle], data[middle : middle + code_bytes], data[middle + code_bytes :]
