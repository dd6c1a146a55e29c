"""The host's end of the result ring: wait for a sequence number, then read the ids.

The device writes a result's ids first and its sequence number last, so the number standing in the header, read with acquire,
means that the rest is there. Waiting releases the GIL, and asks the caller's `poll` now and then, because a fault on the
device would otherwise mean waiting for a number that never comes.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, nanosleep, timespec

from metrale.errors import DeviceError

cdef extern from * nogil:
    """
    #include "futex.h"
    #define mt_load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    """
    int32_t mt_load_acquire(const int32_t *word)
    void mt_pause()

cdef enum:
    SPIN_NS = 50000  # about the length of a short step's tail; longer waits sleep between looks
    SLEEP_NS = 50000


cdef int64_t now_ns() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec


cdef class RingReader:
    """Reads results from pinned memory: header (depth, 4) int32 (number, rows, flags, unused) and ids (depth, R) int32.

    Holds both buffers as long as it lives. Numbers count from 1 and live in entry ``number % depth``.
    """

    cdef const int32_t[:, ::1] header
    cdef const int32_t[:, ::1] ids
    cdef readonly int depth

    def __init__(self, header, ids) -> None:
        self.header = header
        self.ids = ids
        if self.header.shape[1] != 4 or self.header.shape[0] < 1 or self.ids.shape[0] != self.header.shape[0]:
            raise DeviceError(f"result ring: expected header (depth, 4) and ids (depth, rows), got {tuple(header.shape)} and "
                              f"{tuple(ids.shape)}; this is a bug in the caller", code="op.shape")
        self.depth = self.header.shape[0]

    cdef const int32_t *entry(self, int32_t number) noexcept:
        return &self.header[number % self.depth, 0]

    def ready(self, int32_t number) -> bool:
        """Say whether the result is there."""
        return number > 0 and mt_load_acquire(self.entry(number)) == number

    def wait(self, int32_t number, poll=None, double timeout_s=60.0) -> None:
        """Wait for a result.

        poll: called between looks, with the GIL; it returns whether the work that writes the result is over (`Event.query`),
        or raises after a fault.
        Raises: what `poll` raises; DeviceError ``result.missing`` when the work is over without the result or a later result
                has taken its entry, ``result.timeout``
        """
        cdef const int32_t *word
        cdef int64_t start, deadline
        cdef timespec pause_for
        cdef int32_t seen = 0
        cdef bint over
        cdef int _i
        if number <= 0:
            raise DeviceError(f"result ring: expected a result number from 1, got {number}; this is a bug in the caller",
                              code="result.missing")
        word = self.entry(number)
        pause_for.tv_sec = 0
        pause_for.tv_nsec = SLEEP_NS
        start = now_ns()
        deadline = start + <int64_t>(timeout_s * 1e9)
        while True:
            seen = mt_load_acquire(word)
            if seen == number:
                return
            if seen > number:
                raise DeviceError(f"result ring: expected result {number}, "
                                  f"but result {seen} has taken its entry; read results before "
                                  f"{self.depth} more are launched", code="result.missing")
            with nogil:
                if now_ns() - start < SPIN_NS:
                    for _i in range(256):
                        if mt_load_acquire(word) == number:
                            break
                        mt_pause()
                else:
                    nanosleep(&pause_for, NULL)
            PyErr_CheckSignals()
            over = poll is not None and bool(poll())
            if over and mt_load_acquire(word) != number:
                raise DeviceError(f"result ring: expected result {number} at the end of its step, "
                                  f"got {mt_load_acquire(word)}; the step "
                                  "did not run to its end", code="result.missing")
            if now_ns() > deadline:
                raise DeviceError(f"result ring: expected result {number} within {timeout_s:g} s, "
                                  f"got none; the device hangs or is "
                                  "overloaded", code="result.timeout")

    def read(self, int32_t number, int rows) -> tuple[list[int], int]:
        """Return the first `rows` ids and the flags of a result that is there.

        Raises: DeviceError ``result.missing`` when it is not, or has fewer rows
        """
        cdef const int32_t *head = self.entry(number if number > 0 else 0)
        cdef const int32_t *ids
        cdef int i
        if number <= 0 or mt_load_acquire(head) != number or rows < 0 or head[1] < rows or rows > self.ids.shape[1]:
            raise DeviceError(f"result ring: expected result {number} of {rows} rows, "
                              f"got {head[0]} of {head[1]}; wait for it first",
                              code="result.missing")
        if rows == 0:
            return [], head[2]
        ids = &self.ids[number % self.depth, 0]
        return [ids[i] for i in range(rows)], head[2]
