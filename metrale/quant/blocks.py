"""The GGUF block formats that metrale computes with: layouts, a slow dequantizer and a plain quantizer.

Every layout, byte offsets within a block (d, m, dmin are float16, little endian):

    q4_0   d, 16 bytes: element i in the low half of byte i, element i + 16 in the high half       x = d * (q - 8)
    q4_1   d, m, 16 bytes as q4_0                                                                  x = d * q + m
    q5_0   d, u32 of fifth bits (bit i for element i), 16 bytes as q4_0                            x = d * (q - 16)
    q5_1   d, m, u32 of fifth bits, 16 bytes as q4_0                                               x = d * q + m
    q8_0   d, 32 int8                                                                              x = d * q
    q4_k   d, dmin, 12 bytes of 6-bit scales and minima, 128 bytes                       x = d * sc * q - dmin * mn
           8 sub-blocks of 32; sub-blocks 2j and 2j + 1 are the low and high halves of bytes 32j .. 32j + 31
    q5_k   d, dmin, 12 bytes as q4_k, 32 bytes of fifth bits (bit s of byte i for element i of sub-block s), 128 bytes
    q6_k   128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 int8 scales, d           x = d * sc * (q - 32)
           two halves of 128 elements; of half h, element 32 a + i has its low bits in byte 64 h + 32 (a % 2) + i (the
           high half of it for a >= 2) and its high bits at bit 2a of byte 32 h + i; a scale covers 16 elements

Source: ggml-quants.c of llama.cpp; the sums and products below round in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from metrale.errors import UnsupportedError, WeightError
from metrale.formats.types import FORMATS, Format

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    U8 = NDArray[np.uint8]

BLOCKS: Final[dict[str, Format]] = {
    name: FORMATS[name] for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
}


# Where a block's float16 numbers are: it holds a NaN or an infinity exactly when one of them is one.
HALVES: Final[dict[str, tuple[int, ...]]] = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip


def dequantize(form: str, data: NDArray[Any], k: int) -> F32:
    """Return packed rows as float32.

    Shapes:   data (N, row_bytes) uint8, out (N, k) float32
    Raises:   UnsupportedError ``unsupported.block_format``; WeightError ``weights.row_length`` when k or row_bytes do not
              fit the format
    """
    import numpy as np

    block = _block(form, k)
    if data.ndim != 2 or data.dtype != np.uint8 or data.shape[1] != block.row_bytes(k):
        raise WeightError(
            f"{form} rows: expected (N, {block.row_bytes(k)}) uint8 for {k} columns, got {data.shape} {data.dtype}; pass "
            "TensorView.data()",
            code="weights.row_length",
        )
    blocks = np.ascontiguousarray(data).reshape(-1, block.nbytes)
    with np.errstate(invalid="ignore", over="ignore"):  # damaged scales may be infinite
        return _DEQUANTIZERS[form](blocks).reshape(data.shape[0], k)


def quantize(form: str, x: NDArray[Any]) -> U8:
    """Return rows packed in a block format: plain rounding, for fixtures; no search for better scales.

    Shapes:   x (N, K) float32, out (N, row_bytes) uint8
    Raises:   UnsupportedError ``unsupported.block_format``; WeightError ``weights.row_length``
    """
    import numpy as np

    rows, columns = x.shape
    block = _block(form, columns)
    blocks = np.ascontiguousarray(x, np.float32).reshape(-1, block.block)
    return _QUANTIZERS[form](blocks).reshape(rows, block.row_bytes(columns))


def _block(form: str, k: int) -> Format:
    block = BLOCKS.get(form)
    if block is None:
        raise UnsupportedError(
            f"{form}: expected one of {', '.join(BLOCKS)}, got a format without arithmetic here; requantize the model to one "
            "of them",
            code="unsupported.block_format",
        )
    if k % block.block:
        raise WeightError(
            f"{form} rows: expected a multiple of {block.block} columns, got {k}; choose a format with shorter blocks",
            code="weights.row_length",
        )
    return block


# --- pieces --------------------------------------------------------------------------------------------------------


def _half(raw: U8) -> F32:
    """Return the float16 in columns of two bytes as float32: (n, 2) -> (n, 1)."""
    import numpy as np

    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _half_bytes(values: NDArray[Any]) -> U8:
    """Return (n, 1) values rounded to float16, as (n, 2) bytes."""
    import numpy as np

    with np.errstate(over="ignore"):
        return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _nibbles(raw: U8) -> U8:
    """Return both halves of (n, m) bytes, all low halves first: (n, 2 m)."""
    import numpy as np

    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _pack_nibbles(q: NDArray[Any]) -> U8:
    """Undo `_nibbles`: (n, 2 m) values below 16 -> (n, m) bytes."""
    import numpy as np

    low, high = np.split(q.astype(np.uint8), 2, axis=-1)
    return low | (high << np.uint8(4))


def _bits(raw: U8) -> U8:
    """Return the 32 bits of (n, 4) bytes, lowest first."""
    import numpy as np

    return np.unpackbits(raw, axis=-1, bitorder="little")


def _scales_and_minima(raw: U8) -> tuple[U8, U8]:
    """Unpack the 12 bytes of a k-quant into 8 scales and 8 minima of 6 bits each.

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low 6 bits. Bytes 8-11 hold the low 4 bits of scales (low half)
    and minima (high half) 4-7, whose upper 2 bits are the upper 2 bits of bytes 0-3 and 4-7.
    """
    import numpy as np

    a, b, c = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=-1)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=-1)
    return scales, minima


def _pack_scales_and_minima(scales: U8, minima: U8) -> U8:
    import numpy as np

    a = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    b = minima[:, :4] | (minima[:, 4:] >> 4 << 6)
    c = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    return np.concatenate([a, b, c], axis=-1)


# --- dequantizers: (n, block bytes) uint8 -> (n, block elements) float32 ----------------------------------------------


def _from_q4_0(raw: U8) -> F32:
    import numpy as np

    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:]).astype(np.float32) - np.float32(8))


def _from_q4_1(raw: U8) -> F32:
    import numpy as np

    return _half(raw[:, :2]) * _nibbles(raw[:, 4:]).astype(np.float32) + _half(raw[:, 2:4])


def _from_q5_0(raw: U8) -> F32:
    import numpy as np

    q = _nibbles(raw[:, 6:]) | (_bits(raw[:, 2:6]) << np.uint8(4))
    return _half(raw[:, :2]) * (q.astype(np.float32) - np.float32(16))


def _from_q5_1(raw: U8) -> F32:
    import numpy as np

    q = _nibbles(raw[:, 8:]) | (_bits(raw[:, 4:8]) << np.uint8(4))
    return _half(raw[:, :2]) * q.astype(np.float32) + _half(raw[:, 2:4])


def _from_q8_0(raw: U8) -> F32:
    import numpy as np

    return _half(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


def _from_k_with_minima(raw: U8, q: U8) -> F32:
    """Scale (n, 8, 32) values of q4_k or q5_k."""
    import numpy as np

    scales, minima = _scales_and_minima(raw[:, 4:16])
    d = _half(raw[:, 0:2]) * scales.astype(np.float32)
    m = _half(raw[:, 2:4]) * minima.astype(np.float32)
    x: F32 = d[..., None] * q.astype(np.float32) - m[..., None]
    return x.reshape(-1, 256)


def _sub_block_nibbles(raw: U8) -> U8:
    """Return the (n, 8, 32) low bits of q4_k's and q5_k's 128 bytes."""
    return _nibbles(raw.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _from_q4_k(raw: U8) -> F32:
    return _from_k_with_minima(raw, _sub_block_nibbles(raw[:, 16:]))


def _from_q5_k(raw: U8) -> F32:
    import numpy as np

    fifth: U8 = (raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _from_k_with_minima(raw, _sub_block_nibbles(raw[:, 48:]) | (fifth << np.uint8(4)))


def _from_q6_k(raw: U8) -> F32:
    import numpy as np

    low = _nibbles(raw[:, 0:128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high: U8 = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & np.uint8(3)
    q = (low | (high << np.uint8(4))).astype(np.float32) - np.float32(32)
    scales = _half(raw[:, 208:210]) * raw[:, 192:208].view(np.int8).astype(np.float32)
    x: F32 = scales[..., None] * q.reshape(-1, 16, 16)
    return x.reshape(-1, 256)


# --- quantizers: (n, block elements) float32 -> (n, block bytes) uint8 ------------------------------------------------


def _over(x: NDArray[Any], scale: NDArray[Any]) -> NDArray[Any]:
    """Return x / scale, 0 where the scale is 0."""
    import numpy as np

    out: NDArray[Any] = np.zeros(np.broadcast_shapes(x.shape, scale.shape), np.float32)
    np.divide(x, scale, out=out, where=scale != 0)
    return out


def _rounded(x: NDArray[Any], low: int, high: int) -> NDArray[Any]:
    import numpy as np

    q: NDArray[Any] = np.clip(np.rint(x), low, high)
    return q.astype(np.int16)


def _largest(x: F32) -> F32:
    """Return each block's value of largest magnitude, with its sign: (n, 1)."""
    import numpy as np

    at = np.abs(x).argmax(axis=-1)[:, None]
    return np.take_along_axis(x, at, axis=-1)


def _symmetric(x: F32, zero: int) -> tuple[U8, NDArray[Any]]:
    """Return float16 scale bytes and values of 0 to 2 * zero - 1; the largest value becomes 0, as in llama.cpp."""
    d = _half_bytes(_largest(x) / -zero)
    return d, _rounded(_over(x, _half(d)) + zero, 0, 2 * zero - 1)


def _affine(x: F32, top: int) -> tuple[U8, NDArray[Any]]:
    """Return float16 bytes of scale and minimum, and values of 0 to top."""
    import numpy as np

    low = x.min(axis=-1, keepdims=True)
    d, m = _half_bytes((x.max(axis=-1, keepdims=True) - low) / top), _half_bytes(low)
    return np.concatenate([d, m], axis=-1), _rounded(_over(x - _half(m), _half(d)), 0, top)


def _fifth_bits(q: NDArray[Any]) -> U8:
    import numpy as np

    return np.packbits((q >> 4).astype(np.uint8), axis=-1, bitorder="little")


def _to_q4_0(x: F32) -> U8:
    import numpy as np

    d, q = _symmetric(x, 8)
    return np.concatenate([d, _pack_nibbles(q)], axis=-1)


def _to_q4_1(x: F32) -> U8:
    import numpy as np

    head, q = _affine(x, 15)
    return np.concatenate([head, _pack_nibbles(q)], axis=-1)


def _to_q5_0(x: F32) -> U8:
    import numpy as np

    d, q = _symmetric(x, 16)
    return np.concatenate([d, _fifth_bits(q), _pack_nibbles(q & 15)], axis=-1)


def _to_q5_1(x: F32) -> U8:
    import numpy as np

    head, q = _affine(x, 31)
    return np.concatenate([head, _fifth_bits(q), _pack_nibbles(q & 15)], axis=-1)


def _to_q8_0(x: F32) -> U8:
    import numpy as np

    d = _half_bytes(np.abs(_largest(x)) / 127)
    q = _rounded(_over(x, _half(d)), -127, 127).astype(np.int8)
    return np.concatenate([d, q.view(np.uint8)], axis=-1)


def _to_k_with_minima(x: F32, top: int) -> tuple[U8, NDArray[Any]]:
    """Return the first 16 bytes and (n, 8, 32) values of 0 to top.

    A minimum is subtracted, so a sub-block without negative values gets 0.
    """
    import numpy as np

    sub = x.reshape(-1, 8, 32)
    minimum = np.maximum(-sub.min(axis=-1), 0)
    scale = np.maximum(sub.max(axis=-1) + minimum, 0) / top
    d, dmin = (_half_bytes(v.max(axis=-1, keepdims=True) / 63) for v in (scale, minimum))
    scales = _rounded(_over(scale, _half(d)), 0, 63).astype(np.uint8)
    minima = _rounded(_over(minimum, _half(dmin)), 0, 63).astype(np.uint8)
    exact_scale, exact_minimum = _half(d) * scales, _half(dmin) * minima
    q = _rounded(_over(sub + exact_minimum[..., None], exact_scale[..., None]), 0, top)
    return np.concatenate([d, dmin, _pack_scales_and_minima(scales, minima)], axis=-1), q


def _pack_sub_blocks(q: NDArray[Any]) -> U8:
    return _pack_nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128)


def _to_q4_k(x: F32) -> U8:
    import numpy as np

    head, q = _to_k_with_minima(x, 15)
    return np.concatenate([head, _pack_sub_blocks(q)], axis=-1)


def _to_q5_k(x: F32) -> U8:
    import numpy as np

    head, q = _to_k_with_minima(x, 31)
    fifth = np.packbits((q >> 4).astype(np.uint8), axis=1, bitorder="little").reshape(-1, 32)
    return np.concatenate([head, fifth, _pack_sub_blocks(q & 15)], axis=-1)


def _to_q6_k(x: F32) -> U8:
    import numpy as np

    sub = x.reshape(-1, 16, 16)
    scale: F32 = _largest(x.reshape(-1, 16)).reshape(-1, 16) / np.float32(-32)
    d = _half_bytes(_largest(scale) / -128)
    scales = _rounded(_over(scale, _half(d)), -128, 127).astype(np.int8)
    q = _rounded(_over(sub, (_half(d) * scales)[..., None]), -32, 31).reshape(-1, 2, 4, 32) + 32
    low = _pack_nibbles((q & 15).reshape(-1, 2, 128)).reshape(-1, 128)
    high = ((q >> 4) << np.array([0, 2, 4, 6], np.int16)[:, None]).sum(axis=2).astype(np.uint8).reshape(-1, 64)
    return np.concatenate([low, high, scales.view(np.uint8), d], axis=-1)


_DEQUANTIZERS: Final[dict[str, Callable[[U8], F32]]] = {
    "q4_0": _from_q4_0, "q4_1": _from_q4_1, "q5_0": _from_q5_0, "q5_1": _from_q5_1, "q8_0": _from_q8_0,
    "q4_k": _from_q4_k, "q5_k": _from_q5_k, "q6_k": _from_q6_k,
}  # fmt: skip
_QUANTIZERS: Final[dict[str, Callable[[F32], U8]]] = {
    "q4_0": _to_q4_0, "q4_1": _to_q4_1, "q5_0": _to_q5_0, "q5_1": _to_q5_1, "q8_0": _to_q8_0,
    "q4_k": _to_q4_k, "q5_k": _to_q5_k, "q6_k": _to_q6_k,
}  # fmt: skip
