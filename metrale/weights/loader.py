"""Load a checkpoint into a backend: map -> split over ranks -> stack -> pack, one matrix at a time.

The pages of a tensor are given back after it was packed, so a weight is never resident twice: the peak is the packed
weights and the largest matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metrale.backends.base import Backend, PackedWeight, WeightPart
from metrale.dtypes import bf16_to_f32
from metrale.errors import UnsupportedError, WeightError
from metrale.formats import FORMATS, TensorView
from metrale.quant.blocks import BLOCKS, HALVES, dequantize
from metrale.weights.index import TensorIndex
from metrale.weights.map import Matrix, Part, Rows, WeightMap
from metrale.weights.preflight import preflight

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Progress = Callable[[int, int], None]

_SCAN_ROWS_BYTES = 1 << 24  # a NaN scan widens about this many bytes at a time


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights on a backend, by target name of the weight map.

    embed_format: the checkpoint's format of the embedding. nbytes: packed size, bias and vectors left out.
    """

    matrices: dict[str, PackedWeight]
    vectors: dict[str, Any]
    embed_format: str
    nbytes: int


def load_weights(
    index: TensorIndex, weights: WeightMap, backend: Backend, *, source: str = "config.json", progress: Progress | None = None
) -> Weights:
    """Check the checkpoint, then pack this rank's share of every matrix and upload every vector.

    progress: called with (bytes done, bytes in all) of the checkpoint after each matrix.
    Raises: what `preflight` finds; UnsupportedError ``weights.shard`` when the ranks cannot share a matrix.
    """
    report = preflight(index, weights, source)
    report.check()
    rank, size = backend.comm.rank, backend.comm.size
    for matrix in weights.matrices:  # before anything is read
        for part in matrix.parts:
            shard_bounds(index, matrix, part, rank, size)
    # Vectors first: they lie scattered over the file, and each brings neighbouring pages in that the matrices then release.
    vectors = {vector.target: _upload(backend, _vector(index, vector.name, vector.gguf_add)) for vector in weights.vectors}
    done, total = 0, sum(_matrix_bytes(index, matrix) for matrix in weights.matrices)
    matrices: dict[str, PackedWeight] = {}
    for matrix in weights.matrices:
        matrices[matrix.target] = pack_matrix(index, matrix, backend, rank, size)
        done += _matrix_bytes(index, matrix)
        if progress is not None:
            progress(done, total)
    if weights.tied and size > 1:
        head = _tied_head(weights)
        matrices[head.target] = pack_matrix(index, head, backend, rank, size)
    embedding = _tensor(index, "embed_tokens.weight")
    return Weights(matrices, vectors, embedding.format, sum(m.nbytes for m in matrices.values()))


def _tied_head(weights: WeightMap) -> Matrix:
    """Return the rank's share of the embedding as its head: 1 / size more memory, 1 / size of the head's work."""
    embed = next(m for m in weights.matrices if m.target == "embed")
    return Matrix("head", embed.columns, (Part(embed.parts[0].rows, shard="vocab"),))


def pack_matrix(index: TensorIndex, matrix: Matrix, backend: Backend, rank: int, size: int) -> PackedWeight:
    """Pack one rank's share of a matrix and give the pages of its tensors back."""
    parts = [_weight_part(index, matrix, part, rank, size) for part in matrix.parts]
    packed = backend.pack(parts, _bias(index, matrix, rank, size))
    del parts
    for part in matrix.parts:
        _tensor(index, part.rows.name).release()
    return packed


# --- splitting ---------------------------------------------------------------------------------------------------------


def shard_bounds(index: TensorIndex, matrix: Matrix, part: Part, rank: int, size: int) -> tuple[int, int, int, int]:
    """Return (first row, end row, first column, end column) of a rank's share; rows count from the part's first.

    Raises: UnsupportedError ``weights.shard``.
    """
    rows, columns = part.rows.count, matrix.columns
    if size == 1 or part.shard == "none" or (part.shard == "vocab" and rows % size):
        return 0, rows, 0, columns
    if part.shard == "columns":
        block = FORMATS[_tensor(index, part.rows.name).format].block
        _divide(index, part, columns, size, max(part.unit, 1), block)
        return 0, rows, rank * columns // size, (rank + 1) * columns // size
    _divide(index, part, rows, size, part.unit, 1)
    return rank * rows // size, (rank + 1) * rows // size, 0, columns


def _divide(index: TensorIndex, part: Part, length: int, size: int, unit: int, block: int) -> None:
    share = length // size
    if length % size or share % unit or share % block:
        what = f"{part.shard} in multiples of {unit}" + (f" and of the format's {block}" if block > 1 else "")
        raise UnsupportedError(
            f"{index.stored_name(part.rows.name)}: expected {length} {what} to divide over {size} ranks, got a "
            f"share of {length / size:g}; use fewer ranks",
            code="weights.shard",
        )


def _weight_part(index: TensorIndex, matrix: Matrix, part: Part, rank: int, size: int) -> WeightPart:
    import numpy as np

    tensor = _tensor(index, part.rows.name)
    r0, r1, c0, c1 = shard_bounds(index, matrix, part, rank, size)
    data = tensor.data()[part.rows.start + r0 : part.rows.start + r1]
    if (c0, c1) != (0, matrix.columns):
        form = FORMATS[tensor.format]
        scale = (form.nbytes, form.block) if form.packed else (1, 1)
        data = np.ascontiguousarray(data[:, c0 // scale[1] * scale[0] : c1 // scale[1] * scale[0]])
    if index.gguf and part.gguf_heads:
        data = data[_head_order(r1 - r0, part.unit)]
    return WeightPart(tensor.format, r1 - r0, c1 - c0, data)


def _head_order(rows: int, head_dim: int) -> NDArray[Any]:
    """Return where each row of rotate-half heads stands among rows that interleave each head's two halves."""
    import numpy as np

    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _bias(index: TensorIndex, matrix: Matrix, rank: int, size: int) -> NDArray[np.float32] | None:
    """Return the stacked bias (N,) float32 of this rank, or None when no part has one."""
    import numpy as np

    if all(part.bias is None for part in matrix.parts):
        return None
    pieces = []
    for part in matrix.parts:
        r0, r1, _, _ = shard_bounds(index, matrix, part, rank, size)
        if part.bias is None or (part.shard == "columns" and rank > 0):
            pieces.append(np.zeros(r1 - r0, np.float32))
            continue
        values = _rows_of_vector(index, part.bias)[r0:r1]
        pieces.append(values[_head_order(r1 - r0, part.unit)] if index.gguf and part.gguf_heads else values)
    return np.concatenate(pieces)


# --- tensors -----------------------------------------------------------------------------------------------------------


def _tensor(index: TensorIndex, name: str) -> TensorView:
    tensor = index.find(name)
    if tensor is None:
        raise WeightError(
            f"{index.stored_name(name)}: expected a tensor, got none in {index.path}; fetch the complete checkpoint",
            code="weights.missing",
        )
    return tensor


def _matrix_bytes(index: TensorIndex, matrix: Matrix) -> int:
    tensors = ((part, _tensor(index, part.rows.name)) for part in matrix.parts)
    return sum(tensor.nbytes * part.rows.count // part.rows.total for part, tensor in tensors)


def _rows_of_vector(index: TensorIndex, rows: Rows) -> NDArray[np.float32]:
    return _vector(index, rows.name, 0.0)[rows.start : rows.start + rows.count]


def _vector(index: TensorIndex, name: str, gguf_add: float) -> NDArray[np.float32]:
    import numpy as np

    values = widen(_tensor(index, name))
    return values + np.float32(gguf_add) if index.gguf and gguf_add else values


def _upload(backend: Backend, values: NDArray[np.float32]) -> Any:
    device = backend.alloc(values.shape, "f32")
    backend.upload(device, values)
    return device


def widen(tensor: TensorView) -> NDArray[np.float32]:
    """Return a dense tensor as a float32 copy. Raises: UnsupportedError ``weights.format``."""
    import numpy as np

    if tensor.format == "bf16":
        widened: NDArray[np.float32] = bf16_to_f32(tensor.data())
        return widened
    if tensor.format in ("f32", "f16", "f64"):
        return tensor.data().astype(np.float32)
    raise UnsupportedError(
        f"{tensor.name}: expected f32, f16 or bf16, got format {tensor.format}; convert the model", code="weights.format"
    )


def count_not_finite(tensor: TensorView) -> int:
    """Return how many elements of a float or block tensor are NaN or infinite; reads it in pieces, for `inspect`.

    Formats without arithmetic here count as 0.
    """
    import numpy as np

    if tensor.format not in ("f32", "f16", "bf16", "f64", *BLOCKS) or not tensor.size:
        return 0
    data = tensor.data()
    rows = data.reshape(-1, data.shape[-1]) if data.ndim else data.reshape(1, 1)
    step = max(1, _SCAN_ROWS_BYTES // max(rows[:1].nbytes, 1))
    total = 0
    for piece in _pieces(rows, step):
        values: Any = piece
        if tensor.format == "bf16":
            values = bf16_to_f32(piece)
        elif tensor.format in BLOCKS:
            values = _damaged_blocks(tensor.format, piece)
        total += int(values.size - np.count_nonzero(np.isfinite(values)))
    tensor.release()
    return total


def _damaged_blocks(form: str, rows: NDArray[Any]) -> NDArray[Any]:
    """Return the values of the blocks with a number that is not finite; of the others only that number is looked at."""
    blocks = rows.reshape(-1, BLOCKS[form].nbytes)
    bad = (blocks[:, HALVES[form][0] + 1] & 0x7C) == 0x7C  # all bits of a float16's exponent
    for offset in HALVES[form][1:]:
        bad |= (blocks[:, offset + 1] & 0x7C) == 0x7C
    return dequantize(form, blocks[bad], BLOCKS[form].block)


def _pieces(rows: NDArray[Any], step: int) -> Iterator[NDArray[Any]]:
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step]
