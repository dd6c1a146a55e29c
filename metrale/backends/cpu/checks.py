"""What the CPU ops check before anything runs, and the numbers they hand to kernels."""

from __future__ import annotations

from typing import Any

from metrale.backends.base import MAX_TOP_LOGPROBS, QUANT_BLOCK, SUM_BLOCK, QTensor, ResultRing, RowBatch, RowState, check_shape
from metrale.errors import DeviceError


def check_dtype(op: str, dtype: str, **arrays: Any) -> None:
    """Raise DeviceError (``op.dtype``) unless every array has the NumPy dtype named."""
    for what, array in arrays.items():
        got = "a QTensor" if isinstance(array, QTensor) else array.dtype
        if got != dtype:
            raise DeviceError(f"{op}: expected {what} as {dtype}, got {got}; this is a bug in the caller", code="op.dtype")


def check_rows(op: str, count: int | None, **arrays: Any) -> int:
    """Check (T,) int32 arrays of one length (None: that of the first); return it."""
    for what, array in arrays.items():
        check_shape(op, what, (count,), array.shape)
        check_dtype(op, "int32", **{what: array})
        count = int(array.shape[0])
    return count or 0


def check_batch(op: str, batch: RowBatch) -> int:
    """Check a row batch; return its number of rows."""
    return check_rows(op, None, ids=batch.ids, seq=batch.seq, index=batch.index, position=batch.position)


def check_state(op: str, state: RowState, rows: int = 0) -> None:
    """Check a row state, and that it has room for `rows` step rows."""
    check_shape(op, "row state words", (state.layout.words,), state.words.shape)
    check_dtype(op, "int32", words=state.words)
    if rows > state.layout.rows:
        check_shape(op, "rows of the step", (state.layout.rows,), (rows,))


def check_ring(op: str, ring: ResultRing, state: RowState) -> None:
    """Check the shapes of a result ring against the row state's."""
    depth, rows = ring.header.shape[0], state.layout.rows
    check_shape(op, "header", (None, 4), ring.header.shape)
    check_shape(op, "ring ids", (depth, rows), ring.ids.shape)
    check_shape(op, "ring logprob", (depth, rows), ring.logprob.shape)
    check_shape(op, "top_ids", (depth, rows, MAX_TOP_LOGPROBS), ring.top_ids.shape)
    check_shape(op, "top_logprobs", (depth, rows, MAX_TOP_LOGPROBS), ring.top_logprobs.shape)
    check_shape(op, "cursor", (1,), ring.cursor.shape)
    check_dtype(op, "int32", header=ring.header, ids=ring.ids, top_ids=ring.top_ids, cursor=ring.cursor)
    check_dtype(op, "float32", logprob=ring.logprob, top_logprobs=ring.top_logprobs)


def check_out(op: str, out: Any, shape: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
    """Check a float array or a QTensor against a shape; return (floats or None, data, scales, sums)."""
    check_shape(op, "out", shape, out.shape)
    if not isinstance(out, QTensor):
        check_dtype(op, "float32", out=out)
        return out, None, None, None
    rows, width = shape
    if width % QUANT_BLOCK:
        check_shape(op, f"rows (a multiple of {QUANT_BLOCK})", (rows, -(-width // QUANT_BLOCK) * QUANT_BLOCK), shape)
    check_shape(op, "scales", (rows, width // QUANT_BLOCK), out.scales.shape)
    check_shape(op, "sums", (rows, width // SUM_BLOCK), out.sums.shape)
    check_dtype(op, "int8", data=out.data)
    check_dtype(op, "float32", scales=out.scales)
    check_dtype(op, "int16", sums=out.sums)
    for what, array in (("data", out.data), ("scales", out.scales), ("sums", out.sums)):
        if rows > 1 and array.strides[0] != array.shape[1] * array.itemsize:
            raise DeviceError(f"{op}: expected {what} without gaps between rows, got strides {array.strides}; this is a bug in "
                              "the caller", code="op.layout")
    return None, out.data, out.scales, out.sums


def parts(x: Any) -> tuple[Any, ...]:
    """Return the arrays of a float array or a QTensor."""
    return tuple(x) if isinstance(x, QTensor) else (x,)


def stride(x: Any) -> int:
    """Return the elements from one row to the next (0 for a QTensor, whose rows lie close)."""
    return 0 if isinstance(x, QTensor) else int(x.strides[0]) // int(x.itemsize)


def row_tiles(rows: int, width: int, numbers: int = 8192) -> int:
    """Return tiles of about `numbers` numbers, at least one row each."""
    return max(1, min(rows, rows * width // numbers))
