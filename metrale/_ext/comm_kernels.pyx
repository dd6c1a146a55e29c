"""The native part of the thread Comm: a group's meeting place, and the addresses of its collectives (comm.h)."""

from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport free

from metrale.errors import DeviceError

cdef extern from "comm.h" nogil:
    int MT_COMM_MAX_RANKS
    ctypedef struct mt_group:
        pass
    mt_group *mt_group_create(int32_t size, int64_t timeout_ns)
    void mt_group_abort(mt_group *group)
    int mt_group_aborted(mt_group *group)
    int32_t mt_all_reduce(const void *words, int32_t tile, int32_t tiles)
    int32_t mt_all_gather(const void *words, int32_t tile, int32_t tiles)
    int32_t mt_broadcast(const void *words, int32_t tile, int32_t tiles)


def all_reduce_address() -> int:
    """Return the kernel of ``(group, rank, x, n)``: x (n,) float32 in place, summed in rank order."""
    return <uintptr_t>&mt_all_reduce


def all_gather_address() -> int:
    """Return the kernel of ``(group or 0, rank, out, x, rows, row_bytes)``."""
    return <uintptr_t>&mt_all_gather


def broadcast_address() -> int:
    """Return the kernel of ``(group, rank, x, bytes, root)``."""
    return <uintptr_t>&mt_broadcast


cdef class Group:
    """Where the ranks of one process meet. Lives as long as any rank or program that names it."""

    cdef mt_group *group
    cdef readonly int size

    def __cinit__(self, int size, double timeout_s):
        if size < 1 or size > MT_COMM_MAX_RANKS or not timeout_s > 0:
            raise DeviceError(f"comm: expected 1 to {MT_COMM_MAX_RANKS} ranks and a positive timeout, "
                              f"got {size} and {timeout_s}; "
                              "correct them", code="device.comm")
        self.group = mt_group_create(size, <int64_t>(min(timeout_s, 1e6) * 1e9))
        if self.group == NULL:
            raise MemoryError
        self.size = size

    def __dealloc__(self):
        free(self.group)

    @property
    def address(self) -> int:
        """Return the address that kernels take."""
        return <uintptr_t>self.group

    @property
    def aborted(self) -> bool:
        """Say whether a rank has failed; then every collective raises, and only a new group helps."""
        return mt_group_aborted(self.group) != 0

    def abort(self) -> None:
        """Make every rank's present and later collective fail; harmless twice."""
        mt_group_abort(self.group)
