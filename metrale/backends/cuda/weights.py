"""Packed weights on the GPU: a checkpoint's own bytes, decoded inside the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from metrale.backends.base import PackedWeight, WeightPart, check_shape
from metrale.backends.cuda.variants import FORMATS
from metrale.dtypes import bf16_to_f32
from metrale.errors import DeviceError, UnsupportedError
from metrale.quant.blocks import BLOCKS, dequantize

if TYPE_CHECKING:
    from metrale.backends.cuda.backend import CudaBackend

_DENSE: Final = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}


class Segment(NamedTuple):
    """One part on the device. number: its format's, as in gguf.cuh; start: its first row; data (n, row_bytes) uint8."""

    number: int
    n: int
    start: int
    row_bytes: int
    data: Any


class CudaWeight(PackedWeight):
    """Parts stacked along N, each as the file has it."""

    def __init__(self, backend: CudaBackend, parts: Sequence[WeightPart], bias: Any | None) -> None:
        """Check, allocate and upload. Raises: like `Backend.pack`."""
        for part in parts:
            _check_part(part, parts[0].k)
        self.n = sum(part.n for part in parts)
        self.k = parts[0].k
        self.formats = tuple(part.format for part in parts)
        self.part_rows = tuple(part.n for part in parts)
        if bias is not None:
            check_shape("pack", "bias", (self.n,), np.shape(bias))
        segments, start = [], 0
        for part in parts:
            raw = np.ascontiguousarray(part.data).view(np.uint8).reshape(part.n, -1)
            data = backend.alloc(raw.shape, "u8")
            backend.upload(data, raw)
            segments.append(Segment(FORMATS.index(part.format), part.n, start, raw.shape[1], data))
            start += part.n
        self.segments = tuple(segments)
        self.bias = None
        if bias is not None:
            self.bias = backend.alloc((self.n,), "f32")
            backend.upload(self.bias, np.ascontiguousarray(bias, np.float32))
        self.nbytes = sum(s.n * s.row_bytes for s in segments) + (0 if bias is None else 4 * self.n)

    @property
    def takes_q(self) -> bool:
        """Say whether every part is a block format."""
        return all(form in BLOCKS for form in self.formats)

    def widened(self, backend: CudaBackend) -> Any:
        """Return the matrix as float32 (N, K) on the host."""
        pieces = []
        for form, segment in zip(self.formats, self.segments, strict=True):
            raw = backend.download(segment.data)
            if form in _DENSE:
                values = raw.view(_DENSE[form])
                pieces.append(bf16_to_f32(values) if form == "bf16" else values.astype(np.float32))
            else:
                pieces.append(dequantize(form, raw, self.k))
        return np.concatenate(pieces)


def _check_part(part: WeightPart, k: int) -> None:
    if part.format not in FORMATS:
        raise UnsupportedError(
            f"pack: expected one of {', '.join(FORMATS)}, got {part.format}; requantize the model to one of them",
            code="weights.format",
        )
    check_shape("pack", f"{part.format} part's K", (k,), (part.k,))
    columns = k if part.format in _DENSE else BLOCKS[part.format].row_bytes(k)
    check_shape("pack", f"{part.format} data", (part.n, columns), np.shape(part.data))
    dtype = _DENSE.get(part.format, np.dtype(np.uint8))
    if part.data.dtype != dtype:
        message = f"pack: expected {part.format} data as {dtype}, got {part.data.dtype}; convert it first"
        raise DeviceError(message, code="op.dtype")
