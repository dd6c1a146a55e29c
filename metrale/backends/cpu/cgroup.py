"""What the control group of this process allows: processors and memory, cgroup v1 and v2.

A limit may stand at any level between the process's group and the root it can see; the tightest counts. Inside a container
the paths of /proc/self/cgroup may lie outside the visible mount; then the mount's root is the container's group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"


def _read(path: Path) -> str | None:
    """Return a small file's text, or None where it does not exist or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _levels(mount: Path, inside: str) -> Iterator[Path]:
    """Yield the group's folder and its ancestors up to the mount; only the mount when the path is not visible."""
    at = mount / inside.lstrip("/")
    while at != mount and mount in at.parents:
        if at.is_dir():
            yield at
        at = at.parent
    yield mount


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (cgroup version, folder) that may limit this process, the nearest first."""
    mounts = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[1] == "":
            base = mounts if (mounts / "cgroup.controllers").exists() else mounts / "unified"
            yield from ((2, level) for level in _levels(base, parts[2]))
        elif controller in parts[1].split(","):
            base = next((p for p in (mounts / parts[1], mounts / controller) if p.is_dir()), mounts / controller)
            yield from ((1, level) for level in _levels(base, parts[2]))


def _cpu_quota(version: int, folder: Path) -> float | None:
    """Return one group's processor quota."""
    if version == 2:
        quota, period = [*(_read(folder / "cpu.max") or "max").split(), "100000"][:2]
    else:
        quota = _read(folder / "cpu.cfs_quota_us") or "-1"
        period = _read(folder / "cpu.cfs_period_us") or "100000"
    if not (quota.isdigit() and period.isdigit()) or int(quota) == 0 or int(period) == 0:
        return None
    return int(quota) / int(period)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many processors the quota allows, or None without one."""
    found = [quota for version, folder in _groups("cpu", root) if (quota := _cpu_quota(version, folder)) is not None]
    return min(found, default=None)


def _memory(version: int, folder: Path) -> tuple[int, int] | None:
    """Return one group's (free, limit) bytes; page cache that can be dropped counts as free."""
    limit = _read(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
    used = _read(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
    if limit is None or not limit.isdigit() or int(limit) >= _UNLIMITED or used is None or not used.isdigit():
        return None
    cache = 0
    key = "inactive_file" if version == 2 else "total_inactive_file"
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            cache = int(value)
    return max(0, int(limit) - int(used) + cache), int(limit)


def memory(root: Path = ROOT) -> tuple[int, int]:
    """Return (free, total) bytes for this process: the machine's, or the tightest group's where that is less."""
    machine = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            machine[name] = int(words[0]) * 1024
    total = machine.get("MemTotal", 0)
    free = machine.get("MemAvailable", machine.get("MemFree", 0))
    for version, folder in _groups("memory", root):
        group = _memory(version, folder)
        if group is not None:
            free, total = min(free, group[0]), min(total, group[1]) if total else group[1]
    return free, total
