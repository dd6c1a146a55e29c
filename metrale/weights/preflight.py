"""Check a checkpoint against its config by names, shapes and formats, before anything large is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from metrale.errors import MetraleError, UnsupportedError, WeightError
from metrale.formats import TensorView
from metrale.quant.blocks import BLOCKS
from metrale.weights.index import TensorIndex
from metrale.weights.map import Matrix, Rows, WeightMap

DENSE_FORMATS: Final = ("f32", "f16", "bf16")
MATRIX_FORMATS: Final = (*DENSE_FORMATS, *BLOCKS)


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a preflight found.

    problems: every disagreement, in the order of the map. matrix_bytes: what the matrices take in the checkpoint, a tied
    head once. formats: number of matrices by format.
    """

    problems: tuple[MetraleError, ...]
    matrix_bytes: int
    formats: dict[str, int]

    def check(self) -> None:
        """Raise the first problem, if any, with the number of the others."""
        if not self.problems:
            return
        first = self.problems[0]
        more = len(self.problems) - 1
        tail = f" (and {more} more such disagreement{'s' if more > 1 else ''}; `metrale inspect` lists them)" if more else ""
        raise type(first)(f"{first}{tail}", code=first.code)


def preflight(index: TensorIndex, weights: WeightMap, source: str = "config.json") -> Preflight:
    """Compare a checkpoint with a weight map; reads no tensor.

    Problems: WeightError ``weights.missing``, ``weights.shape``, ``weights.unexpected``, ``weights.row_length``;
              UnsupportedError ``weights.format``.
    """
    problems: list[MetraleError] = []
    used: list[str] = []
    seen: dict[str, TensorView] = {}
    for matrix in weights.matrices:
        for rows in _sources(matrix):
            used.append(rows.name)
            bias = rows.name.endswith(".bias")
            shape = (rows.total,) if bias else (rows.total, matrix.columns)
            tensor = index.find(rows.name)
            problem = _disagreement(index, rows.name, tensor, shape, DENSE_FORMATS if bias else MATRIX_FORMATS, source)
            if problem is not None and rows.name not in seen:
                problems.append(problem)
            if tensor is not None and not bias:
                seen[rows.name] = tensor
    for vector in weights.vectors:
        used.append(vector.name)
        problem = _disagreement(index, vector.name, index.find(vector.name), (vector.size,), DENSE_FORMATS, source)
        if problem is not None:
            problems.append(problem)
    problems += [
        WeightError(
            f"{name}: expected no such tensor from {source}, got one; the config belongs to another checkpoint, or "
            "this build does not implement the layer",
            code="weights.unexpected",
        )
        for name in index.unused(used, weights.ignored)
    ]
    return Preflight(tuple(problems), sum(t.nbytes for t in seen.values()), dict(Counter(t.format for t in seen.values())))


def _sources(matrix: Matrix) -> Iterator[Rows]:
    for part in matrix.parts:
        yield part.rows
        if part.bias is not None:
            yield part.bias


def _disagreement(
    index: TensorIndex, name: str, tensor: TensorView | None, shape: tuple[int, ...], formats: tuple[str, ...], source: str
) -> MetraleError | None:
    stored = index.stored_name(name)
    if tensor is None:
        return WeightError(
            f"{stored}: expected a tensor of shape {shape} from {source}, got none in {index.path}; fetch the complete "
            "checkpoint",
            code="weights.missing",
        )
    if tensor.shape != shape:
        hint = (
            "the shard may be tensor-parallel, pass the merged checkpoint"
            if _is_slice(tensor.shape, shape)
            else ("config and weights belong to different models")
        )
        return WeightError(f"{stored}: expected shape {shape} from {source}, got {tensor.shape}; {hint}", code="weights.shape")
    if tensor.format not in formats:
        return UnsupportedError(
            f"{stored}: expected one of {', '.join(formats)}, got format {tensor.format}; requantize or convert the model",
            code="weights.format",
        )
    return None


def _is_slice(got: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Say whether one axis is a fraction of what it should be."""
    if len(got) != len(expected):
        return False
    ratios = [e / g if g else 0.0 for g, e in zip(got, expected, strict=True)]
    off = [r for r in ratios if r != 1.0]
    return len(off) == 1 and off[0] > 1 and off[0] == int(off[0])
