"""Element types: their names, sizes and NumPy carriers.

bf16 has no NumPy type; its bits travel as uint16.
"""

from __future__ import annotations

from typing import Any, Final

ITEMSIZE: Final[dict[str, int]] = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "bool": 1,
}
_NUMPY: Final[dict[str, str]] = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "uint16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "bool": "bool_",
}


def numpy_dtype(name: str) -> Any:
    """Return the NumPy dtype that carries `name` (bf16: uint16 bits)."""
    import numpy as np

    return np.dtype(_NUMPY[name])


def bf16_to_f32(bits: Any) -> Any:
    """Widen bf16 bits (uint16 array) to float32, exactly."""
    import numpy as np

    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: Any) -> Any:
    """Round float32 to bf16 bits (uint16 array), nearest even; NaN stays NaN."""
    import numpy as np

    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)
