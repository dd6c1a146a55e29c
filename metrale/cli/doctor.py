"""`metrale doctor`: what this machine offers, and each problem with its remedy."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from metrale import __version__, env, paths
from metrale.errors import MetraleError

HELP = "check this machine: CPU features, threads, memory, compiler, libraries, CUDA"
EXAMPLES = "  metrale doctor"


class Finding(NamedTuple):
    """One line of the report; a `remedy` means there is a problem."""

    what: str
    found: str
    remedy: str | None = None


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options (none)."""


def run(args: argparse.Namespace) -> int:
    """Print every finding; 1 when one of them keeps metrale from running."""
    fatal = False
    for check in CHECKS:
        for what, found, remedy in check():
            print(f"{'!' if remedy else ' '} {what:14} {found}" + (f"; {remedy}" if remedy else ""))
            fatal = fatal or (remedy is not None and what in ("python", "kernels", "libraries"))
    return 1 if fatal else 0


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    old = "install Python 3.11 or newer" if sys.version_info < (3, 11) else None
    yield Finding("metrale", f"{__version__} on {platform.system()} {platform.machine()}")
    yield Finding("python", version, old)


def _environment() -> Iterator[Finding]:
    try:
        env.check()
        used = [name for name in env.VARIABLES if name in os.environ]
        yield Finding("environment", ", ".join(used) or "no METRALE_ variable set")
    except MetraleError as error:
        yield Finding("environment", "a METRALE_ variable is wrong", str(error))


def _libraries() -> Iterator[Finding]:
    for name in ("numpy", "numba", "safetensors", "tokenizers", "jinja2", "huggingface_hub"):
        try:
            yield Finding("libraries", f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding("libraries", f"{name} is missing", f"run `python -m pip install {name}`")


def _cpu() -> Iterator[Finding]:
    try:
        from metrale._ext import cpu_kernels
        from metrale.backends.cpu.backend import choose_isa
    except ImportError as error:
        yield Finding(
            "kernels",
            f"the compiled kernels do not load ({error})",
            "install a C compiler and run `python -m pip install -e .` again",
        )
        return
    yield Finding("cpu", ", ".join(sorted(cpu_kernels.features())) or "no features beyond the baseline")
    try:
        yield Finding("kernels", f"{choose_isa(None)} (built: {', '.join(cpu_kernels.variants())})")
    except MetraleError as error:
        yield Finding("kernels", "METRALE_ISA does not fit this machine", str(error))


def _threads() -> Iterator[Finding]:
    from metrale.backends.cpu.threads import choose_threads

    try:
        choice = choose_threads()
        yield Finding("threads", f"{choice.count}: {choice.reason}")
    except MetraleError as error:
        yield Finding("threads", "METRALE_THREADS is wrong", str(error))


def _memory() -> Iterator[Finding]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("memory", f"{pages / (1 << 30):.1f} GiB")
    folder = paths.cache_dir()
    probe = folder
    while not probe.exists():
        probe = probe.parent
    free = shutil.disk_usage(probe).free
    tight = "free some space or set METRALE_CACHE to another folder" if free < (1 << 30) else None
    if not os.access(probe, os.W_OK):
        yield Finding("cache", f"{folder} cannot be written", "set METRALE_CACHE to a folder of yours")
        return
    yield Finding("cache", f"{folder}, {free / (1 << 30):.1f} GiB free", tight)


def _compiler() -> Iterator[Finding]:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    yield Finding("compiler", found or "none (needed only to build metrale from source)")


def _cuda() -> Iterator[Finding]:
    if importlib.util.find_spec("cupy") is None:
        yield Finding("cuda", "CuPy is not installed: metrale runs on the CPU")
        return
    from metrale.backends.cuda.probe import describe

    found, remedy = describe()
    yield Finding("cuda", found, remedy)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _environment,
    _libraries,
    _cpu,
    _threads,
    _memory,
    _compiler,
    _cuda,
)
