"""From kernel sources to cubins: one flat text a variant, compiled by NVRTC, kept in an on-disk cache.

The text that is compiled is the key: headers are inlined, and the arch, the options and the compiler's version are hashed
with it. So an edited header, a changed constant of the contract or another compiler can never meet an old cubin. (CuPy's
own cache is not used: its key leaves out the contents of included headers.)
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final, Protocol

from metrale import paths
from metrale.backends.cuda.variants import Variant, prelude
from metrale.errors import DeviceError
from metrale.log import get_logger

log = get_logger(__name__)

# IEEE division, square roots and subnormal numbers: `quantize` is exact on every backend.
OPTIONS: Final = ("--std=c++17", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=true")
_INCLUDE: Final = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_ENTRY: Final = re.compile(r"^KERNEL\((\w+)\)\(([^)]*)\)", re.MULTILINE)
_SCALARS: Final = {"int": "i", "i64": "l", "float": "f"}
_MAGIC: Final = b"metrale cubin 1\n"


class Compiler(Protocol):
    """What the cache asks of NVRTC."""

    version: tuple[int, int]

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> bytes:
        """Return a cubin. Raises: DeviceError (``device.compile``) with the compiler's log."""


# --- text ------------------------------------------------------------------------------------------------------------


@cache
def source(name: str) -> str:
    """Return a file of `kernels/`."""
    return (resources.files("metrale.backends.cuda") / "kernels" / name).read_text(encoding="utf-8")


def flatten(variant: Variant) -> str:
    """Return a variant's whole text: the prelude, each header once where it is first included, the file."""
    return prelude(variant) + inlined(f"{variant.file}.cu", set())


def inlined(name: str, done: set[str]) -> str:
    """Return a file with its headers in place; `done` names those already inlined."""

    def header(match: re.Match[str]) -> str:
        inner = match[1]
        if inner in done:
            return ""
        done.add(inner)
        return inlined(f"include/{inner}", done)

    return _INCLUDE.sub(header, source(name))


def entry_points(variant: Variant) -> dict[str, str]:
    """Return the file's kernels: name without suffix -> a letter a parameter.

    p: pointer, i: int32, l: int64, f: float32. A launch converts its arguments by these letters, so that they cannot
    disagree with the kernel in width.
    """
    return {m[1]: "".join(_letter(p) for p in m[2].split(",")) for m in _ENTRY.finditer(source(f"{variant.file}.cu"))}


def _letter(parameter: str) -> str:
    return "p" if "*" in parameter else _SCALARS[parameter.split()[0]]


# --- cubins ----------------------------------------------------------------------------------------------------------


def options(arch: str) -> tuple[str, ...]:
    """Return the compiler's options for a target such as sm_90a."""
    return (f"--gpu-architecture={arch}", *OPTIONS)


def key(text: str, arch: str, version: tuple[int, int]) -> str:
    """Return the hash of everything that decides what the compiler puts out."""
    parts = (text, *options(arch), f"nvrtc {version[0]}.{version[1]}")
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def cubin(variant: Variant, arch: str, compiler: Compiler) -> bytes:
    """Return a variant's cubin, from the cache where it is there and whole.

    Raises: DeviceError (``device.compile``).
    """
    text = flatten(variant)
    path = paths.cache_dir() / "cuda" / f"{key(text, arch, compiler.version)}.cubin"
    found = _read(path)
    if found is None:
        log.info("compiling %s%s for %s", variant.file, variant.suffix, arch)
        found = compiler.compile(text, f"{variant.file}{variant.suffix}.cu", options(arch))
        _write(path, found)
    return found


def _read(path: Path) -> bytes | None:
    """Return a cached cubin, or None where there is none or the file is damaged."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    head = len(_MAGIC) + 32
    if not raw.startswith(_MAGIC) or hashlib.sha256(raw[head:]).digest() != raw[len(_MAGIC) : head]:
        log.warning("%s: expected a whole cubin, got a damaged file; compiling it again", path)
        return None
    return raw[head:]


def _write(path: Path, found: bytes) -> None:
    """Put a cubin into the cache as a whole or not at all; a cache that cannot be written costs only time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(found).digest() + found)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        log.warning("kernel cache: expected to write %s, got: %s; kernels are compiled anew in every process", path, error)


class CupyNvrtc:
    """NVRTC through CuPy's binding."""

    def __init__(self) -> None:
        """Load the library. Raises: DeviceError (``device.nvrtc``)."""
        from cupy_backends.cuda.libs import nvrtc

        self._nvrtc = nvrtc
        try:
            self.version: tuple[int, int] = nvrtc.getVersion()
        except RuntimeError as error:
            raise DeviceError(
                f"NVRTC: expected a library that loads, got: {error}; install metrale[cuda13] or metrale[cuda12]",
                code="device.nvrtc",
            ) from error

    def architectures(self) -> list[int]:
        """Return the compute capabilities it can compile for, as 10 * major + minor."""
        return list(self._nvrtc.getSupportedArchs())

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> bytes:
        """Return a cubin."""
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(text, name, (), ())
        try:
            nvrtc.compileProgram(program, options)
            return bytes(nvrtc.getCUBIN(program))
        except nvrtc.NVRTCError as error:
            raise DeviceError(
                f"{name}: expected it to compile with {' '.join(options)}, got {error}: {nvrtc.getProgramLog(program)}; a GPU "
                "newer than the compiler needs a newer nvidia-cuda-nvrtc",
                code="device.compile",
            ) from error
        finally:
            nvrtc.destroyProgram(program)
