"""The C kernels of the CPU backend: their addresses, and which instruction sets this machine runs.

Nothing here computes; a kernel is called by address through `metrale._ext.program` or ctypes.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t

cdef extern from "abi.h":
    ctypedef union arg:
        void *p
        int64_t i
        double f
    ctypedef int32_t (*kernel_fn)(const arg *args, int32_t tile, int32_t tiles) noexcept nogil
    const char *metrale_variant(int index)
    int metrale_variant_supported(const char *name)
    kernel_fn metrale_kernel(const char *variant, const char *name)
    const char *metrale_kernel_name(const char *variant, int index)
    uint64_t metrale_features()

FEATURES = ("avx2", "fma", "f16c", "avxvnni", "avx512", "avx512vnni", "dotprod", "bmi2", "amx_int8")


def features() -> frozenset[str]:
    """Return the names of the features this machine offers and its system has enabled."""
    cdef uint64_t bits = metrale_features()
    return frozenset(name for i, name in enumerate(FEATURES) if bits >> i & 1)


def variants() -> tuple[str, ...]:
    """Return the instruction sets compiled into this build, best first."""
    found = []
    cdef const char *name = metrale_variant(0)
    while name is not NULL:
        found.append(name.decode())
        name = metrale_variant(len(found))
    return tuple(found)


def supported() -> tuple[str, ...]:
    """Return the compiled instruction sets that this machine runs, best first; "generic" is always the last."""
    return tuple(name for name in variants() if metrale_variant_supported(name.encode()) == 1)


def names(str variant) -> tuple[str, ...]:
    """Return the kernels of an instruction set, or of "host" (packing); empty for an unknown one."""
    found = []
    key = variant.encode()
    cdef const char *name = metrale_kernel_name(key, 0)
    while name is not NULL:
        found.append(name.decode())
        name = metrale_kernel_name(key, len(found))
    return tuple(found)


def address(str name, str variant) -> int:
    """Return the address of a kernel: ``int32_t f(const int64_t *args, int32_t tile, int32_t tiles)``.

    Raises: KeyError when this build has no such kernel.
    """
    cdef kernel_fn fn = metrale_kernel(variant.encode(), name.encode())
    if fn is NULL:
        raise KeyError(f"kernel {name!r} of {variant!r}: expected one of {names(variant)}; this is a bug in the caller")
    return <uintptr_t>fn


def call(uintptr_t function, uintptr_t args, int32_t tile, int32_t tiles) -> int:
    """Run one tile of a kernel with the GIL released and return its status (tests, packing, benchmarks)."""
    cdef int32_t status
    cdef kernel_fn fn = <kernel_fn>function
    with nogil:
        status = fn(<const arg *>args, tile, tiles)
    return status


def call_all(uintptr_t function, uintptr_t args, int32_t first, int32_t last, int32_t tiles) -> int:
    """Run tiles [first, last) with the GIL released; return the first status that is not 0."""
    cdef int32_t status = 0, tile
    cdef kernel_fn fn = <kernel_fn>function
    with nogil:
        for tile in range(first, last):
            status = fn(<const arg *>args, tile, tiles)
            if status:
                break
    return status
