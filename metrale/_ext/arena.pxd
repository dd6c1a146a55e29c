from libc.stdint cimport uintptr_t


cdef class Arena:
    cdef uintptr_t *starts
    cdef uintptr_t *ends
    cdef Py_ssize_t count
    cdef Py_ssize_t room
    cdef Py_ssize_t total

    cdef Py_ssize_t rank(self, uintptr_t address) noexcept
    cdef bint holds(self, uintptr_t address, Py_ssize_t nbytes) noexcept
    cdef int insert(self, uintptr_t start, uintptr_t end) except -1
    cdef void remove(self, uintptr_t start) noexcept
