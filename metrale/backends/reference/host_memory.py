"""How much memory the host offers: the machine's, or less where a cgroup says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUPS: Final = (  # limit and use, version 2 then version 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def host_memory() -> tuple[int, int]:
    """Return (free, total) bytes."""
    free, total = _machine()
    for limit_file, used_file in _CGROUPS:
        limit, used = _number(limit_file), _number(used_file)
        if limit is not None and used is not None and limit < total:
            # Page cache counts as used but gives way, so that the machine's own figure may be the smaller one.
            return min(free, limit), limit
    return free, total


def _machine() -> tuple[int, int]:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:  # not Linux
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        return total, total
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if ":" in line}
    return 1024 * kib["MemAvailable"], 1024 * kib["MemTotal"]


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
