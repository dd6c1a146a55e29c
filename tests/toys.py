"""Toy kernels for the tests of thread teams, streams and captures: Numba callbacks, so that workers need no GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

SIGNATURE = types.int32(types.voidptr, types.int32, types.int32)


@intrinsic
def _pointer(_context, _word):
    """Turn an int64 into a pointer."""
    return types.voidptr(types.int64), lambda _c, builder, _s, args: builder.inttoptr(args[0], cgutils.voidptr_t)


@cfunc(SIGNATURE)
def chain(args: Any, tile: int, tiles: int) -> int:
    """Check that every tile of the op before has run in this round and that this one has not; then mark it.

    Words: 0 cells (ops, 64) int64, 1 op, 2 tiles of the op before, 3 round, 4 turns of idle work.
    """
    words = carray(args, (5,), np.int64)
    cells = carray(_pointer(words[0]), (words[1] + 1, 64), np.int64)
    for before in range(words[2]):
        if cells[words[1] - 1, before] != words[3]:
            return 7
    idle = np.int64(tile)
    for turn in range(words[4]):
        idle = idle * 3 + turn
    if cells[words[1], tile] == words[3]:
        return 8
    cells[words[1], tile] = words[3]
    return 0 if idle != -12345 else 9


@cfunc(SIGNATURE)
def fail_at(args: Any, tile: int, tiles: int) -> int:
    """Count the call in words[0] int64 (tiles,) and return words[2] in every tile from words[1] on."""
    words = carray(args, (3,), np.int64)
    calls = carray(_pointer(words[0]), (tiles,), np.int64)
    calls[tile] += 1
    return types.int32(words[2]) if tile >= words[1] else types.int32(0)


@cfunc(SIGNATURE)
def affine(args: Any, tile: int, tiles: int) -> int:
    """Write out = x * factor + shift, element tile of every `tiles`-th. Words: out, x (float32), n, factor f64, shift f64."""
    words = carray(args, (5,), np.int64)
    reals = carray(args, (5,), np.float64)
    n = words[2]
    out = carray(_pointer(words[0]), (n,), np.float32)
    x = carray(_pointer(words[1]), (n,), np.float32)
    for i in range(tile, n, tiles):
        out[i] = np.float32(x[i] * reals[3] + reals[4])
    return 0


@cfunc(SIGNATURE)
def words_out(args: Any, tile: int, tiles: int) -> int:
    """Copy words 1 to 4 to the int64 array of word 0."""
    words = carray(args, (5,), np.int64)
    out = carray(_pointer(words[0]), (4,), np.int64)
    for i in range(4):
        out[i] = words[i + 1]
    return 0


CHAIN: int = chain.address
FAIL_AT: int = fail_at.address
AFFINE: int = affine.address
WORDS_OUT: int = words_out.address


def emit_affine(emitter: Any, out: np.ndarray, x: np.ndarray, factor: float, shift: float, tiles: int = 3) -> None:
    """Emit out = x * factor + shift."""
    emitter.emit("affine", AFFINE, tiles, (out, x, out.size, float(factor), float(shift)), factor=factor, shift=shift)
