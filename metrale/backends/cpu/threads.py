"""How many threads the CPU backend uses, and why.

One a physical core: the second hardware thread of a core adds nothing to matrix products that already fill its vector
units and the memory bus, and a barrier then waits for the slower of the two. Never more than the processors that
affinity and the cgroup's quota allow: a team with more threads than processors waits for threads that are not running.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from metrale import env
from metrale.backends.cpu import cgroup
from metrale.errors import ConfigError

MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """A number of threads and what it comes from."""

    count: int
    reason: str


def _parse_list(text: str) -> frozenset[int]:
    """Read the kernel's list form, ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def physical_cores(processors: Collection[int], root: Path = cgroup.ROOT) -> int:
    """Count the cores behind a set of processors; processors of unknown topology count as one core each."""
    cores: set[frozenset[int]] = set()
    for cpu in processors:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings: frozenset[int] = frozenset()
        for name in ("core_cpus_list", "thread_siblings_list"):
            try:
                siblings = _parse_list((folder / name).read_text())
                break
            except OSError:
                continue
        cores.add(siblings or frozenset((cpu,)))
    return len(cores)


def affinity() -> set[int]:
    """Return the processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _checked(count: int, source: str) -> int:
    if not 1 <= count <= MAX_THREADS:
        raise ConfigError(f"{source}: expected 1 to {MAX_THREADS} threads, got {count}; leave it out to let metrale choose",
                          code="engine.threads")
    return count


def choose_threads(requested: int | None = None, *, root: Path = cgroup.ROOT,
                   processors: Collection[int] | None = None) -> ThreadChoice:
    """Choose the number of threads: the engine option, else METRALE_THREADS, else what the machine offers.

    Raises: ConfigError (``engine.threads``) for a number outside 1 to 1024 or text that is no number.
    """
    if requested is not None:
        return ThreadChoice(_checked(requested, "threads"), "the engine option `threads`")
    text = env.get("METRALE_THREADS")
    if not text.strip().isdigit():
        raise ConfigError(f"METRALE_THREADS: expected a number, got {text!r}; unset it to let metrale choose",
                          code="engine.threads")
    if int(text) > 0:
        return ThreadChoice(_checked(int(text), "METRALE_THREADS"), "METRALE_THREADS")
    allowed = affinity() if processors is None else processors
    cores = physical_cores(allowed, root)
    quota = cgroup.cpu_quota(root)
    reason = f"{cores} physical cores behind {len(allowed)} allowed processors"
    count = cores
    if quota is not None:
        # Rounded down: a thread beyond the quota is stopped for the rest of each period, and the others wait for it.
        count = max(1, min(cores, math.floor(quota)))
        reason += f", cgroup quota {quota:g} processors"
    return ThreadChoice(min(count, MAX_THREADS), reason)
