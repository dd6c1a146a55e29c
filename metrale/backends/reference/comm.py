"""Ranks as threads of one process, meeting at a barrier: tensor parallelism that can be tested anywhere."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from metrale.backends.base import Comm
from metrale.errors import DeviceError

_TIMEOUT_S = 60.0  # a rank that never comes would otherwise hang the others


class ReferenceComm(Comm):
    """One rank of a group; every rank runs the same collectives in the same order, each in its own thread."""

    def __init__(self, rank: int, barrier: threading.Barrier, desk: list[Any]) -> None:
        self.rank = rank
        self.size = barrier.parties
        self._barrier = barrier
        self._desk = desk

    @classmethod
    def group(cls, size: int) -> list[ReferenceComm]:
        """Return the ranks of a new group."""
        barrier = threading.Barrier(size)
        desk: list[Any] = [None] * size
        return [cls(rank, barrier, desk) for rank in range(size)]

    def exchange(self, x: Any) -> list[Any]:
        """Return copies of every rank's array, in rank order.

        Raises: DeviceError (``comm.broken``) when a rank failed or did not come.
        """
        try:
            self._desk[self.rank] = np.array(x)
            self._barrier.wait(_TIMEOUT_S)
            found = list(self._desk)
            self._barrier.wait(_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise DeviceError(
                f"rank {self.rank} of {self.size}: expected every rank at a collective, got a broken group; see the failure of "
                "the other rank",
                code="comm.broken",
            ) from None
        return found

    def abort(self) -> None:
        """Break the group, so that ranks that wait raise instead of hanging."""
        self._barrier.abort()
