"""Staging: what the host writes for the device, straight into pinned memory.

`PatchWriter` fills entries of the patch ring, `RowPacker` the row arrays of a prefill batch. Both check everything first: a
call that is refused has written nothing.
"""

from cpython.long cimport PyLong_AsLongAndOverflow
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from metrale.errors import DeviceError

cdef extern from * nogil:
    """
    #define mt_load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define mt_store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    """
    int32_t mt_load_acquire(const int32_t *word)
    void mt_store_release(int32_t *word, int32_t value)


cdef int32_t word_of(object value) except? -1:
    """Return a Python int as a word: signed or unsigned 32 bits."""
    cdef int overflow = 0
    cdef long long word
    word = PyLong_AsLongAndOverflow(value, &overflow)
    if overflow or word < -(<long long>1 << 31) or word >= (<long long>1 << 32):
        raise DeviceError(f"staging: expected a number of 32 bits, "
                          f"got {value}; this is a bug in the caller", code="staging.value")
    return <int32_t>word


cdef object words_of(object values):
    """Return values as something `copy_words` can copy without failing: a contiguous int32 buffer or a checked list."""
    cdef const int32_t[::1] view
    if not isinstance(values, (list, tuple)):
        if not hasattr(values, "__array_interface__") and not isinstance(values, memoryview):
            values = list(values)
        else:
            view = values
            return view
    for value in values:
        word_of(value)
    return values


cdef int copy_words(object values, int32_t *out, Py_ssize_t step) except -1:
    """Write values to out[0], out[step], ..."""
    cdef const int32_t[::1] view
    cdef Py_ssize_t i
    if isinstance(values, (list, tuple)):
        for i in range(len(values)):
            out[i * step] = word_of(values[i])
        return 0
    view = values
    if step == 1 and view.shape[0] > 0:
        memcpy(out, &view[0], view.shape[0] * sizeof(int32_t))
    else:
        for i in range(view.shape[0]):
            out[i * step] = view[i]
    return 0


cdef class PatchWriter:
    """Appends (offset, value) pairs to the patch ring's entries, (depth, 2 + 2 * capacity) int32 (`PatchRing` in base.py).

    `begin` opens the entry of a step, `commit` shows it to the device by writing its count; until then the entry reads as
    "no change", so a step that fails half-way leaves no patch behind. Used by one thread.
    """

    cdef int32_t[:, ::1] entries
    cdef int64_t limit
    cdef int32_t *entry
    cdef readonly int depth
    cdef readonly Py_ssize_t capacity
    cdef readonly Py_ssize_t count

    def __init__(self, entries, int64_t words) -> None:
        """entries: the ring's pinned memory; words: size of the row state, which no offset may reach."""
        self.entries = entries
        if self.entries.shape[0] < 1 or self.entries.shape[1] < 4 or self.entries.shape[1] % 2:
            raise DeviceError(f"patch ring: expected (depth, 2 + 2 * capacity), "
                              f"got {tuple(entries.shape)}; this is a bug in the caller",
                              code="op.shape")
        self.depth = self.entries.shape[0]
        self.capacity = (self.entries.shape[1] - 2) // 2
        self.limit = min(words, (<int64_t>1 << 31) - 1)
        self.entry = NULL
        self.count = 0

    @property
    def room(self) -> int:
        """Return how many pairs the open entry still takes."""
        return self.capacity - self.count

    @property
    def is_open(self) -> bool:
        """Say whether an entry is open."""
        return self.entry != NULL

    def begin(self, int64_t step, int64_t done) -> None:
        """Open the entry that step `step` reads (entry ``step % depth``); `done` steps (0 to done - 1) have ended.

        Steps before it that have not ended read their own entries still, and this one too if it comes round.
        Raises: DeviceError ``staging.busy`` when the entry may still be read; ``staging.open`` when one is open
        """
        cdef int32_t *entry
        if self.entry != NULL:
            raise DeviceError("patch ring: expected no open entry, got one; commit or discard it first", code="staging.open")
        if step < 0 or done > step or step - done >= self.depth:
            raise DeviceError(f"patch ring: expected fewer than {self.depth} steps in flight before step {step}, "
                              f"but {done} have ended; "
                              "wait for an older step first", code="staging.busy")
        entry = &self.entries[step % self.depth, 0]
        if mt_load_acquire(entry) != 0:
            raise DeviceError(f"patch ring: expected the entry of step {step} to have been read, "
                              f"got {entry[0]} pairs in it; the step "
                              "that should have read them did not run", code="staging.busy")
        self.entry = entry
        self.count = 0

    cdef int check(self, int64_t offset, Py_ssize_t n) except -1:
        if self.entry == NULL:
            raise DeviceError("patch ring: expected an open entry, got none; call begin first", code="staging.open")
        if n > self.capacity - self.count:
            raise DeviceError(f"patch ring: expected at most {self.capacity - self.count} more pairs, "
                              f"got {n}; spread them over steps",
                              code="staging.capacity")
        if offset < 0 or offset > self.limit - n:
            raise DeviceError(f"patch ring: expected offsets below {self.limit}, "
                              f"got {n} words from {offset}; this is a bug in the caller",
                              code="staging.offset")
        return 0

    cdef void land(self, int64_t offset, int32_t word) noexcept:
        cdef int32_t *pair = self.entry + 2 + 2 * self.count
        pair[0] = <int32_t>offset
        pair[1] = word
        self.count += 1

    def put(self, int64_t offset, value) -> None:
        """Append one word. Raises: DeviceError ``staging.open``, ``.capacity``, ``.offset``, ``.value``."""
        cdef int32_t word = word_of(value)
        self.check(offset, 1)
        self.land(offset, word)

    def put_float(self, int64_t offset, double value) -> None:
        """Append the bits of a float32. Raises: as `put`."""
        cdef float narrow = <float>value
        cdef int32_t word
        memcpy(&word, &narrow, 4)
        self.check(offset, 1)
        self.land(offset, word)

    def put_words(self, int64_t offset, values) -> None:
        """Append consecutive words (a list, an iterable of ints, or an int32 array): block tables, histories, fields.

        Raises: as `put`; then none of them has landed.
        """
        words = words_of(values)
        cdef Py_ssize_t n = len(words), i
        cdef int32_t *pairs
        self.check(offset, n)
        pairs = self.entry + 2 + 2 * self.count
        copy_words(words, pairs + 1, 2)
        for i in range(n):
            pairs[2 * i] = <int32_t>(offset + i)
        self.count += n

    def rollback(self, Py_ssize_t count) -> None:
        """Take back the pairs after the first `count` of the open entry (`count` read earlier)."""
        if count < 0 or count > self.count:
            raise DeviceError(f"patch ring: expected 0 to {self.count} pairs, got {count}; this is a bug in the caller",
                              code="staging.capacity")
        self.count = count

    def commit(self) -> int:
        """Show the open entry to the device and close it; returns its number of pairs. Call it just before the launch."""
        cdef Py_ssize_t count = self.count
        if self.entry == NULL:
            raise DeviceError("patch ring: expected an open entry, got none; call begin first", code="staging.open")
        if count:
            mt_store_release(self.entry, <int32_t>count)
        self.entry = NULL
        self.count = 0
        return count

    def discard(self) -> None:
        """Close the open entry as if nothing had been put; harmless without one."""
        self.entry = NULL
        self.count = 0

    def reset(self) -> None:
        """Empty every entry and close the open one; only while no step is in flight."""
        cdef Py_ssize_t i
        self.discard()
        for i in range(self.depth):
            mt_store_release(&self.entries[i, 0], 0)


cdef class RowPacker:
    """Packs the row arrays of a prefill batch into pinned memory: ids, seq, index, position, T words each, in a row.

    So the first 4 * T words are one upload, and the device's views are ``words[i * T : (i + 1) * T]``.
    """

    cdef int32_t[::1] words
    cdef readonly Py_ssize_t rows
    cdef readonly Py_ssize_t used

    def __init__(self, words) -> None:
        """words: flat int32 pinned memory, four words for each row of the largest batch."""
        self.words = words
        self.rows = self.used = 0

    def begin(self, Py_ssize_t rows) -> None:
        """Start a batch of `rows` rows (T). Raises: DeviceError ``staging.capacity``."""
        if rows < 1 or rows > self.words.shape[0] // 4:
            raise DeviceError(f"row batch: expected 1 to {self.words.shape[0] // 4} rows, got {rows}; cut the chunk",
                              code="staging.capacity")
        self.rows = rows
        self.used = 0

    def add(self, tokens, int32_t seq, int64_t index, int64_t delta=0) -> int:
        """Append tokens of one sequence, from place `index` on; positions are places + `delta`. Returns the first row.

        Raises: DeviceError ``staging.capacity``, ``staging.value``; then nothing has landed
        """
        checked = words_of(tokens)
        cdef Py_ssize_t n = len(checked), first = self.used, i
        cdef int32_t *out
        if n > self.rows - first:
            raise DeviceError(f"row batch: expected at most {self.rows - first} more rows, "
                              f"got {n}; cut the chunk", code="staging.capacity")
        if seq < 0 or index < 0 or index + delta < 0 or max(index, index + delta) + n > 2147483647:
            raise DeviceError(f"row batch: expected a state row and places from 0, "
                              f"got row {seq}, place {index}, delta {delta}; this is a "
                              "bug in the caller", code="staging.value")
        if n == 0:
            return first
        out = &self.words[0] + first
        copy_words(checked, out, 1)
        for i in range(n):
            out[self.rows + i] = seq
            out[2 * self.rows + i] = <int32_t>(index + i)
            out[3 * self.rows + i] = <int32_t>(index + delta + i)
        self.used += n
        return first

    def finish(self) -> int:
        """Make the rest of the batch padding (id 0, seq -1, index 0, position 0); returns the number of real rows."""
        cdef Py_ssize_t i
        for i in range(self.used, self.rows):
            self.words[i] = 0
            self.words[self.rows + i] = -1
            self.words[2 * self.rows + i] = 0
            self.words[3 * self.rows + i] = 0
        return self.used
