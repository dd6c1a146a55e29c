"""Packed weights of the reference backend: the checkpoint's own bytes, widened when they are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from metrale.backends.base import PackedWeight, WeightPart, check_shape
from metrale.dtypes import bf16_to_f32
from metrale.errors import UnsupportedError
from metrale.quant.blocks import BLOCKS, dequantize

DENSE: Final = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}
PIECE_ELEMENTS: Final = 1 << 22  # widened at once: 32 MiB of float64


class ReferenceWeight(PackedWeight):
    """Parts stacked along N, each a copy of the checkpoint's rows."""

    def __init__(self, parts: Sequence[WeightPart], bias: Any | None) -> None:
        for part in parts:
            _check_part(part, parts[0].k)
        self.parts = tuple(part._replace(data=np.array(part.data)) for part in parts)
        self.part_rows = tuple(part.n for part in parts)
        self.formats = tuple(part.format for part in parts)
        self.n = sum(self.part_rows)
        self.k = parts[0].k
        if bias is not None:
            check_shape("pack", "bias", (self.n,), np.shape(bias))
        self.bias = None if bias is None else np.array(bias, np.float32)
        self.nbytes = sum(part.data.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    @property
    def takes_q(self) -> bool:
        """Say whether every part is a block format."""
        return all(form in BLOCKS for form in self.formats)

    def rows(self, ids: Any) -> NDArray[Any]:
        """Return the rows `ids` as float32 (len(ids), K)."""
        out = np.empty((len(ids), self.k), np.float32)
        first = 0
        for part in self.parts:
            mine = (ids >= first) & (ids < first + part.n)
            out[mine] = _widen(part, part.data[ids[mine] - first])
            first += part.n
        return out

    def pieces(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield (first row, float32 rows) over the matrix, a bounded number of rows at a time."""
        step = max(1, PIECE_ELEMENTS // self.k)
        first = 0
        for part in self.parts:
            for start in range(0, part.n, step):
                yield first + start, _widen(part, part.data[start : start + step])
            first += part.n


def _check_part(part: WeightPart, k: int) -> None:
    if part.format not in DENSE and part.format not in BLOCKS:
        raise UnsupportedError(
            f"pack: expected one of {', '.join([*DENSE, *BLOCKS])}, got {part.format}; requantize the model to one of them",
            code="weights.format",
        )
    check_shape("pack", f"{part.format} part's K", (k,), (part.k,))
    columns = k if part.format in DENSE else BLOCKS[part.format].row_bytes(k)
    check_shape("pack", f"{part.format} data", (part.n, columns), np.shape(part.data))


def _widen(part: WeightPart, data: NDArray[Any]) -> NDArray[Any]:
    if part.format == "bf16":
        return np.asarray(bf16_to_f32(data))
    return data.astype(np.float32) if part.format in DENSE else dequantize(part.format, data, part.k)
