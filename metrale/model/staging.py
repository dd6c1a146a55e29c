"""What the host stages for the device: word patches of the row state, and the arrays of a prefill chunk.

Patches go through a ring of pinned entries that the device reads; an entry is rewritten only after the step that read it
has ended. In the steady state of decoding nothing is staged at all: the entry's count is zero already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metrale._ext.staging import PatchWriter, RowPacker
from metrale.backends.base import Backend, Event, Ops, PatchRing, RowBatch, RowState
from metrale.model.argmax import ResultReader

PATCH_WORDS = 4096  # pairs an entry; a row with every bias entry and 32 Ki tokens of context needs 3,100


class PatchStaging:
    """Collect words and put them where the next `rows_patch` reads them.

    `queued` counts the `rows_patch` ops the device has accepted; the entry it reads next is ``queued % depth``.
    """

    def __init__(self, backend: Backend, depth: int, state: RowState) -> None:
        """Allocate the ring that patches `state`."""
        self._backend = backend
        self._state = state
        entries = backend.alloc_pinned((depth, 2 + 2 * PATCH_WORDS), "i32")
        self.ring = PatchRing(backend.device_view(entries), backend.alloc((1,), "i32", zero=True))
        self._writer = PatchWriter(entries, state.layout.words)
        self._pending: list[tuple[int, Sequence[int]]] = []
        self.queued = 0
        self._read = 0

    def put(self, offset: int, value: int) -> None:
        """Stage one word."""
        self._pending.append((offset, (value,)))

    def put_words(self, offset: int, values: Sequence[int]) -> None:
        """Stage consecutive words."""
        if values:
            self._pending.append((offset, values))

    @property
    def pending(self) -> bool:
        """Say whether anything is staged that no entry holds yet."""
        return bool(self._pending)

    def seal(self, ops: Ops) -> None:
        """Write what is staged into the entry the coming `rows_patch` reads; what overflows one entry is patched at once."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        self._begin()
        for offset, values in pending:
            at = 0
            while len(values) - at > self._writer.room:
                fits = self._writer.room
                self._writer.put_words(offset + at, values[at : at + fits])
                at += fits
                self._writer.commit()
                ops.rows_patch(self._state, self.ring)
                self.accepted()
                self._begin()
            self._writer.put_words(offset + at, values[at:])
        self._writer.commit()

    def apply(self, ops: Ops) -> None:
        """Seal and queue one `rows_patch`, if anything is staged."""
        if self._pending:
            self.seal(ops)
            ops.rows_patch(self._state, self.ring)
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
        self._writer.reset()
        self._read = self.queued
        self._backend.upload(self.ring.cursor, _word(self.queued))

    def _begin(self) -> None:
        if self.queued - self._read >= self._writer.depth:
            self._backend.stream.synchronize()
            self._read = self.queued
        self._writer.begin(self.queued, self._read)


class ChunkStaging:
    """Pinned copies of a chunk's row arrays, several so that the next chunk may be written while one is still read."""

    def __init__(self, backend: Backend, depth: int, tokens: int) -> None:
        """Allocate `depth` pinned slots and the device's arrays for chunks of at most `tokens` tokens."""
        self._backend = backend
        self._pinned = backend.alloc_pinned((depth, 4 * tokens), "i32")
        self._packers = [RowPacker(words) for words in self._pinned]
        self._device = backend.alloc((4 * tokens,), "i32", zero=True)
        self._events: list[Event | None] = [None] * depth
        self._slot = 0

    def stage(self, ids: Sequence[int], row: int, start: int) -> RowBatch:
        """Upload one sequence's tokens [start, start + len(ids)) and return the device's row batch."""
        slot, count = self._slot, len(ids)
        event = self._events[slot]
        if event is not None:
            event.synchronize()
        packer = self._packers[slot]
        packer.begin(count)
        packer.add(ids, row, start)
        packer.finish()
        self._backend.upload(self._device[: 4 * count], self._pinned[slot, : 4 * count])
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

    def __init__(self, backend: Backend, depth: int, state: RowState, chunk_tokens: int) -> None:
        """Allocate the rings for `depth` outstanding steps over `state` and chunks of `chunk_tokens` tokens."""
        self.patches = PatchStaging(backend, depth + 2, state)
        self.chunks = ChunkStaging(backend, depth + 2, chunk_tokens)
        self.results = ResultReader(backend, depth + 2, state.layout.rows)

    def reset(self) -> None:
        """Make rings and cursors agree with the host again, after a failure; the device is idle when this is called."""
        self.patches.reset()
        self.chunks.reset()
        self.results.reset()


def _word(value: int) -> Any:
    """Return one int32 word as a host array."""
    import numpy as np

    return np.array([value], np.int32)
