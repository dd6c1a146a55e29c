"""Penalties, bias and bans on logits (Numba)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Places in ROW_FIELDS (a test compares them), and the mark of a token that was seen at all.
REPETITION, PRESENCE, FREQUENCY, PROMPT_LEN, NUM_BIAS = 12, 13, 14, 15, 16
SEEN = 1 << 30
# Helpers are inlined; without entry points of their own they compile in half the time.
HELPER: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@intrinsic
def _pointer(_context, _word):
    """Turn an int64 into a pointer."""
    return types.voidptr(types.int64), lambda _c, builder, _s, args: builder.inttoptr(args[0], cgutils.voidptr_t)


@njit(**HELPER)
def _history(logits, counts, history, prompt, repetition, presence, frequency):
    """Count the tokens of the history, then change each one's logit once and clear its count."""
    vocab = logits.shape[0]
    for j in range(history.shape[0]):
        token = history[j]
        if 0 <= token < vocab:
            counts[token] = np.int32((counts[token] + (1 if j >= prompt else 0)) | SEEN)
    for j in range(history.shape[0]):
        token = history[j]
        if token < 0 or token >= vocab or counts[token] == 0:
            continue
        count = counts[token] & (SEEN - 1)
        counts[token] = 0
        value = np.float64(logits[token])
        logits[token] = np.float32(value / repetition if value > 0 else value * repetition)
        if count > 0:
            logits[token] = np.float32(np.float64(logits[token]) - (frequency * count + presence))


def penalize(args: Any, tile: int, tiles: int) -> int:
    """Apply the rows' penalties in place.

    Words: 0 logits, 1 row stride, 2 counts, 3 row stride, 4 seq, 5 index, 6 T, 7 V, 8 state, 9 fields, 10 fields a row,
    11 bias ids, 12 bias values, 13 bias until, 14 entries a row, 15 history, 16 tokens of a history.
    A tile is a range of rows.
    """
    words = carray(args, (17,), np.int64)
    rows, vocab = words[6], words[7]
    seq = carray(_pointer(words[4]), (rows,), np.int32)
    index = carray(_pointer(words[5]), (rows,), np.int32)
    for t in range(rows * tile // tiles, rows * (tile + 1) // tiles):
        if seq[t] < 0:
            continue
        row = np.int64(seq[t])
        at = words[8] + 4 * (words[9] + row * words[10])
        field = carray(_pointer(at), (words[10],), np.int32)
        number = carray(_pointer(at), (words[10],), np.float32)
        logits = carray(_pointer(words[0] + 4 * t * words[1]), (vocab,), np.float32)
        repetition = np.float64(number[REPETITION])
        presence, frequency = np.float64(number[PRESENCE]), np.float64(number[FREQUENCY])
        if repetition != 1 or presence != 0 or frequency != 0:
            length = min(np.int64(index[t]) + 1, words[16])
            history = carray(_pointer(words[8] + 4 * (words[15] + row * words[16])), (length,), np.int32)
            counts = carray(_pointer(words[2] + 4 * t * words[3]), (vocab,), np.int32)
            _history(logits, counts, history, np.int64(field[PROMPT_LEN]), repetition, presence, frequency)
        used = min(np.int64(field[NUM_BIAS]), words[14])
        ids = carray(_pointer(words[8] + 4 * (words[11] + row * words[14])), (used,), np.int32)
        values = carray(_pointer(words[8] + 4 * (words[12] + row * words[14])), (used,), np.float32)
        until = carray(_pointer(words[8] + 4 * (words[13] + row * words[14])), (used,), np.int32)
        for j in range(used):
            token = ids[j]
            if index[t] + 1 < until[j] and 0 <= token < vocab:
                logits[token] = values[j] if values[j] == -np.inf else logits[token] + values[j]
    return 0
