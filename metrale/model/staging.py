"""What the host stages for the device: word patches of the row state, and the arrays of a prefill chunk.

Patches go through a ring of pinned entries that the device reads; an entry is rewritten only after the step that read it
has ended. In the steady state of decoding nothing is staged at all: the entry's count is zero already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from metrale.backends.base import Backend, Event, Ops, PatchRing, RowBatch, RowState
from metrale.model.argmax import ResultReader

PATCH_WORDS = 4096  # pairs an entry; a row with every bias entry and 32 Ki tokens of context needs 3,100


class PatchStaging:
    """Collect (offset, value) pairs and put them where the next `rows_patch` reads them.

    `queued` counts the `rows_patch` ops the device has accepted; the entry it reads next is ``queued % depth``.
    """

    def __init__(self, backend: Backend, depth: int, capacity: int = PATCH_WORDS) -> None:
        """Allocate the ring."""
        self._backend = backend
        self._entries = backend.alloc_pinned((depth, 2 + 2 * capacity), "i32")
        self.ring = PatchRing(backend.device_view(self._entries), backend.alloc((1,), "i32", zero=True))
        self._depth = depth
        self._capacity = capacity
        self._pending: list[int] = []
        self.queued = 0
        self._read = 0

    def put(self, offset: int, value: int) -> None:
        """Stage one word."""
        self._pending += (offset, value)

    def put_words(self, offset: int, values: Iterable[int]) -> None:
        """Stage consecutive words."""
        for i, value in enumerate(values):
            self._pending += (offset + i, value)

    @property
    def pending(self) -> bool:
        """Say whether anything is staged that no entry holds yet."""
        return bool(self._pending)

    def seal(self, ops: Ops, state: RowState) -> None:
        """Write what is staged into the entry the coming `rows_patch` reads; what overflows one entry is patched at once."""
        pairs, self._pending = self._pending, []
        room = 2 * self._capacity
        while len(pairs) > room:
            self._write(pairs[:room])
            ops.rows_patch(state, self.ring)
            self.accepted()
            pairs = pairs[room:]
        if pairs:
            self._write(pairs)

    def apply(self, ops: Ops, state: RowState) -> None:
        """Seal and queue one `rows_patch`, if anything is staged."""
        if self._pending:
            self.seal(ops, state)
            ops.rows_patch(state, self.ring)
            self.accepted()

    def accepted(self) -> None:
        """Count one `rows_patch` that the device has accepted."""
        self.queued += 1

    def read_until(self, patches: int) -> None:
        """Learn (from a result) that the device has read so many entries."""
        self._read = max(self._read, patches)

    def reset(self) -> None:
        """Forget what is staged and make entries and cursor agree with the host; the device is idle when this is called."""
        self._pending.clear()
        self._entries[:, 0] = 0
        self._read = self.queued
        self._backend.upload(self.ring.cursor, np.array([self.queued], np.int32))

    def _write(self, pairs: Sequence[int]) -> None:
        if self.queued - self._read >= self._depth:
            self._backend.stream.synchronize()
            self._read = self.queued
        entry = self._entries[self.queued % self._depth]
        entry[2 : 2 + len(pairs)] = pairs
        entry[0] = len(pairs) // 2


class ChunkStaging:
    """Pinned copies of a chunk's row arrays, several so that the next chunk may be written while one is still read."""

    def __init__(self, backend: Backend, depth: int, tokens: int) -> None:
        """Allocate `depth` pinned slots and the device's arrays for chunks of at most `tokens` tokens."""
        self._backend = backend
        self._pinned = backend.alloc_pinned((depth, 4 * tokens), "i32")
        self._device = backend.alloc((4 * tokens,), "i32", zero=True)
        self._events: list[Event | None] = [None] * depth
        self._slot = 0

    def stage(self, ids: Sequence[int], row: int, start: int) -> RowBatch:
        """Upload one sequence's tokens [start, start + len(ids)) and return the device's row batch."""
        slot, count = self._slot, len(ids)
        event = self._events[slot]
        if event is not None:
            event.synchronize()
        words = self._pinned[slot, : 4 * count]
        arrays = words.reshape(4, count)
        arrays[0] = ids
        arrays[1] = row
        arrays[2] = arrays[3] = np.arange(start, start + count, dtype=np.int32)
        self._backend.upload(self._device[: 4 * count], words)
        return RowBatch(*(self._device[i * count : (i + 1) * count] for i in range(4)))

    def accepted(self) -> None:
        """Note that the staged chunk has been accepted; its slot is free again once the device is past this point."""
        self._events[self._slot] = self._backend.stream.record()
        self._slot = (self._slot + 1) % len(self._events)

    def reset(self) -> None:
        """Forget the events; the device is idle when this is called."""
        self._events = [None] * len(self._events)


class PinnedMetaStaging:
    """All pinned memory of a model: the patch ring, the chunk slots, and the result ring.

    Zeroed at birth, held by the backend until it closes, so that it outlives every copy that reads it. Each ring has
    `depth` + 2 entries: `depth` results may be outstanding while one entry is written and one is read.
    """

    def __init__(self, backend: Backend, depth: int, rows: int, chunk_tokens: int) -> None:
        """Allocate the rings for `depth` outstanding steps of `rows` rows and chunks of `chunk_tokens` tokens."""
        self.patches = PatchStaging(backend, depth + 2)
        self.chunks = ChunkStaging(backend, depth + 2, chunk_tokens)
        self.results = ResultReader(backend, depth + 2, rows)

    def reset(self) -> None:
        """Make rings and cursors agree with the host again, after a failure; the device is idle when this is called."""
        self.patches.reset()
        self.chunks.reset()
        self.results.reset()
