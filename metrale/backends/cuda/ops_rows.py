"""The row state and its rings."""

from __future__ import annotations

from typing import Any

from metrale.backends.base import PatchRing, ResultRing, RowBatch, RowState, check_shape
from metrale.backends.cuda.checks import at_most_rows, batch_rows, check_dense, check_ring, check_state, row_ints
from metrale.backends.cuda.emit import Emitter


def fields_of(state: RowState) -> Any:
    """Return the words from the field table on."""
    return state.words[state.layout.fields :]


def histories_of(state: RowState) -> Any:
    """Return the words of the token histories."""
    return state.words[state.layout.history :]


class RowOps(Emitter):
    """Host words in, step rows out."""

    def rows_patch(self, state: RowState, ring: PatchRing) -> None:
        """Apply the ring's current entry."""
        check_state("rows_patch", state)
        check_shape("rows_patch", "entries", (None, None), ring.entries.shape)
        check_shape("rows_patch", "cursor", (1,), ring.cursor.shape)
        check_dense("rows_patch", "entries", ring.entries)
        depth, width = ring.entries.shape
        self._begin("rows_patch", state, ring)
        self._launch("rows_patch", 1, state.words, ring.entries, ring.cursor, state.layout.words, depth, (width - 2) // 2)

    def rows_begin(self, batch: RowBatch, state: RowState) -> None:
        """Fill a decode batch from the state."""
        count, lay = batch_rows("rows_begin", batch), state.layout
        at_most_rows("rows_begin", count, state)
        self._begin("rows_begin", batch, state)
        self._flat("rows_begin", count, *batch, state.words, fields_of(state), histories_of(state), count, lay.rows,
                   lay.max_tokens)

    def rows_prefill(self, batch: RowBatch, state: RowState) -> None:
        """Write a prefill batch's ids into the histories."""
        check_state("rows_prefill", state)
        count, lay = batch_rows("rows_prefill", batch), state.layout
        self._begin("rows_prefill", batch, state)
        self._flat("rows_prefill", count, histories_of(state), batch.ids, batch.seq, batch.index, count, lay.rows,
                   lay.max_tokens)

    def rows_commit(self, ids: Any, seq: Any, index: Any, state: RowState) -> None:
        """Make sampled ids the rows' next tokens."""
        check_state("rows_commit", state)
        count = row_ints("rows_commit", None, ids=ids, seq=seq, index=index)
        self._begin("rows_commit", ids, seq, index, state)
        self._flat("rows_commit", count, fields_of(state), ids, seq, index, count, state.layout.rows)

    def publish(self, ring: ResultRing, ids: Any, seq: Any, state: RowState) -> None:
        """Write one result entry."""
        count = row_ints("publish", None, ids=ids, seq=seq)
        at_most_rows("publish", count, state)
        check_ring("publish", ring, state)
        self._begin("publish", ring, ids, seq, state)
        self._launch("publish", 1, ring.header, ring.ids, ring.cursor, ids, fields_of(state), count, state.layout.rows,
                     ring.header.shape[0])


