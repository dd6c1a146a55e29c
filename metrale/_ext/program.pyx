"""The thread team and its programs: native arrays of ops, run op by op with the GIL released.

A kernel is ``int32 f(const arg *args, int32 tile, int32 tiles)`` with ``union {void *p; int64 i; double f;} arg``; 0 means
done. `Team.call` runs one op at once; `Program.append` keeps it for later. Both take the arguments as Python objects and
turn them into 64-bit words: an array into the address of its first element, an int into itself, a float into the bits
of a double, None into 0. See team.h for how the threads share the tiles.
"""

from cpython.buffer cimport PyBUF_STRIDED_RO, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from metrale._ext.arena cimport Arena

from metrale.errors import CaptureError, DeviceError

cdef extern from "team.h" nogil:
    ctypedef int32_t (*mt_kernel)(const void *args, int32_t tile, int32_t tiles)
    ctypedef struct mt_op:
        mt_kernel fn
        const void *args
        int64_t tiles
    ctypedef struct mt_failure:
        int64_t op
        int32_t tile
        int32_t status
    ctypedef struct mt_team:
        pass
    int MT_MAX_TILES
    int mt_watch_forks()
    mt_team *mt_create(int32_t threads, int64_t spin_ns)
    int mt_forked(mt_team *team)
    int mt_run(mt_team *team, const mt_op *ops, int64_t count, int want_workers, mt_failure *failure)
    void mt_stop(mt_team *team)
    void mt_destroy(mt_team *team)

# Words 1001 and up are said by the collectives (comm.h), whatever kernel they run in.
COMM_STATUS = {
    1001: "another rank failed or left",
    1002: "the other ranks did not arrive in time",
    1003: "the ranks called different collectives or sizes",
}
cdef enum:
    STACK_ARGS = 64
    CHUNK_WORDS = 4096

if mt_watch_forks():
    raise MemoryError


cdef int buffer_word(object name, Py_ssize_t place, object array, int64_t *out, Arena arena) except -1:
    """Store the address of an array whose rows (all axes but the first) are contiguous."""
    cdef Py_buffer view
    cdef Py_ssize_t i, expected, extent
    cdef bint rows, inside
    try:
        PyObject_GetBuffer(array, &view, PyBUF_STRIDED_RO)
    except (TypeError, BufferError, ValueError) as error:
        raise DeviceError(f"{name}: expected an array, int, float or None as argument {place}, got {type(array).__name__}; "
                          "pass NumPy arrays of this backend", code="op.args") from error
    rows = view.ndim > 0  # a NumPy scalar has the buffer protocol too, over memory that dies with it
    expected = extent = view.itemsize
    for i in range(view.ndim - 1, -1, -1):
        if view.shape[i] > 1:
            if view.strides[i] < expected or (view.strides[i] != expected and (i > 0 or view.ndim == 1)):
                rows = False
            extent += (view.shape[i] - 1) * view.strides[i]
        elif view.shape[i] == 0:
            extent = 0
            break
        expected *= view.shape[i]
    out[0] = <int64_t><uintptr_t>view.buf
    inside = arena is None or extent == 0 or arena.holds(<uintptr_t>view.buf, extent)
    PyBuffer_Release(&view)
    if not rows:
        raise DeviceError(f"{name}: expected argument {place} as an array with contiguous rows, got strides "
                          f"{getattr(array, 'strides', None)} for shape {getattr(array, 'shape', None)}; copy it first",
                          code="op.layout")
    if not inside:
        raise CaptureError(f"{name}: expected memory of this backend as argument {place} inside a capture, "
                           f"got an unknown address; "
                           "allocate it with Backend.alloc before the capture", code="capture.address")
    return 0


cdef int pack(object name, tuple args, int64_t *out, Arena arena) except -1:
    """Turn arguments into words; with an arena, every array must lie in it."""
    cdef Py_ssize_t i
    cdef double real
    for i in range(len(args)):
        arg = args[i]
        if arg is None:
            out[i] = 0
        elif isinstance(arg, int):
            out[i] = arg
        elif isinstance(arg, float):
            real = arg
            memcpy(&out[i], &real, 8)
        else:
            buffer_word(name, i, arg, &out[i], arena)
    return 0


cdef int check_op(object name, uintptr_t fn, int64_t tiles, Py_ssize_t words) except -1:
    if fn == 0:
        raise DeviceError(f"{name}: expected a kernel, got a null address; this is a bug in the backend", code="op.args")
    if tiles < 0 or tiles > MT_MAX_TILES:
        raise DeviceError(f"{name}: expected 0 to {MT_MAX_TILES} tiles, "
                          f"got {tiles}; cut the op into larger tiles", code="op.args")
    if words > STACK_ARGS:
        raise DeviceError(f"{name}: expected at most {STACK_ARGS} arguments, got {words}; pass a table", code="op.args")
    return 0


cdef object failed(object name, Py_ssize_t op, int32_t tile, int64_t tiles, int32_t status):
    """Describe a status other than 0 as an error."""
    said = COMM_STATUS.get(status)
    if said is not None:
        return DeviceError(f"{name}: expected every rank to take part, got: {said}; restart all ranks", code="device.comm")
    return DeviceError(f"{name}: expected status 0 from its kernel, got {status} in tile {tile} of {tiles} (op {op}); "
                       "run with METRALE_TRACE=2 to see its shapes", code="device.kernel")


cdef class Program:
    """An append-only array of ops. It owns the argument words and keeps the arguments' objects alive."""

    cdef mt_op *ops
    cdef Py_ssize_t count, room
    cdef list names, kept, words
    cdef list chunks  # of int: addresses of argument memory
    cdef int64_t *free_words
    cdef Py_ssize_t num_free
    cdef bint shared  # an op has more than one tile

    def __cinit__(self):
        self.ops = NULL
        self.count = self.room = self.num_free = 0
        self.names, self.kept, self.words, self.chunks = [], [], [], []
        self.shared = False

    def __dealloc__(self):
        free(self.ops)
        for chunk in self.chunks or ():
            free(<void *><uintptr_t>chunk)

    def __len__(self) -> int:
        """Return the number of ops."""
        return self.count

    cdef int64_t *take_words(self, Py_ssize_t n) except NULL:
        cdef Py_ssize_t size = max(<Py_ssize_t>CHUNK_WORDS, n)
        cdef int64_t *words
        if n > self.num_free:
            words = <int64_t *>malloc(size * sizeof(int64_t))
            if words == NULL:
                raise MemoryError
            self.chunks.append(<uintptr_t>words)
            self.free_words = words
            self.num_free = size
        words = self.free_words
        self.free_words += n
        self.num_free -= n
        return words

    def append(self, uintptr_t fn, tuple args, int64_t tiles, str name, Arena arena=None) -> None:
        """Add an op. With `arena`, every array among the arguments must lie in it.

        Raises: CaptureError (``capture.address``); DeviceError (``op.args``, ``op.layout``). Then nothing is added.
        """
        cdef Py_ssize_t n = len(args), room
        cdef mt_op *grown
        check_op(name, fn, tiles, n)
        cdef int64_t *words = self.take_words(max(n, 1))
        pack(name, args, words, arena)
        if self.count == self.room:
            room = 2 * self.room + 64
            grown = <mt_op *>realloc(self.ops, room * sizeof(mt_op))
            if grown == NULL:
                raise MemoryError
            self.ops = grown
            self.room = room
        self.names.append(name)
        self.kept.append(args)
        self.words.append(n)
        self.ops[self.count].fn = <mt_kernel>fn
        self.ops[self.count].args = words
        self.ops[self.count].tiles = tiles
        self.count += 1
        self.shared = self.shared or tiles > 1

    def op(self, Py_ssize_t index) -> tuple:
        """Return (name, kernel address, tiles, argument bytes) of one op: two captures of one key have equal ones."""
        if index < 0 or index >= self.count:
            raise IndexError(index)
        cdef const char *words = <const char *>self.ops[index].args
        cdef Py_ssize_t nbytes = 8 * <Py_ssize_t>self.words[index]
        return self.names[index], <uintptr_t>self.ops[index].fn, self.ops[index].tiles, words[:nbytes]

    def kept_args(self, Py_ssize_t index) -> tuple:
        """Return the argument objects of one op."""
        return self.kept[index]


cdef class Team:
    """Threads that share the tiles of ops: the calling thread and `threads - 1` workers, started when first needed.

    One run at a time; a second thread waits for its turn. Workers touch no Python object and block every signal.
    """

    cdef mt_team *team
    cdef readonly int threads
    cdef bint closed

    def __cinit__(self, int threads, double spin_us=50.0):
        if threads < 1 or threads > 1024:
            raise DeviceError(f"threads: expected 1 to 1024, got {threads}; set METRALE_THREADS or the engine option",
                              code="device.threads")
        self.team = mt_create(threads, <int64_t>(spin_us * 1000))
        if self.team == NULL:
            raise MemoryError
        self.threads = threads
        self.closed = False

    def __dealloc__(self):
        if self.team != NULL:
            mt_stop(self.team)
            mt_destroy(self.team)

    def close(self) -> None:
        """Join the workers, after the run in progress; harmless twice. Later runs raise DeviceError (``device.closed``)."""
        self.closed = True
        with nogil:
            mt_stop(self.team)

    cdef int ready(self) except -1:
        if self.closed:
            raise DeviceError("thread team: expected it open, got a closed one; open a new backend", code="device.closed")
        if mt_forked(self.team):
            raise DeviceError("thread team: expected the process that started its threads, got a forked child; "
                              "open the engine after the fork, or start processes with 'spawn'", code="device.fork")
        return 0

    cdef int finish(self, int result) except -1:
        if result == 2:
            raise DeviceError(f"thread team: expected {self.threads - 1} further threads, but the system refused one; "
                              "lower METRALE_THREADS or raise the process limit", code="device.threads")
        if result == 3:
            raise DeviceError("thread team: expected it open, got a closed one; open a new backend", code="device.closed")
        return 0

    def run(self, Program program, Py_ssize_t start=0, stop=None) -> None:
        """Run ops [start, stop) of a program, one after the other, and return when all are done.

        Raises: DeviceError ``device.kernel`` naming op and tile for a status other than 0 (no later op has run),
                ``device.comm`` for a broken collective, ``device.fork``, ``device.closed``
        """
        cdef mt_failure failure
        cdef Py_ssize_t end = program.count if stop is None else min(<Py_ssize_t>stop, program.count), op
        cdef int result, want = program.shared and self.threads > 1
        cdef const mt_op *ops = program.ops + start
        self.ready()
        if start < 0 or end <= start:
            return
        with nogil:
            result = mt_run(self.team, ops, end - start, want, &failure)
        if result == 1:
            op = start + failure.op
            raise failed(program.names[op], op, failure.tile, program.ops[op].tiles, failure.status)
        self.finish(result)

    def call(self, uintptr_t fn, tuple args, int64_t tiles, str name) -> None:
        """Run one op now.

        Raises: as `run`, and DeviceError (``op.args``, ``op.layout``)
        """
        cdef int64_t[STACK_ARGS] words
        cdef mt_failure failure
        cdef mt_op op
        cdef int result
        check_op(name, fn, tiles, len(args))
        pack(name, args, words, None)
        self.ready()
        op.fn = <mt_kernel>fn
        op.args = words
        op.tiles = tiles
        if tiles == 1:  # no need of the team, nor of its lock
            with nogil:
                failure.status = op.fn(words, 0, 1)
            if failure.status != 0:
                raise failed(name, 0, 0, 1, failure.status)
            return
        with nogil:
            result = mt_run(self.team, &op, 1, self.threads > 1, &failure)
        if result == 1:
            raise failed(name, 0, failure.tile, tiles, failure.status)
        self.finish(result)
