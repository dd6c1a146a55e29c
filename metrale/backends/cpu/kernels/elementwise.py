"""Additions, scalings, caps and copies of rows of floats (Numba)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ADD, SCALE, SOFTCAP = 0, 1, 2
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
def _tanh(x):
    """Return tanh in float32: near zero an odd polynomial (Cephes' tanhf), else 1 - 2 / (exp(2|x|) + 1)."""
    size = abs(x)
    z = x * x
    small = np.float32(-5.70498872745e-3)
    small = small * z + np.float32(2.06390887954e-2)
    small = small * z + np.float32(-5.37397155531e-2)
    small = small * z + np.float32(1.33314422036e-1)
    small = small * z + np.float32(-3.33332819422e-1)
    small = small * z * x + x
    y = np.float32(2) * size
    y = y if y < np.float32(40) else np.float32(40)
    shifted = y * np.float32(1.44269504088896341) + np.float32(12582912)
    n = shifted - np.float32(12582912)
    r = y - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    power = _float(np.int32((np.int32(_bits(shifted) - np.int32(0x4B400000)) + np.int32(127)) << np.int32(23)))
    large = np.float32(1) - np.float32(2) / (p * power + np.float32(1))
    large = large if x > np.float32(0) else -large
    return small if size < np.float32(0.625) else (large if size >= np.float32(0.625) else x)


def elementwise(args: Any, tile: int, tiles: int) -> int:
    """Change rows in place.

    Words: 0 x, 1 y or 0, 2 rows, 3 width, 4 row stride of x, 5 row stride of y, 6 number f64, 7 mode.
    ADD: x += y. SCALE: x *= number. SOFTCAP: x = number * tanh(x / number). A tile is a range of the rows' pieces; all
    pieces of a row have the same length but the last.
    """
    words = carray(args, (8,), np.int64)
    number = np.float32(carray(args, (8,), np.float64)[6])
    rows, width, mode = words[2], words[3], words[7]
    pieces = max(1, tiles // max(1, rows))
    step = (width + pieces - 1) // pieces
    for part in range(rows * pieces * tile // tiles, rows * pieces * (tile + 1) // tiles):
        t, first = part // pieces, part % pieces * step
        count = max(0, min(step, width - first))
        x = carray(_pointer(words[0] + 4 * (t * words[4] + first)), (count,), np.float32)
        if mode == ADD:
            y = carray(_pointer(words[1] + 4 * (t * words[5] + first)), (count,), np.float32)
            for i in range(count):
                x[i] += y[i]
        elif mode == SCALE:
            for i in range(count):
                x[i] *= number
        else:
            for i in range(count):
                x[i] = number * _tanh(x[i] / number)
    return 0


def gather_rows(args: Any, tile: int, tiles: int) -> int:
    """Copy rows: out[i] = x[rows[i]], -1 copies nothing.

    Words: 0 out, 1 x, 2 rows int32, 3 count, 4 width, 5 row stride of out, 6 of x (floats), 7 rows of x.
    A tile is a range of rows. Status 2: a row outside x.
    """
    words = carray(args, (8,), np.int64)
    count, width = words[3], words[4]
    rows = carray(_pointer(words[2]), (count,), np.int32)
    for i in range(count * tile // tiles, count * (tile + 1) // tiles):
        row = rows[i]
        if row >= words[7]:
            return 2
        if row >= 0:
            out = carray(_pointer(words[0] + 4 * i * words[5]), (width,), np.float32)
            x = carray(_pointer(words[1] + 4 * row * words[6]), (width,), np.float32)
            for j in range(width):
                out[j] = x[j]
    return 0
