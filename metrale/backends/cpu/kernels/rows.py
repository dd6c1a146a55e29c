"""The row state: patches from the host in, decode batches out, sampled tokens back, results to the ring (Numba).

Every kernel here is one tile: the work is a few words a row. Offsets are words inside the state's int32 buffer, as
`RowLayout` gives them; FIELDS_* are places in `ROW_FIELDS` (a test compares them).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

TOKEN, INDEX, LIMIT, FLAG, DELTA = 0, 1, 2, 3, 4


@intrinsic
def _pointer(_context, _word):
    """Turn an int64 into a pointer."""
    return types.voidptr(types.int64), lambda _c, builder, _s, args: builder.inttoptr(args[0], cgutils.voidptr_t)


@intrinsic
def _fence(_context):
    """Keep the writes before it before those after it, for every observer."""
    def emit(context, builder, _signature, _args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), emit


def rows_patch(args: Any, tile: int, tiles: int) -> int:
    """Apply the patch ring's current entry and advance its cursor.

    Words: 0 state, 1 words of the state, 2 entries, 3 depth, 4 words of an entry, 5 cursor. Status 2: a count or an offset
    out of range; nothing of the entry is applied then.
    """
    words = carray(args, (6,), np.int64)
    state = carray(_pointer(words[0]), (words[1],), np.int32)
    cursor = carray(_pointer(words[5]), (1,), np.int32)
    slot = np.int64(cursor[0]) % words[3]
    entry = carray(_pointer(words[2] + 4 * slot * words[4]), (words[4],), np.int32)
    count = np.int64(entry[0])
    if count < 0 or 2 + 2 * count > words[4]:
        return 2
    for i in range(count):
        if entry[2 + 2 * i] < 0 or entry[2 + 2 * i] >= words[1]:
            return 2
    for i in range(count):
        state[np.uint64(entry[2 + 2 * i])] = entry[3 + 2 * i]
    entry[0] = 0
    cursor[0] = np.int32(cursor[0] + 1)
    return 0


def rows_begin(args: Any, tile: int, tiles: int) -> int:
    """Fill a decode batch from the state.

    Words: 0 ids, 1 seq, 2 index, 3 position, 4 T, 5 state, 6 fields, 7 fields a row, 8 history, 9 tokens of a history.
    Status 2: a row's index outside its history.
    """
    words = carray(args, (10,), np.int64)
    count = words[4]
    order = carray(_pointer(words[5]), (count,), np.int32)
    ids = carray(_pointer(words[0]), (count,), np.int32)
    seq = carray(_pointer(words[1]), (count,), np.int32)
    index = carray(_pointer(words[2]), (count,), np.int32)
    position = carray(_pointer(words[3]), (count,), np.int32)
    for i in range(count):
        row = np.int64(order[i])
        ids[i] = index[i] = position[i] = 0
        seq[i] = -1
        if row < 0:
            continue
        field = carray(_pointer(words[5] + 4 * (words[6] + row * words[7])), (words[7],), np.int32)
        if field[INDEX] >= field[LIMIT]:
            field[FLAG] |= 1
            continue
        if field[INDEX] < 0 or field[INDEX] >= words[9]:
            return 2
        ids[i], seq[i], index[i] = field[TOKEN], np.int32(row), field[INDEX]
        position[i] = np.int32(field[INDEX] + field[DELTA])
        carray(_pointer(words[5] + 4 * (words[8] + row * words[9] + field[INDEX])), (1,), np.int32)[0] = field[TOKEN]
    return 0


def rows_prefill(args: Any, tile: int, tiles: int) -> int:
    """Write a prefill batch's ids into the histories.

    Words: 0 ids, 1 seq, 2 index, 3 T, 4 state, 5 history, 6 tokens of a history. Status 2: an index outside its history.
    """
    words = carray(args, (7,), np.int64)
    count = words[3]
    ids = carray(_pointer(words[0]), (count,), np.int32)
    seq = carray(_pointer(words[1]), (count,), np.int32)
    index = carray(_pointer(words[2]), (count,), np.int32)
    for t in range(count):
        if seq[t] < 0:
            continue
        if index[t] < 0 or index[t] >= words[6]:
            return 2
        carray(_pointer(words[4] + 4 * (words[5] + seq[t] * words[6] + index[t])), (1,), np.int32)[0] = ids[t]
    return 0


def rows_commit(args: Any, tile: int, tiles: int) -> int:
    """Make sampled ids the rows' next tokens.

    Words: 0 ids, 1 seq, 2 index, 3 T, 4 state, 5 fields, 6 fields a row.
    """
    words = carray(args, (7,), np.int64)
    count = words[3]
    ids = carray(_pointer(words[0]), (count,), np.int32)
    seq = carray(_pointer(words[1]), (count,), np.int32)
    index = carray(_pointer(words[2]), (count,), np.int32)
    for t in range(count):
        if seq[t] >= 0:
            field = carray(_pointer(words[4] + 4 * (words[5] + seq[t] * words[6])), (words[6],), np.int32)
            field[TOKEN] = ids[t]
            field[INDEX] = np.int32(index[t] + 1)
    return 0


def publish(args: Any, tile: int, tiles: int) -> int:
    """Write one result entry, its sequence number last, and advance the cursor.

    Words: 0 ids, 1 T, 2 state, 3 fields, 4 fields a row, 5 R, 6 header, 7 depth, 8 ring ids, 9 cursor.
    """
    words = carray(args, (10,), np.int64)
    count, rows = words[1], words[5]
    cursor = carray(_pointer(words[9]), (1,), np.int32)
    slot = np.int64(cursor[0]) % words[7]
    ids = carray(_pointer(words[0]), (count,), np.int32)
    out = carray(_pointer(words[8] + 4 * slot * rows), (rows,), np.int32)
    header = carray(_pointer(words[6] + 16 * slot), (4,), np.int32)
    fields = carray(_pointer(words[2] + 4 * words[3]), (rows * words[4],), np.int32)
    flags = np.int32(0)
    for row in range(rows):
        flags |= fields[row * words[4] + FLAG]
    for t in range(count):
        out[t] = ids[t]
    header[1] = np.int32(count)
    header[2] = flags
    _fence()
    header[0] = cursor[0]
    cursor[0] = np.int32(cursor[0] + 1)
    return 0
