"""Weight maps: which checkpoint rows make up each matrix and vector of a model, and how ranks share them.

Names are canonical: Hugging Face's, without the prefix before ``embed_tokens``, ``layers`` and ``norm``
(``layers.3.self_attn.q_proj.weight``). `metrale.weights.index` finds them in either container.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shard = Literal["none", "rows", "columns", "vocab"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, start + count) of a checkpoint tensor that has `total` of them."""

    name: str
    start: int
    count: int
    total: int


@dataclass(frozen=True, slots=True)
class Part:
    """One of the matrices stacked along N.

    shard: the axis ranks split: "rows" (outputs; of each part for itself, before parts are fused), "columns" (inputs; the
    product is then summed over the ranks, so that only rank 0 keeps the bias), "vocab" (rows where they divide evenly,
    else a whole copy a rank), "none" (a copy a rank). unit: shards are whole multiples of this many rows or columns (a
    head). gguf_heads: in a GGUF file the rows of each of this many heads interleave the two halves (0: as they are).
    """

    rows: Rows
    bias: Rows | None = None
    shard: Shard = "none"
    unit: int = 1
    gguf_heads: int = 0


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed matrix of the model: `parts` stacked along N, each with `columns` inputs."""

    target: str
    columns: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Vector:
    """A float32 vector of the model, a copy a rank. gguf_add: added to what a GGUF file holds."""

    target: str
    name: str
    size: int
    gguf_add: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All weights of a model.

    ignored: patterns (of `fnmatch`) of tensors that may stand in a checkpoint without being used. tied: the head is the
    embedding.
    """

    matrices: tuple[Matrix, ...]
    vectors: tuple[Vector, ...]
    ignored: tuple[str, ...] = ()
    tied: bool = False
