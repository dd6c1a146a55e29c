"""The row state on the CPU: patches in, decode batches, histories, results out."""

from __future__ import annotations

from typing import Any

from metrale.backends.base import ROW_FIELDS, PatchRing, ResultRing, RowBatch, RowState, check_shape
from metrale.backends.cpu import jit
from metrale.backends.cpu.checks import check_batch, check_dtype, check_ring, check_rows, check_state
from metrale.backends.cpu.emit import Emitter

FIELDS = len(ROW_FIELDS)


class RowsOps(Emitter):
    """Ops over the words of the row state; each is one tile."""

    def rows_patch(self, state: RowState, ring: PatchRing) -> None:
        """Apply the ring's current entry."""
        check_state("rows_patch", state)
        check_shape("rows_patch", "entries", (None, None), ring.entries.shape)
        check_shape("rows_patch", "cursor", (1,), ring.cursor.shape)
        check_dtype("rows_patch", "int32", entries=ring.entries, cursor=ring.cursor)
        depth, words = (int(size) for size in ring.entries.shape)
        args = (state.words, state.layout.words, ring.entries, depth, words, ring.cursor)
        self.emit("rows_patch", jit.address("rows_patch"), 1, args, (state.words, ring.entries, ring.cursor))

    def rows_begin(self, batch: RowBatch, state: RowState) -> None:
        """Fill a decode batch from the state."""
        count = check_batch("rows_begin", batch)
        check_state("rows_begin", state, count)
        lay = state.layout
        args = (*batch, count, state.words, lay.fields, FIELDS, lay.history, lay.max_tokens)
        self.emit("rows_begin", jit.address("rows_begin"), 1, args, (*batch, state.words))

    def rows_prefill(self, batch: RowBatch, state: RowState) -> None:
        """Write a prefill batch's ids into the histories."""
        count = check_batch("rows_prefill", batch)
        check_state("rows_prefill", state)
        lay = state.layout
        args = (batch.ids, batch.seq, batch.index, count, state.words, lay.history, lay.max_tokens)
        self.emit("rows_prefill", jit.address("rows_prefill"), 1, args, (state.words, *batch))

    def rows_commit(self, ids: Any, seq: Any, index: Any, state: RowState) -> None:
        """Make sampled ids the rows' next tokens."""
        count = check_rows("rows_commit", None, ids=ids, seq=seq, index=index)
        check_state("rows_commit", state)
        args = (ids, seq, index, count, state.words, state.layout.fields, FIELDS)
        self.emit("rows_commit", jit.address("rows_commit"), 1, args, (state.words, ids, seq, index))

    def publish(self, ring: ResultRing, ids: Any, seq: Any, state: RowState) -> None:
        """Write one result entry."""
        count = check_rows("publish", None, ids=ids, seq=seq)
        check_state("publish", state, count)
        check_ring("publish", ring, state)
        lay = state.layout
        depth = int(ring.header.shape[0])
        args = (ids, count, state.words, lay.fields, FIELDS, lay.rows, ring.header, depth, ring.ids, ring.cursor)
        self.emit("publish", jit.address("publish"), 1, args, (ring.header, ring.ids, ring.cursor, ids, seq, state.words))
