"""What every op asks of its buffers before anything runs: shapes, types, and rows that a stride describes."""

from __future__ import annotations

from typing import Any

import numpy as np

from metrale.backends.base import (
    MAX_TOP_LOGPROBS,
    QUANT_BLOCK,
    SUM_BLOCK,
    KVLayer,
    QTensor,
    ResultRing,
    RowBatch,
    RowState,
    check_shape,
)
from metrale.errors import DeviceError


def check_dtype(op: str, what: str, x: Any, *expected: Any) -> None:
    """Raise DeviceError (``op.dtype``) unless an array has one of the dtypes."""
    if isinstance(x, QTensor) or x.dtype not in expected:
        got = "a QTensor" if isinstance(x, QTensor) else x.dtype
        shown = " or ".join(str(np.dtype(dtype)) for dtype in expected)
        raise DeviceError(f"{op}: expected {what} as {shown}, got {got}; this is a bug in the caller", code="op.dtype")


def _layout(op: str, what: str, x: Any) -> DeviceError:
    return DeviceError(
        f"{op}: expected {what} with its last axis without gaps, got strides {x.strides} for shape {x.shape}; this is a bug in "
        "the caller",
        code="op.layout",
    )


def strides_of(op: str, what: str, x: Any) -> tuple[int, ...]:
    """Return the strides of all axes but the last, in elements.

    Raises: DeviceError (``op.layout``) when the last axis has gaps.
    """
    size = x.dtype.itemsize
    if x.shape[-1] > 1 and x.strides[-1] != size:
        raise _layout(op, what, x)
    return tuple(stride // size for stride in x.strides[:-1])


def row_stride(op: str, what: str, x: Any) -> int:
    """Return the elements between rows of a (T, W) array."""
    return strides_of(op, what, x)[0]


def check_dense(op: str, what: str, x: Any) -> None:
    """Raise DeviceError (``op.layout``) unless an array has no gaps at all."""
    if not x.flags.c_contiguous:
        raise _layout(op, what, x)


def row_ints(op: str, count: int | None, **arrays: Any) -> int:
    """Check int32 arrays (T,) of one length; return it."""
    for what, array in arrays.items():
        check_shape(op, what, (count,), array.shape)
        check_dtype(op, what, array, np.int32)
        strides_of(op, what, array)
        count = int(array.shape[0])
    return count or 0


def batch_rows(op: str, batch: RowBatch) -> int:
    """Check a row batch; return T."""
    return row_ints(op, None, **batch._asdict())


def check_q(op: str, q: QTensor, shape: tuple[int, ...]) -> None:
    """Check the three arrays of a QTensor against (T, K)."""
    check_shape(op, "rows", (None, None), shape)
    rows, k = shape
    check_shape(op, f"rows (a multiple of {QUANT_BLOCK})", (rows, -(-k // QUANT_BLOCK) * QUANT_BLOCK), shape)
    wanted = (("data", q.data, k, np.int8), ("scales", q.scales, k // QUANT_BLOCK, np.float32),
              ("sums", q.sums, k // SUM_BLOCK, np.int16))
    for what, array, width, dtype in wanted:
        check_shape(op, what, (rows, width), array.shape)
        check_dtype(op, what, array, dtype)
        check_dense(op, what, array)


def check_state(op: str, state: RowState) -> None:
    """Check the row state's buffer."""
    check_shape(op, "row state words", (state.layout.words,), state.words.shape)
    check_dtype(op, "row state words", state.words, np.int32)


def at_most_rows(op: str, count: int, state: RowState) -> None:
    """Check the row state, and that a step has no more rows than it."""
    check_state(op, state)
    if count > state.layout.rows:
        check_shape(op, "rows of the step", (state.layout.rows,), (count,))


def check_ring(op: str, ring: ResultRing, state: RowState) -> None:
    """Check the result ring of R rows."""
    depth, count = ring.header.shape[0], state.layout.rows
    check_shape(op, "header", (None, 4), ring.header.shape)
    check_shape(op, "ring ids", (depth, count), ring.ids.shape)
    check_shape(op, "ring logprob", (depth, count), ring.logprob.shape)
    for what, array in (("top_ids", ring.top_ids), ("top_logprobs", ring.top_logprobs)):
        check_shape(op, what, (depth, count, MAX_TOP_LOGPROBS), array.shape)
    check_shape(op, "cursor", (1,), ring.cursor.shape)
    for what, array in ring._asdict().items():
        check_dense(op, what, array)


def check_layer(op: str, layer: KVLayer, tokens: int) -> None:
    """Check one layer's pages, (blocks, heads, tokens, dim)."""
    for what, pages in (("k pages", layer.k), ("v pages", layer.v)):
        check_shape(op, what, (layer.k.shape[0], layer.heads, tokens, layer.dim), pages.shape)
        check_dense(op, what, pages)


def check_queries(op: str, q: Any, k: Any) -> None:
    """Check q (T, Hq, D) and k (T, Hk, D)."""
    check_shape(op, "q", (None, None, None), q.shape)
    check_shape(op, "k", (q.shape[0], None, q.shape[2]), k.shape)


def check_tables(op: str, tables: Any) -> None:
    """Check block tables, (sequences, max_blocks) int32."""
    check_shape(op, "tables", (None, None), tables.shape)
    check_dtype(op, "tables", tables, np.int32)
    check_dense(op, "tables", tables)


def check_logits(op: str, logits: Any, state: RowState | None, **arrays: Any) -> None:
    """Check float32 logits (T, V) and the int32 arrays (T,) beside them."""
    check_shape(op, "logits", (None, None), logits.shape)
    check_dtype(op, "logits", logits, np.float32)
    row_ints(op, logits.shape[0], **arrays)
    if state is not None:
        check_state(op, state)
