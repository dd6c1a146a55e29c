"""Reading device arrays as float64 and rounding results back, once.

bf16 travels as uint16 bits; no op takes unsigned integers otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrale.backends.base import QTensor
from metrale.dtypes import bf16_to_f32, f32_to_bf16
from metrale.quant.activations import QuantizedRows, dequantize_rows, quantize_rows

F64 = NDArray[np.float64]


def load(x: Any) -> F64:
    """Return a float array (float32, float16 or bf16 bits) or a QTensor as float64."""
    if isinstance(x, QTensor):
        return dequantize_rows(QuantizedRows(*x)).astype(np.float64)
    values = bf16_to_f32(x) if x.dtype == np.uint16 else x
    return np.asarray(values, np.float64)


def store(out: Any, value: NDArray[Any]) -> None:
    """Write `value`, rounded to the type of `out`; a QTensor is quantized from the float32 value."""
    if isinstance(out, QTensor):
        for target, part in zip(out, quantize_rows(value.astype(np.float32)), strict=True):
            target[...] = part
    else:
        out[...] = rounded(value, out.dtype)


def rounded(value: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Return `value` in a device dtype (uint16: bf16 bits)."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = value.astype(np.float32)
        return np.asarray(f32_to_bf16(single) if dtype == np.uint16 else single.astype(dtype))


def f32(scalar: float) -> float:
    """Return a scalar parameter as every backend sees it: rounded to float32."""
    return float(np.float32(scalar))
