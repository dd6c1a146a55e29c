"""Ranks as threads of one process: the thread Comm, and its collectives as ops.

Tensor parallelism over it equals one rank in every test, without a GPU. Each rank is a Python thread with its own
`CpuBackend` (and thread team); all run the same plan. A collective is one tile of native code that meets the other ranks, so
a captured step holds it like any other op.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from metrale._ext import comm_kernels
from metrale.backends.base import Comm, check_shape
from metrale.backends.cpu.emit import Emitter
from metrale.errors import DeviceError

TIMEOUT_S = 60.0  # a rank that stays away this long has failed
Result = TypeVar("Result")


class ThreadComm(Comm):
    """One rank of a group of threads."""

    def __init__(self, group: comm_kernels.Group, rank: int) -> None:
        """Be rank `rank` of a group; `thread_group` makes all of them."""
        self.group = group
        self.rank = rank
        self.size = group.size

    def abort(self) -> None:
        """Make the other ranks' collectives raise DeviceError (``device.comm``) instead of waiting for this rank."""
        self.group.abort()


def thread_group(size: int, *, timeout_s: float = TIMEOUT_S) -> tuple[ThreadComm, ...]:
    """Return the ranks of a new group. A group that was aborted, or has timed out, stays broken: make a new one."""
    group = comm_kernels.Group(size, timeout_s)
    return tuple(ThreadComm(group, rank) for rank in range(size))


def run_ranks(comms: tuple[ThreadComm, ...], work: Callable[[ThreadComm], Result]) -> list[Result]:
    """Run ``work(comm)`` for every rank, each in a thread of its own, and return the results in rank order.

    A rank that raises aborts the group. Then the error that came first is raised here, once all threads have ended.
    """
    results: list[Any] = [None] * len(comms)
    errors: list[BaseException] = []

    def run(comm: ThreadComm) -> None:
        try:
            results[comm.rank] = work(comm)
        except BaseException as error:  # noqa: BLE001 -- handed to the caller below
            errors.append(error)
            comm.abort()

    threads = [threading.Thread(target=run, args=(comm,), name=f"rank {comm.rank}") for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class CommOps(Emitter):
    """The collectives of `Ops`; with one rank all_reduce and broadcast do nothing and all_gather copies."""

    def _group(self, name: str) -> comm_kernels.Group | None:
        if self.comm.size == 1:
            return None
        if not isinstance(self.comm, ThreadComm):
            raise DeviceError(f"{name}: expected a ThreadComm, got {type(self.comm).__name__}; the CPU backend has no other",
                              code="device.comm")
        return self.comm.group

    def all_reduce(self, x: Any) -> None:
        """Sum x (float32, contiguous) over the ranks in place, in rank order."""
        _check("all_reduce", "x", x, np.float32)
        group = self._group("all_reduce")
        if group is not None:
            self.emit("all_reduce", comm_kernels.all_reduce_address(), 1, (group.address, self.comm.rank, x, x.size))

    def all_gather(self, out: Any, x: Any) -> None:
        """Concatenate along the last axis in rank order: out (T, N * size), x (T, N), contiguous, of one dtype."""
        check_shape("all_gather", "x", (None, None), x.shape)
        rows, width = (int(n) for n in x.shape)
        check_shape("all_gather", "out", (rows, width * self.comm.size), out.shape)
        _check("all_gather", "x", x, out.dtype)
        _check("all_gather", "out", out, out.dtype)
        group = self._group("all_gather")
        address = 0 if group is None else group.address
        args = (address, self.comm.rank, out, x, rows, width * x.itemsize)
        self.emit("all_gather", comm_kernels.all_gather_address(), 1, args)

    def broadcast(self, x: Any, *, root: int = 0) -> None:
        """Copy the root's x (contiguous) to every rank."""
        _check("broadcast", "x", x, x.dtype)
        if not 0 <= root < self.comm.size:
            raise DeviceError(f"broadcast: expected a root among {self.comm.size} ranks, got {root}; correct it",
                              code="op.args")
        group = self._group("broadcast")
        if group is not None:
            args = (group.address, self.comm.rank, x, x.nbytes, root)
            self.emit("broadcast", comm_kernels.broadcast_address(), 1, args, root=root)


def _check(op: str, what: str, x: Any, dtype: Any) -> None:
    if x.dtype != dtype or not x.flags.c_contiguous:
        message = f"{op}: expected {what} as contiguous {np.dtype(dtype)}, got {x.dtype} with strides {x.strides}; copy it"
        raise DeviceError(message, code="op.dtype")
