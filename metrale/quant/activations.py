"""Int8 quantization of activations: the reference that every backend's `quantize` is tested against.

A row of K float32 values becomes K int8 values, one float32 scale for every 32 of them, and one int16 sum for every 16
(the products with block formats that have an offset, such as q4_1, need sums of the activations).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCALE_BLOCK: Final = 32
SUM_BLOCK: Final = 16


class QuantizedRows(NamedTuple):
    """Quantized rows; the same three arrays, in the same order, as the backends' QTensor.

    data (T, K) int8; scales (T, K/32) float32; sums (T, K/16) int16, the sums of `data`.
    """

    data: NDArray[Any]
    scales: NDArray[Any]
    sums: NDArray[Any]


def quantize_rows(x: NDArray[Any]) -> QuantizedRows:
    """Quantize rows of float32 to int8.

    Shapes:   x (T, K) float32, K a multiple of 32
    Numerics: for each 32 values, amax = max |x|; scale = amax / 127; q = round-half-even(x * (127 / amax)), every
              operation rounded to float32. Where 127 / amax is not finite (amax 0, or below 3.8e-37) scale and q are 0.
              A block with a NaN has scale NaN, one with an infinity has scale inf; their q are 0, so a product with them
              is NaN and poison is never hidden.
    Raises:   ValueError when K is not a multiple of 32
    """
    import numpy as np

    rows, columns = x.shape
    if columns % SCALE_BLOCK:
        raise ValueError(f"x: expected rows of a multiple of {SCALE_BLOCK}, got {columns}; pad the matrix")
    blocks = np.asarray(x, np.float32).reshape(rows, columns // SCALE_BLOCK, SCALE_BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(127) / amax
        scales = amax / np.float32(127)
        tiny = np.isposinf(inverse)
        usable = np.isfinite(amax) & ~tiny
        q = np.rint(blocks * np.where(usable, inverse, np.float32(0))[..., None])
    data = np.where(usable[..., None], q, 0).astype(np.int8).reshape(rows, columns)
    sums = data.reshape(rows, columns // SUM_BLOCK, SUM_BLOCK).sum(axis=-1, dtype=np.int16)
    return QuantizedRows(data, np.where(tiny, np.float32(0), scales), sums)


def dequantize_rows(q: QuantizedRows) -> NDArray[Any]:
    """Return data * scale: (T, K) float32."""
    import numpy as np

    rows, columns = q.data.shape
    blocks: NDArray[Any] = q.data.reshape(rows, columns // SCALE_BLOCK, SCALE_BLOCK).astype(np.float32)
    x: NDArray[Any] = blocks * q.scales[..., None]
    return x.reshape(rows, columns)
