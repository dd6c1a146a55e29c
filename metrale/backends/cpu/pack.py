"""Weights of the CPU backend: panels of 16 rows in the file's own bits (kernels/formats.h has the layout).

Parts of one format whose rows fill whole panels share a segment, so that one op multiplies all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from metrale._ext import cpu_kernels
from metrale.backends.base import PackedWeight, WeightPart, check_shape
from metrale.errors import UnsupportedError
from metrale.quant.blocks import BLOCKS

if TYPE_CHECKING:
    from metrale.backends.cpu.backend import CpuBackend

PANEL_ROWS: Final = 16
# Name -> number in kernels/formats.h, bytes of a record, records of a super-block, bytes of its header.
_DENSE: Final = {"f16": (8, 32, np.float16), "bf16": (9, 32, np.uint16), "f32": (10, 64, np.float32)}
_BLOCK: Final = {
    "q4_0": (0, 288, 1, 0),
    "q4_1": (1, 320, 1, 0),
    "q5_0": (2, 352, 1, 0),
    "q5_1": (3, 384, 1, 0),
    "q8_0": (4, 544, 1, 0),
    "q4_k": (5, 288, 8, 64),
    "q5_k": (6, 352, 8, 64),
    "q6_k": (7, 416, 8, 32),
}
_PACK_TILE_BYTES: Final = 1 << 20


def format_number(form: str) -> int:
    """Return the number the kernels know a format by."""
    return _DENSE[form][0] if form in _DENSE else _BLOCK[form][0]


def panel_bytes(form: str, k: int) -> int:
    """Return the bytes of one panel of 16 rows of `k` inputs."""
    if form in _DENSE:
        return k * _DENSE[form][1]
    _, record, records, header = _BLOCK[form]
    return k // 32 * record + k // 32 // records * header


class Segment(NamedTuple):
    """Rows [start, start + n) of a matrix in one format: panels (bytes,) uint8, row 0 of panel 0 is row `start`."""

    form: str
    number: int
    start: int
    n: int
    panel_bytes: int
    panels: Any


class CpuWeight(PackedWeight):
    """A matrix in panels."""

    def __init__(self, parts: Sequence[WeightPart], segments: tuple[Segment, ...], bias: Any | None) -> None:
        self.k = parts[0].k
        self.n = sum(part.n for part in parts)
        self.formats = tuple(part.format for part in parts)
        self.part_rows = tuple(part.n for part in parts)
        self.segments = segments
        self.bias = bias
        self.nbytes = sum(segment.panels.nbytes for segment in segments) + (0 if bias is None else bias.nbytes)

    @property
    def takes_q(self) -> bool:
        """Say whether every part is a block format."""
        return all(form in _BLOCK for form in self.formats)

    def halves(self) -> tuple[Segment, Segment] | None:
        """Return gate and up as two segments of equal size, None when the matrix is not of that kind."""
        if len(self.part_rows) != 2 or self.part_rows[0] != self.part_rows[1]:
            return None
        n = self.part_rows[0]
        if len(self.segments) == 2:
            return self.segments[0], self.segments[1]
        whole = self.segments[0]
        cut = n // PANEL_ROWS * whole.panel_bytes
        return whole._replace(n=n, panels=whole.panels[:cut]), whole._replace(start=n, n=n, panels=whole.panels[cut:])


def pack(backend: CpuBackend, parts: Sequence[WeightPart], bias: Any | None = None) -> CpuWeight:
    """Pack parts of equal K, stacked along N.

    Raises: UnsupportedError ``weights.format``; DeviceError ``op.shape`` for sizes that disagree.
    """
    for part in parts:
        _check(part, parts[0].k)
    total = sum(part.n for part in parts)
    own_bias = None
    if bias is not None:
        check_shape("pack", "bias", (total,), np.shape(bias))
        own_bias = backend.alloc((total,), "f32")
        own_bias[:] = bias
    segments = []
    start = 0
    for group in _groups(parts):
        segments.append(_segment(backend, group, start))
        start += segments[-1].n
    return CpuWeight(parts, tuple(segments), own_bias)


def unpack(weight: CpuWeight) -> Any:
    """Return the matrix as float32 (N, K)."""
    out = np.empty((weight.n, weight.k), np.float32)
    kernel = cpu_kernels.address("embed", "generic")
    for segment in weight.segments:
        ids = np.arange(segment.n, dtype=np.int32)
        rows = out[segment.start : segment.start + segment.n]
        args = np.array(
            [
                rows.ctypes.data,
                ids.ctypes.data,
                segment.panels.ctypes.data,
                segment.n,
                segment.n,
                weight.k,
                weight.k,
                segment.number,
                np.float64(1.0).view(np.int64),
                0,
                segment.n,
            ],
            np.int64,
        )
        if status := cpu_kernels.call(kernel, args.ctypes.data, 0, 1):
            raise AssertionError(f"embed returned {status} for {segment.form}")
    return out


def _check(part: WeightPart, k: int) -> None:
    if part.format not in _DENSE and part.format not in _BLOCK:
        raise UnsupportedError(
            f"pack: expected one of {', '.join([*_DENSE, *_BLOCK])}, got {part.format}; requantize the model to one of them",
            code="weights.format",
        )
    check_shape("pack", f"{part.format} part's K", (k,), (part.k,))
    columns = k if part.format in _DENSE else BLOCKS[part.format].row_bytes(k)
    check_shape("pack", f"{part.format} data", (part.n, columns), np.shape(part.data))


def _groups(parts: Sequence[WeightPart]) -> list[list[WeightPart]]:
    """Join neighbours of one format as long as each begins at a panel."""
    groups: list[list[WeightPart]] = []
    for part in parts:
        if groups and groups[-1][-1].format == part.format and sum(p.n for p in groups[-1]) % PANEL_ROWS == 0:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _segment(backend: CpuBackend, group: list[WeightPart], start: int) -> Segment:
    form, k = group[0].format, group[0].k
    n, size = sum(part.n for part in group), panel_bytes(form, k)
    panels = backend.alloc((-(-n // PANEL_ROWS) * size,), "u8")
    kernel = cpu_kernels.address("pack", "host")
    first = 0
    for i, part in enumerate(group):
        data = part.data
        if form in _DENSE and data.dtype != _DENSE[form][2]:
            data = np.asarray(data).astype(_DENSE[form][2])
        if data.shape[1] > 1 and data.strides[1] != data.dtype.itemsize:
            data = np.ascontiguousarray(data)
        if part.n:
            stride = data.strides[0] if part.n > 1 else data.nbytes
            args = (panels, data.ctypes.data, part.n, k, stride, format_number(form), first, int(i == len(group) - 1))
            tiles = max(1, min(-(-part.n // PANEL_ROWS), part.n * stride // _PACK_TILE_BYTES))
            backend.team.call(kernel, args, tiles, "pack")
        first += part.n
    return Segment(form, format_number(form), start, n, size, panels)
