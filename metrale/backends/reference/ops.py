"""The reference ops: check shapes, then record or run the functions of the sibling files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from metrale.backends.base import (
    ACTIVATIONS,
    MAX_TOP_LOGPROBS,
    QUANT_BLOCK,
    SUM_BLOCK,
    KVLayer,
    Ops,
    PackedWeight,
    PatchRing,
    QTensor,
    Record,
    ResultRing,
    RowBatch,
    RowState,
    check_shape,
)
from metrale.backends.reference import attention, choosing, numbers, rows
from metrale.backends.reference.arrays import load, store
from metrale.backends.reference.comm import ReferenceComm
from metrale.backends.reference.weight import ReferenceWeight
from metrale.errors import DeviceError, UnsupportedError

if TYPE_CHECKING:
    from metrale.backends.reference.stream import ReferenceStream


class ReferenceOps(Ops):
    """Every primitive in NumPy; the fused ops are the contract's own compositions."""

    def __init__(self, stream: ReferenceStream) -> None:
        self._stream = stream
        self.comm = stream.backend.comm

    def _do(self, op: str, function: Callable[..., None], *buffers: Any, **params: Any) -> None:
        self._stream.submit(Record(op, buffers, params), partial(function, *buffers, **params))

    # -- rows --

    def rows_patch(self, state: RowState, ring: PatchRing) -> None:
        """Apply the ring's current entry."""
        _state("rows_patch", state)
        check_shape("rows_patch", "entries", (None, None), ring.entries.shape)
        check_shape("rows_patch", "cursor", (1,), ring.cursor.shape)
        self._do("rows_patch", rows.rows_patch, state, ring)

    def rows_begin(self, batch: RowBatch, state: RowState) -> None:
        """Fill a decode batch from the state."""
        _at_most_rows("rows_begin", _batch("rows_begin", batch), state)
        self._do("rows_begin", rows.rows_begin, batch, state)

    def rows_prefill(self, batch: RowBatch, state: RowState) -> None:
        """Write a prefill batch's ids into the histories."""
        _state("rows_prefill", state)
        _batch("rows_prefill", batch)
        self._do("rows_prefill", rows.rows_prefill, batch, state)

    def rows_commit(self, ids: Any, seq: Any, index: Any, state: RowState) -> None:
        """Make sampled ids the rows' next tokens."""
        _state("rows_commit", state)
        _row_ints("rows_commit", None, ids=ids, seq=seq, index=index)
        self._do("rows_commit", rows.rows_commit, ids, seq, index, state)

    def publish(self, ring: ResultRing, ids: Any, seq: Any, state: RowState) -> None:
        """Write one result entry."""
        _at_most_rows("publish", _row_ints("publish", None, ids=ids, seq=seq), state)
        _ring("publish", ring, state)
        self._do("publish", rows.publish, ring, ids, seq, state)

    # -- rows of numbers --

    def embed(self, out: Any, ids: Any, weight: PackedWeight, *, scale: float) -> None:
        """Gather rows of an embedding."""
        check_shape("embed", "out", (_row_ints("embed", None, ids=ids), weight.k), out.shape)
        self._do("embed", numbers.embed, out, ids, weight, scale=scale)

    def gather_rows(self, out: Any, x: Any, rows: Any) -> None:
        """Copy rows."""
        check_shape("gather_rows", "x", (None, None), x.shape)
        check_shape("gather_rows", "out", (_row_ints("gather_rows", None, rows=rows), x.shape[1]), out.shape)
        self._do("gather_rows", numbers.gather_rows, out, x, rows)

    def add(self, residual: Any, x: Any) -> None:
        """Add in place."""
        check_shape("add", "residual", (None, None), residual.shape)
        check_shape("add", "x", residual.shape, x.shape)
        self._do("add", numbers.add, residual, x)

    def scale(self, x: Any, *, factor: float) -> None:
        """Multiply in place by a constant."""
        check_shape("scale", "x", (None, None), x.shape)
        self._do("scale", numbers.scale, x, factor=factor)

    def rms_norm(self, out: Any, x: Any, weight: Any, *, eps: float, offset: float, cast_first: bool) -> None:
        """Normalise rows."""
        if len(x.shape) != 3:
            check_shape("rms_norm", "x", (None, None), x.shape)
        check_shape("rms_norm", "weight", (x.shape[-1],), weight.shape)
        _out("rms_norm", out, x.shape)
        self._do("rms_norm", numbers.rms_norm, out, x, weight, eps=eps, offset=offset, cast_first=cast_first)

    def quantize(self, out: QTensor, x: Any) -> None:
        """Quantize rows to int8."""
        check_shape("quantize", "x", (None, None), x.shape)
        _out("quantize", out, x.shape)
        self._do("quantize", numbers.quantize, out, x)

    def quantize_rest(self, out: QTensor, x: Any, q: QTensor) -> None:
        """Quantize what a quantization left."""
        check_shape("quantize_rest", "x", (None, None), x.shape)
        _out("quantize_rest", out, x.shape)
        _out("quantize_rest", q, x.shape)
        self._do("quantize_rest", numbers.quantize_rest, out, x, q)

    def linear(self, out: Any, x: Any, weight: PackedWeight, *, lora: Any | None = None) -> None:
        """Multiply."""
        check_shape("linear", "x", (None, weight.k), x.shape)
        check_shape("linear", "out", (x.shape[0], weight.n), out.shape)
        if isinstance(x, QTensor):
            _out("linear", x, x.shape)
            if not weight.takes_q:
                message = f"linear: expected block formats for a QTensor, got {weight.formats}; pass floats"
                raise DeviceError(message, code="op.dtype")
        if lora is not None:
            raise UnsupportedError("linear: expected no adapter, got one; this backend has none", code="unsupported.lora")
        assert isinstance(weight, ReferenceWeight)
        self._do("linear", numbers.linear, out, x, weight)

    def act_mul(self, out: Any, gate_up: Any, *, act: str) -> None:
        """Gate."""
        if act not in ACTIVATIONS:
            raise UnsupportedError(f"act_mul: expected one of {ACTIVATIONS}, got {act!r}", code="unsupported.activation")
        check_shape("act_mul", "gate_up", (None, None), gate_up.shape)
        check_shape("act_mul", "gate_up", (out.shape[0], 2 * out.shape[-1]), gate_up.shape)
        _out("act_mul", out, (gate_up.shape[0], gate_up.shape[1] // 2))
        self._do("act_mul", numbers.act_mul, out, gate_up, act=act)

    def softcap(self, x: Any, *, cap: float) -> None:
        """Cap in place."""
        check_shape("softcap", "x", (None, None), x.shape)
        self._do("softcap", numbers.softcap, x, cap=cap)

    # -- attention --

    def qk_norm(self, q: Any, k: Any, q_weight: Any, k_weight: Any, *, eps: float, offset: float, cast_first: bool,
                scope: str) -> None:
        """Normalise queries and keys in place."""
        if scope not in ("head", "full"):
            raise UnsupportedError(f"qk_norm: expected scope head or full, got {scope!r}", code="unsupported.norm_scope")
        _queries("qk_norm", q, k)
        for what, x, weight in (("q_weight", q, q_weight), ("k_weight", k, k_weight)):
            check_shape("qk_norm", what, (x.shape[2] if scope == "head" else x.shape[1] * x.shape[2],), weight.shape)
        self._do("qk_norm", attention.qk_norm, q, k, q_weight, k_weight, eps=eps, offset=offset, cast_first=cast_first,
                 scope=scope)

    def rope(self, q: Any, k: Any, table: Any, position: Any) -> None:
        """Rotate halves in place."""
        _queries("rope", q, k)
        check_shape("rope", "table", (None, None), table.shape)
        if table.shape[1] % 2 or table.shape[1] > q.shape[2]:
            check_shape("rope", "table", (None, min(table.shape[1] // 2 * 2, q.shape[2])), table.shape)
        _row_ints("rope", q.shape[0], position=position)
        self._do("rope", attention.rope, q, k, table, position)

    def kv_write(self, layer: KVLayer, k: Any, v: Any, batch: RowBatch, tables: Any) -> None:
        """Store K and V of the rows."""
        count = _batch("kv_write", batch)
        check_shape("kv_write", "k", (count, layer.heads, layer.dim), k.shape)
        check_shape("kv_write", "v", (count, layer.heads, layer.dim), v.shape)
        _tables("kv_write", tables)
        self._do("kv_write", attention.kv_write, layer, k, v, batch, tables)

    def attention(self, out: Any, q: Any, layer: KVLayer, batch: RowBatch, tables: Any, *, scale: float, window: int | None,
                  softcap: float | None) -> None:
        """Attend over the pages."""
        check_shape("attention", "q", (_batch("attention", batch), None, layer.dim), q.shape)
        check_shape("attention", "out", q.shape, out.shape)
        if q.shape[1] % layer.heads:
            multiple = q.shape[1] // layer.heads * layer.heads
            check_shape("attention", "q", (q.shape[0], max(layer.heads, multiple), layer.dim), q.shape)
        _tables("attention", tables)
        self._do("attention", attention.attention, out, q, layer, batch, tables, scale=scale, window=window, softcap=softcap)

    def kv_zero(self, layer: KVLayer, blocks: Any) -> None:
        """Zero whole blocks."""
        _row_ints("kv_zero", None, blocks=blocks)
        self._do("kv_zero", attention.kv_zero, layer, blocks)

    def kv_copy(self, layer: KVLayer, src: Any, dst: Any) -> None:
        """Copy whole blocks."""
        _row_ints("kv_copy", None, src=src, dst=dst)
        self._do("kv_copy", attention.kv_copy, layer, src, dst)

    # -- choosing tokens --

    def penalize(self, logits: Any, seq: Any, index: Any, state: RowState, counts: Any) -> None:
        """Apply penalties, bias and bans in place."""
        _logits("penalize", logits, state, seq=seq, index=index)
        check_shape("penalize", "counts", logits.shape, counts.shape)
        self._do("penalize", choosing.penalize, logits, seq, index, state, counts)

    def sample(self, ids: Any, logits: Any, seq: Any, index: Any, state: RowState, scratch: Any) -> None:
        """Choose an id a row by Gumbel-max over filtered logits."""
        _logits("sample", logits, state, ids=ids, seq=seq, index=index)
        check_shape("sample", "scratch", logits.shape, scratch.shape)
        self._do("sample", choosing.sample, ids, logits, seq, index, state, scratch)

    def argmax(self, ids: Any, logits: Any) -> None:
        """Choose the largest of each row."""
        _logits("argmax", logits, None, ids=ids)
        self._do("argmax", choosing.argmax, ids, logits)

    def logprobs(self, ring: ResultRing, logits: Any, ids: Any, seq: Any, state: RowState) -> None:
        """Write log-probabilities into the ring's next entry."""
        _logits("logprobs", logits, state, ids=ids, seq=seq)
        _at_most_rows("logprobs", logits.shape[0], state)
        _ring("logprobs", ring, state)
        self._do("logprobs", choosing.logprobs, ring, logits, ids, seq, state)

    # -- collectives --

    def all_reduce(self, x: Any) -> None:
        """Sum over the ranks in place."""
        self._do("all_reduce", partial(_all_reduce, self.comm), x)

    def all_gather(self, out: Any, x: Any) -> None:
        """Concatenate along the last axis in rank order."""
        check_shape("all_gather", "x", (None, None), x.shape)
        check_shape("all_gather", "out", (x.shape[0], x.shape[1] * self.comm.size), out.shape)
        self._do("all_gather", partial(_all_gather, self.comm), out, x)


# --- collectives -------------------------------------------------------------------------------------------------------


def _all_reduce(comm: Any, x: Any) -> None:
    if isinstance(comm, ReferenceComm):
        store(x, sum((load(part) for part in comm.exchange(x)), np.zeros(x.shape)))


def _all_gather(comm: Any, out: Any, x: Any) -> None:
    out[...] = np.concatenate(comm.exchange(x), axis=-1) if isinstance(comm, ReferenceComm) else x


# --- shape checks ------------------------------------------------------------------------------------------------------


def _out(op: str, out: Any, shape: tuple[int, ...]) -> None:
    """Check a float array or a QTensor against a shape."""
    check_shape(op, "out", shape, out.shape)
    if isinstance(out, QTensor):
        if shape[-1] % QUANT_BLOCK:
            whole = -(-shape[-1] // QUANT_BLOCK) * QUANT_BLOCK
            check_shape(op, f"rows (a multiple of {QUANT_BLOCK})", (shape[0], whole), shape)
        check_shape(op, "scales", (shape[0], shape[-1] // QUANT_BLOCK), out.scales.shape)
        check_shape(op, "sums", (shape[0], shape[-1] // SUM_BLOCK), out.sums.shape)


def _row_ints(op: str, count: int | None, **arrays: Any) -> int:
    """Check (T,) int32 arrays of one length; return it."""
    for what, array in arrays.items():
        check_shape(op, what, (count,), array.shape)
        if array.dtype != np.int32:
            message = f"{op}: expected {what} as int32, got {array.dtype}; this is a bug in the caller"
            raise DeviceError(message, code="op.dtype")
        count = int(array.shape[0])
    return count or 0


def _batch(op: str, batch: RowBatch) -> int:
    return _row_ints(op, None, **batch._asdict())


def _state(op: str, state: RowState) -> None:
    check_shape(op, "row state words", (state.layout.words,), state.words.shape)


def _at_most_rows(op: str, count: int, state: RowState) -> None:
    _state(op, state)
    if count > state.layout.rows:
        check_shape(op, "rows of the step", (state.layout.rows,), (count,))


def _ring(op: str, ring: ResultRing, state: RowState) -> None:
    depth, count = ring.header.shape[0], state.layout.rows
    check_shape(op, "header", (None, 4), ring.header.shape)
    check_shape(op, "ring ids", (depth, count), ring.ids.shape)
    check_shape(op, "ring logprob", (depth, count), ring.logprob.shape)
    for what, array in (("top_ids", ring.top_ids), ("top_logprobs", ring.top_logprobs)):
        check_shape(op, what, (depth, count, MAX_TOP_LOGPROBS), array.shape)
    check_shape(op, "cursor", (1,), ring.cursor.shape)


def _queries(op: str, q: Any, k: Any) -> None:
    check_shape(op, "q", (None, None, None), q.shape)
    check_shape(op, "k", (q.shape[0], None, q.shape[2]), k.shape)


def _tables(op: str, tables: Any) -> None:
    check_shape(op, "tables", (None, None), tables.shape)


def _logits(op: str, logits: Any, state: RowState | None, **arrays: Any) -> None:
    check_shape(op, "logits", (None, None), logits.shape)
    if logits.dtype != np.float32:
        raise DeviceError(f"{op}: expected logits as float32, got {logits.dtype}; this is a bug in the caller", code="op.dtype")
    _row_ints(op, logits.shape[0], **arrays)
    if state is not None:
        _state(op, state)
