"""The read loop: how fast this machine's threads read memory, the floor of every product with one row."""

from __future__ import annotations

import time

import numpy as np

from metrale._ext import cpu_kernels
from metrale._ext.program import Program, Team

BYTES = 1 << 30  # more than any last-level cache


def read_gb_s(threads: int, rounds: int = 5) -> float:
    """Return the best GB/s of reading 1 GiB with the C read loop, tiles claimed as a step's tiles are."""
    data = np.ones(BYTES, np.uint8)
    tiles = 256
    sums = np.empty(tiles, np.int32)
    program = Program()
    program.append(cpu_kernels.address("read_loop", cpu_kernels.supported()[0]), (sums, data, BYTES), tiles, "read")
    team = Team(threads)
    best = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        team.run(program)
        best = max(best, BYTES / (time.perf_counter() - start) / 1e9)
    team.close()
    return best
