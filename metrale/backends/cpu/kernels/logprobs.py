"""Log-probabilities of the chosen tokens and of the k best (Numba)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LOGPROBS = 17  # place in ROW_FIELDS; a test compares it
MAX_TOP = 20
SPAN = 512  # tokens of one float32 sum, and of one test for a better token
# Helpers are inlined; without entry points of their own they compile in half the time.
HELPER: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@intrinsic
def _pointer(_context, _word):
    """Turn an int64 into a pointer."""
    return types.voidptr(types.int64), lambda _c, builder, _s, args: builder.inttoptr(args[0], cgutils.voidptr_t)


@intrinsic
def _bits(_context, _value):
    """Return the bits of a float32 as int32."""
    return types.int32(types.float32), lambda c, builder, _s, args: builder.bitcast(args[0], c.get_value_type(types.int32))


@intrinsic
def _float(_context, _value):
    """Return the float32 of 32 bits."""
    return types.float32(types.int32), lambda c, builder, _s, args: builder.bitcast(args[0], c.get_value_type(types.float32))


@njit(**HELPER)
def _plain(value):
    """Return the logit, NaN as -inf."""
    return value if value == value else np.float32(-np.inf)


@njit(**HELPER, fastmath={"reassoc", "contract", "nsz"})
def _exponentials(logits, top):
    """Return the sum of exp(logit - top); NaN and anything below -86 count as 0."""
    total = np.float32(0)
    for i in range(logits.shape[0]):
        x = logits[i] - top
        seen = x >= np.float32(-86)
        y = x if seen else np.float32(-86)
        shifted = y * np.float32(1.44269504088896341) + np.float32(12582912)
        n = np.float32(np.int32(_bits(shifted) - np.int32(0x4B400000)))
        r = (y - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        p = p * r * r + r + np.float32(1)
        e = _float(np.int32(_bits(p) + np.int32(np.int32(_bits(shifted) - np.int32(0x4B400000)) << np.int32(23))))
        total += e if seen else np.float32(0)
    return total


@njit(**HELPER)
def _any_above(logits, start, stop, least):
    """Count the logits in [start, stop) above `least`."""
    count = np.int32(0)
    for i in range(start, stop):
        count += np.int32(1) if logits[np.uint64(i)] > least else np.int32(0)
    return count


@njit(**HELPER)
def _insert(values, ids, held, keep, value, token):
    """Insert into the descending list of `held` entries, behind equal ones; return the new length (at most `keep`)."""
    place = held if held < keep else keep - 1
    while place > 0 and values[place - 1] < value:
        values[place] = values[place - 1]
        ids[place] = ids[place - 1]
        place -= 1
    values[place] = value
    ids[place] = token
    return min(held + 1, keep)


@njit(**HELPER)
def _best(logits, keep, values, ids):
    """List the `keep` largest logits and their ids; ties to the lowest id. Most spans hold none and are read once."""
    held = 0
    for start in range(0, logits.shape[0], SPAN):
        stop = min(start + SPAN, logits.shape[0])
        if held == keep and _any_above(logits, start, stop, values[keep - 1]) == 0:
            continue
        for i in range(start, stop):
            value = _plain(logits[i])
            if held < keep or value > values[keep - 1]:
                held = _insert(values, ids, held, keep, value, np.int32(i))


def logprobs(args: Any, tile: int, tiles: int) -> int:
    """Write log-softmax of the chosen ids and the best of each asking row into the ring's next entry.

    Words: 0 logits, 1 row stride, 2 ids, 3 seq, 4 T, 5 V, 6 state, 7 fields, 8 fields a row, 9 cursor, 10 depth, 11 R,
    12 logprob, 13 top ids, 14 top logprobs. A tile is a range of rows. Status 2: a chosen id outside the vocabulary.
    """
    words = carray(args, (15,), np.int64)
    rows, vocab = words[4], words[5]
    ids = carray(_pointer(words[2]), (rows,), np.int32)
    seq = carray(_pointer(words[3]), (rows,), np.int32)
    slot = np.int64(carray(_pointer(words[9]), (1,), np.int32)[0]) % words[10]
    for t in range(rows * tile // tiles, rows * (tile + 1) // tiles):
        if seq[t] < 0:
            continue
        asked = carray(_pointer(words[6] + 4 * (words[7] + seq[t] * words[8])), (words[8],), np.int32)[LOGPROBS]
        if asked < 0:
            continue
        if ids[t] < 0 or ids[t] >= vocab:
            return 2
        logits = carray(_pointer(words[0] + 4 * t * words[1]), (vocab,), np.float32)
        entry = slot * words[11] + t
        top_ids = carray(_pointer(words[13] + 4 * MAX_TOP * entry), (MAX_TOP,), np.int32)
        top = carray(_pointer(words[14] + 4 * MAX_TOP * entry), (MAX_TOP,), np.float32)
        keep = min(min(np.int64(asked), vocab), MAX_TOP)
        largest = np.float32(-np.inf)
        for start in range(0, vocab, SPAN):
            stop = min(start + SPAN, vocab)
            if _any_above(logits, start, stop, largest) > 0:
                for i in range(start, stop):
                    largest = logits[i] if logits[i] > largest else largest
        total = 0.0
        for start in range(0, vocab, SPAN):
            count = min(SPAN, vocab - start)
            part = carray(_pointer(words[0] + 4 * (t * words[1] + start)), (count,), np.float32)
            total += np.float64(_exponentials(part, largest))
        normal = np.float64(largest) + math.log(total)
        carray(_pointer(words[12] + 4 * entry), (1,), np.float32)[0] = np.float32(np.float64(_plain(logits[ids[t]])) - normal)
        if keep > 0:
            _best(logits, keep, top, top_ids)
            for i in range(keep):
                top[i] = np.float32(np.float64(top[i]) - normal)
    return 0
