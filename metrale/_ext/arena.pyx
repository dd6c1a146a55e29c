"""Memory that knows where it is: aligned blocks and the registry of their address ranges.

A captured program names raw addresses, so the capture must be able to ask whether an address belongs to memory that the
backend owns. Every block enters the registry at birth and leaves it when the last array over it is gone.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove, memset

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **out, size_t alignment, size_t size)

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *address, size_t size, int prot, int flags, int fd, long offset)
    int munmap(void *address, size_t size)
    int madvise(void *address, size_t size, int advice)
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE, MADV_HUGEPAGE
    void *MAP_FAILED

cdef Py_ssize_t HUGE_PAGE = 2 << 20
cdef Py_ssize_t MAPPED_FROM = 1 << 20  # smaller blocks come from malloc
cdef Py_ssize_t ALIGNMENT = 64  # a cache line, and the widest vector


cdef class Arena:
    """A registry of address ranges, and the allocator that fills it. Used with the GIL held."""

    def __cinit__(self):
        self.starts = NULL
        self.ends = NULL
        self.count = self.room = self.total = 0

    def __dealloc__(self):
        free(self.starts)
        free(self.ends)

    def __len__(self) -> int:
        """Return the number of live blocks."""
        return self.count

    @property
    def nbytes(self) -> int:
        """Return the bytes of the live blocks (reserved, not necessarily touched)."""
        return self.total

    def alloc(self, Py_ssize_t nbytes, bint zero=False):
        """Return a `Block` of `nbytes`, aligned to 64 bytes. Large ones are mapped: zero, and resident only where touched.

        Raises: MemoryError
        """
        if nbytes < 0:
            raise ValueError("nbytes: expected at least 0")
        cdef Block block = Block.__new__(Block)
        block.take(max(nbytes, 1), zero)
        block.size = nbytes
        block.arena = self
        self.insert(<uintptr_t>block.data, <uintptr_t>block.data + max(nbytes, 1))
        return block

    def contains(self, uintptr_t address, Py_ssize_t nbytes) -> bool:
        """Say whether [address, address + nbytes) lies inside one live block."""
        return self.holds(address, nbytes)

    cdef Py_ssize_t rank(self, uintptr_t address) noexcept:
        """Return how many blocks start at or before `address`."""
        cdef Py_ssize_t low = 0, high = self.count, middle
        while low < high:
            middle = (low + high) >> 1
            if self.starts[middle] <= address:
                low = middle + 1
            else:
                high = middle
        return low

    cdef bint holds(self, uintptr_t address, Py_ssize_t nbytes) noexcept:
        cdef Py_ssize_t at = self.rank(address)
        return at > 0 and nbytes >= 0 and address <= self.ends[at - 1] and <uintptr_t>nbytes <= self.ends[at - 1] - address

    cdef int insert(self, uintptr_t start, uintptr_t end) except -1:
        cdef Py_ssize_t room = self.room, at = self.rank(start)
        cdef void *grown
        if self.count == room:
            room = 2 * room + 64
            grown = realloc(self.starts, room * sizeof(uintptr_t))
            if grown == NULL:
                raise MemoryError
            self.starts = <uintptr_t *>grown
            grown = realloc(self.ends, room * sizeof(uintptr_t))
            if grown == NULL:
                raise MemoryError
            self.ends = <uintptr_t *>grown
            self.room = room
        memmove(self.starts + at + 1, self.starts + at, (self.count - at) * sizeof(uintptr_t))
        memmove(self.ends + at + 1, self.ends + at, (self.count - at) * sizeof(uintptr_t))
        self.starts[at] = start
        self.ends[at] = end
        self.count += 1
        self.total += end - start
        return 0

    cdef void remove(self, uintptr_t start) noexcept:
        cdef Py_ssize_t at = self.rank(start) - 1
        if at < 0 or self.starts[at] != start:
            return  # the block was never registered: its allocation failed half-way
        self.total -= self.ends[at] - self.starts[at]
        self.count -= 1
        memmove(self.starts + at, self.starts + at + 1, (self.count - at) * sizeof(uintptr_t))
        memmove(self.ends + at, self.ends + at + 1, (self.count - at) * sizeof(uintptr_t))


cdef class Block:
    """A piece of memory with the buffer protocol; freed with the last view of it."""

    cdef void *data
    cdef void *mapping  # the whole mapping, NULL when the memory is malloc's
    cdef Py_ssize_t mapping_size
    cdef Py_ssize_t size
    cdef Arena arena

    cdef int take(self, Py_ssize_t nbytes, bint zero) except -1:
        cdef Py_ssize_t slack
        if nbytes < MAPPED_FROM:
            if posix_memalign(&self.data, ALIGNMENT, (nbytes + ALIGNMENT - 1) & -ALIGNMENT):
                self.data = NULL
                raise MemoryError
            # What nobody asked to be zero reads as NaN or -1, so that reading what nothing wrote shows.
            memset(self.data, 0 if zero else 0xFF, nbytes)
            return 0
        slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
        if nbytes > (<Py_ssize_t>1 << 62):
            raise MemoryError
        self.mapping_size = (nbytes + slack + 4095) & -4096
        self.mapping = mmap(NULL, self.mapping_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if self.mapping == MAP_FAILED:
            self.mapping = NULL
            raise MemoryError
        self.data = self.mapping
        if slack:
            self.data = <void *>((<uintptr_t>self.mapping + HUGE_PAGE - 1) & <uintptr_t>-HUGE_PAGE)
            madvise(self.data, nbytes & -HUGE_PAGE, MADV_HUGEPAGE)  # a hint: a kernel without it changes nothing
        return 0

    def __dealloc__(self):
        if self.data == NULL:
            return
        if self.arena is not None:
            self.arena.remove(<uintptr_t>self.data)
        if self.mapping != NULL:
            munmap(self.mapping, self.mapping_size)
        else:
            free(self.data)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, 0, flags)

    def __len__(self) -> int:
        """Return the size in bytes."""
        return self.size

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return <uintptr_t>self.data
