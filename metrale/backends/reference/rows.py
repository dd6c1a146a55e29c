"""The row state and its rings: patches in, a decode batch out, results back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrale.backends.base import FIELD, MAX_BIAS, ROW_FIELDS, PatchRing, ResultRing, RowBatch, RowLayout, RowState


def fields(state: RowState) -> NDArray[Any]:
    """Return the field table, a view (R, fields) int32."""
    lay = state.layout
    return np.asarray(state.words[lay.fields : lay.bias_ids].reshape(lay.rows, len(ROW_FIELDS)))


def number(state: RowState, row: int, name: str) -> float:
    """Return a float field of a row."""
    return float(fields(state)[row, FIELD[name] : FIELD[name] + 1].view(np.float32)[0])


def histories(state: RowState) -> NDArray[Any]:
    """Return the token histories, a view (R, max_tokens) int32."""
    lay = state.layout
    return np.asarray(state.words[lay.history : lay.words].reshape(lay.rows, lay.max_tokens))


def biases(state: RowState, row: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return a row's bias entries in use: ids int32, values float32, until int32."""
    lay: RowLayout = state.layout
    used = int(fields(state)[row, FIELD["num_bias"]])
    first = row * MAX_BIAS
    ids, values, until = (
        state.words[start + first : start + first + used] for start in (lay.bias_ids, lay.bias_values, lay.bias_until)
    )
    return ids, values.view(np.float32), until


def rows_patch(state: RowState, ring: PatchRing) -> None:
    """See `Ops.rows_patch`."""
    entry = ring.entries[int(ring.cursor[0]) % ring.entries.shape[0]]
    for i in range(int(entry[0])):
        offset, value = entry[2 + 2 * i : 4 + 2 * i]
        state.words[offset] = value
    entry[0] = 0
    ring.cursor[0] += 1


def rows_begin(batch: RowBatch, state: RowState) -> None:
    """See `Ops.rows_begin`."""
    table, history = fields(state), histories(state)
    for i in range(len(batch.ids)):
        row = int(state.words[i])
        if row >= 0 and table[row, FIELD["index"]] >= table[row, FIELD["limit"]]:
            table[row, FIELD["flag"]] |= 1
            row = -1
        token, index, delta = (0, 0, 0) if row < 0 else table[row, [FIELD["token"], FIELD["index"], FIELD["delta"]]]
        batch.ids[i], batch.seq[i], batch.index[i], batch.position[i] = token, row, index, index + delta
        if row >= 0:
            history[row, index] = token


def rows_prefill(batch: RowBatch, state: RowState) -> None:
    """See `Ops.rows_prefill`."""
    used = batch.seq >= 0
    histories(state)[batch.seq[used], batch.index[used]] = batch.ids[used]


def rows_commit(ids: Any, seq: Any, index: Any, state: RowState) -> None:
    """See `Ops.rows_commit`."""
    used = seq >= 0
    table = fields(state)
    table[seq[used], FIELD["token"]] = ids[used]
    table[seq[used], FIELD["index"]] = index[used] + 1


def publish(ring: ResultRing, ids: Any, seq: Any, state: RowState) -> None:
    """See `Ops.publish`."""
    number = int(ring.cursor[0])
    entry = number % ring.header.shape[0]
    ring.ids[entry, : len(ids)] = ids
    ring.header[entry, 1] = len(ids)
    ring.header[entry, 2] = np.bitwise_or.reduce(fields(state)[:, FIELD["flag"]])
    ring.header[entry, 0] = number
    ring.cursor[0] += 1
