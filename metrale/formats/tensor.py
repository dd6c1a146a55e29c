"""`TensorView`, one tensor inside a mapped file, and `Checkpoint`, what every container reader offers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from metrale.formats.mapped import MappedFile
from metrale.formats.types import FORMATS, Format

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor: its name, format, shape and span of a mapped file; validated by the reader that made it.

    format: a name of `metrale.formats.types.FORMATS` ("f32", "bf16", "q4_k", ...).
    shape: row-major, outermost axis first, in elements also for block formats.
    offset, nbytes: the span in the file.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: MappedFile = field(repr=False, compare=False)

    @property
    def spec(self) -> Format:
        """Return the format's entry of the table."""
        return FORMATS[self.format]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """Return K, the length of the last axis (1 for a scalar)."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Return N, the product of all axes but the last."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of K elements."""
        return self.spec.row_bytes(self.columns)

    def data(self) -> NDArray[Any]:
        """Return the tensor's bytes as a read-only array over the map.

        Shapes:   dense formats: `shape`, in the carrier dtype (bf16 as uint16 bits, f8 as uint8 bits);
                  packed formats: (rows, row_bytes) uint8
        Numerics: a tensor that starts at an address unfit for its dtype is copied, and so is a bool one (its bytes may
                  be anything); everything else is a view
        Raises:   WeightError ``weights.closed`` after the checkpoint was closed
        """
        import numpy as np

        carrier = self.spec.carrier
        shape = self.shape if carrier else (self.rows, self.row_bytes)
        dtype = np.dtype(carrier or "uint8").newbyteorder("<")
        buffer = self.file.buffer
        if self.nbytes == 0:
            empty: NDArray[Any] = np.zeros(shape, dtype)
            return empty
        if carrier == "bool":
            raw: NDArray[Any] = np.frombuffer(buffer, np.uint8, self.nbytes, self.offset)
            truth: NDArray[Any] = raw.reshape(shape) != 0
            return truth
        flat: NDArray[Any] = np.frombuffer(buffer, dtype, self.nbytes // dtype.itemsize, self.offset)
        aligned: NDArray[Any] = np.require(flat, requirements="A").reshape(shape)
        return aligned

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Give the resident pages of rows [start, stop) back to the system (arrays over them stay valid: they fault in again).

        Called after a repack, so that no weight is resident twice; a large tensor is repacked and released a slice of rows
        at a time.
        """
        stop = self.rows if stop is None else min(stop, self.rows)
        self.file.release(self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)


class Checkpoint(Protocol):
    """An open checkpoint: validated headers, no tensor byte read yet.

    tensors: by name, in file order. metadata: the container's own key/value pairs (safetensors: strings; GGUF: numbers,
    bools, strings and `metrale.formats.gguf_values.ArrayValue`). Both stay readable after `close`; `TensorView.data`
    does not.
    """

    @property
    def path(self) -> Path:
        """Return what was opened: a file, or the index of a sharded checkpoint."""

    @property
    def container(self) -> str:
        """Return "safetensors" or "gguf"."""

    @property
    def tensors(self) -> Mapping[str, TensorView]:
        """Return the tensors by name."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Return the container's metadata."""

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """Return the mapped files, one a shard."""

    def close(self) -> None:
        """Close every file; may be called twice."""

    def __enter__(self) -> Checkpoint:
        """Return itself."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close."""


class MappedCheckpoint:
    """What both readers share: files, tensors, metadata, and closing them."""

    container: str = ""

    def __init__(
        self,
        path: Path,
        files: tuple[MappedFile, ...],
        tensors: Mapping[str, TensorView],
        metadata: Mapping[str, Any],
    ) -> None:
        self.path = path
        self.files = files
        self.tensors = tensors
        self.metadata = metadata

    def close(self) -> None:
        """Close every file; may be called twice."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Checkpoint:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self.tensors)} tensors)"
