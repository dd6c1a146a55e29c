"""RMS norm of rows, with the additions and the quantization around it (Numba).

One kernel for `rms_norm`, `add_rms_norm` and `norm_add`, because they differ in a loop each and compiling costs more than
a test. Only the sum of squares may be reordered by the compiler; its order depends on the width alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

PLAIN, ADD_FIRST, ADD_AFTER = 0, 1, 2
BLOCK = 32
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


@njit(**HELPER, fastmath={"reassoc", "contract", "nsz"})
def _squares(x):
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return total


@njit(**HELPER)
def _quantize(x, weight, factor, offset, q, scale, sums):
    """Quantize 32 of the normalised values (see quantize.inc: the same rule, bit for bit)."""
    top = np.int32(0)
    for i in range(BLOCK):
        size = np.int32(_bits(x[i] * factor * (offset + weight[i])) & np.int32(0x7FFFFFFF))
        top = size if size > top else top
    amax = _float(top)
    inverse = np.float32(127) / amax
    if top >= 0x7F800000 or _bits(inverse) >= 0x7F800000:
        scale[0] = amax if top >= 0x7F800000 else np.float32(0)
        q[:] = 0
        sums[:] = 0
        return
    scale[0] = amax / np.float32(127)
    for i in range(BLOCK):
        value = x[i] * factor * (offset + weight[i])
        q[i] = np.int8(np.int32(_bits(value * inverse + np.float32(12582912)) - np.int32(0x4B400000)))
    for half in range(2):
        total = np.int32(0)
        for i in range(16):
            total = np.int32(total + np.int32(q[16 * half + i]))
        sums[half] = np.int16(total)


def rms_norm(args: Any, tile: int, tiles: int) -> int:
    """Normalise rows.

    Words: 0 out f32 or 0, 1 q, 2 scales, 3 sums, 4 x, 5 residual or 0, 6 weight, 7 rows, 8 heads, 9 width, then row
    strides in floats: 10 of out, 11 of x, 12 of the residual; 13 eps f64, 14 offset f64, 15 mode.
    PLAIN: out = norm(x). ADD_FIRST: residual += x, out = norm(residual). ADD_AFTER: x = norm(x), residual += x (out is x).
    Quantized rows have one head. A tile is a range of rows.
    """
    words = carray(args, (16,), np.int64)
    reals = carray(args, (16,), np.float64)
    rows, heads, width, mode = words[7], words[8], words[9], words[15]
    eps, offset = np.float32(reals[13]), np.float32(reals[14])
    weight = carray(_pointer(words[6]), (width,), np.float32)
    for t in range(rows * tile // tiles, rows * (tile + 1) // tiles):
        for h in range(heads):
            x = carray(_pointer(words[4] + 4 * (t * words[11] + h * width)), (width,), np.float32)
            residual = carray(_pointer(words[5] + 4 * (t * words[12] + h * width)), (width,), np.float32)
            if mode == ADD_FIRST:
                for i in range(width):
                    residual[i] += x[i]
                x = residual
            factor = np.float32(1) / np.sqrt(_squares(x) / np.float32(width) + eps)
            if mode == ADD_AFTER:
                for i in range(width):
                    x[i] = x[i] * factor * (offset + weight[i])
                for i in range(width):
                    residual[i] += x[i]
            elif words[0] != 0:
                out = carray(_pointer(words[0] + 4 * (t * words[10] + h * width)), (width,), np.float32)
                for i in range(width):
                    out[i] = x[i] * factor * (offset + weight[i])
            else:
                first = words[5] + 4 * (t * words[12]) if mode == ADD_FIRST else words[4] + 4 * (t * words[11])
                for b in range(width // BLOCK):
                    at = t * width + b * BLOCK
                    _quantize(
                        carray(_pointer(first + 4 * b * BLOCK), (BLOCK,), np.float32),
                        carray(_pointer(words[6] + 4 * b * BLOCK), (BLOCK,), np.float32), factor, offset,
                        carray(_pointer(words[1] + at), (BLOCK,), np.int8),
                        carray(_pointer(words[2] + at // 8), (1,), np.float32),
                        carray(_pointer(words[3] + at // 8), (2,), np.int16),
                    )
    return 0
