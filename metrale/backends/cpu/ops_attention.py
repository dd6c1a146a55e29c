"""Queries, keys, values and their pages on the CPU."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from metrale._ext import cpu_kernels
from metrale.backends.base import BLOCK_TOKENS, KVLayer, QkNorm, RowBatch, check_shape
from metrale.backends.cpu.checks import check_batch, check_dtype, check_rows, stride
from metrale.backends.cpu.emit import Emitter
from metrale.errors import UnsupportedError

# As in attention.inc.
CHUNK_BLOCKS: Final = 16
QUERIES: Final = 48
MAX_DIM: Final = 8192
ENOUGH_TILES: Final = 32


def attention_plan(rows: int, q_heads: int, heads: int, table_blocks: int) -> tuple[int, int, int]:
    """Return (rows a tile, slots a row, tiles), from the shape alone.

    With few (row, kv head) pairs a row's chunks are dealt to slots, so that every thread has work; slots 0 means that a tile
    does all chunks of its rows. Many rows share a tile, and with it their reads of K and V.
    """
    pairs = rows * heads
    chunks = -(-table_blocks // CHUNK_BLOCKS)
    if pairs < ENOUGH_TILES:
        slots = min(chunks, -(-ENOUGH_TILES // max(1, pairs)))
        return (1, 0, pairs) if slots < 2 else (1, slots, pairs * slots)
    a_tile = max(1, min(pairs // ENOUGH_TILES, 32, QUERIES // (q_heads // heads)))
    return a_tile, 0, -(-rows // a_tile) * heads


class AttentionOps(Emitter):
    """Ops of attention; C kernels in the backend's instruction set."""

    # Results of chunks and counters of the rows that are cut into slots; every one ever made stays, since a captured
    # program holds its address. One a stream, whose ops run one after the other.
    _space: list[tuple[Any, Any]] | None = None

    def _kernel(self, name: str) -> int:
        address: int = cpu_kernels.address(name, self.backend.isa)
        return address

    def qk_norm(self, q: Any, k: Any, q_weight: Any, k_weight: Any, *, eps: float, offset: float, cast_first: bool,
                scope: str) -> None:
        """Normalise queries and keys in place; `cast_first` changes nothing in float32."""
        rows = _queries("qk_norm", q, k)
        norms = QkNorm(q_weight, k_weight, eps, offset, cast_first, scope)
        self._finish("qk_norm", rows, q, k, None, norms, None, None, None, (q, k, q_weight, k_weight),
                     eps=eps, offset=offset, cast_first=cast_first, scope=scope)

    def rope(self, q: Any, k: Any, table: Any, position: Any) -> None:
        """Rotate halves in place."""
        rows = _queries("rope", q, k)
        check_rows("rope", rows, position=position)
        self._finish("rope", rows, q, k, None, None, table, None, position, (q, k, table, position))

    def kv_write(self, layer: KVLayer, k: Any, v: Any, batch: RowBatch, tables: Any) -> None:
        """Store K and V of the rows."""
        rows = check_batch("kv_write", batch)
        buffers = (layer.k, layer.v, k, v, *batch, tables)
        self._finish("kv_write", rows, k, k, v, None, None, (layer, batch, tables), None, buffers)

    def qkv_rope_write(self, q: Any, k: Any, v: Any, layer: KVLayer, batch: RowBatch, tables: Any, rope_table: Any | None,
                       norms: QkNorm | None) -> None:
        """Normalise and rotate q and k, store K and V: one kernel."""
        rows = check_batch("qkv_rope_write", batch)
        if _queries("qkv_rope_write", q, k) != rows:
            check_shape("qkv_rope_write", "q", (rows, None, None), q.shape)
        extra = () if rope_table is None else (rope_table,)
        extra += () if norms is None else (norms.q, norms.k)
        params = {} if norms is None else {"eps": norms.eps, "offset": norms.offset, "cast_first": norms.cast_first,
                                           "scope": norms.scope}
        buffers = (q, k, v, layer.k, layer.v, *batch, tables, *extra)
        target = (layer, batch, tables)
        self._finish("qkv_rope_write", rows, q, k, v, norms, rope_table, target, batch.position, buffers, **params)

    def _finish(self, op: str, rows: int, q: Any, k: Any, v: Any | None, norms: QkNorm | None, table: Any | None,
                target: tuple[KVLayer, RowBatch, Any] | None, position: Any | None, buffers: tuple[Any, ...],
                **params: Any) -> None:
        """Check and emit the kernel that norms, turns and stores, in that order, what it is asked to."""
        q_heads, heads, dim = int(q.shape[1]), int(k.shape[1]), int(k.shape[2])
        weights: tuple[Any, ...] = (None, None, 0.0, 0.0, 0)
        if norms is not None:
            weights = _norm_words(op, q, k, norms)
        turn: tuple[Any, ...] = (None, 0, None, 0)
        if table is not None:
            _rope_table(op, table, dim)
            turn = (table, int(table.shape[1]), position, int(table.shape[0]))
        store: tuple[Any, ...] = (None, None, None, None, None, 0)
        if target is not None:
            layer, batch, tables = target
            for what, x in (("k", k), ("v", v)):
                assert x is not None
                check_shape(op, what, (rows, layer.heads, layer.dim), x.shape)
                check_dtype(op, "float32", **{what: x})
            _tables(op, tables)
            store = (layer.k, layer.v, batch.seq, batch.index, tables, int(tables.shape[1]))
        shape = (rows, q_heads, heads, dim)
        args = (q, stride(q), k, stride(k), v, 0 if v is None else stride(v), *shape, *weights, *turn, *store)
        self.emit(op, self._kernel("qkv_finish"), max(1, rows // 8), args, buffers, **params)

    def attention(self, out: Any, q: Any, layer: KVLayer, batch: RowBatch, tables: Any, *, scale: float, window: int | None,
                  softcap: float | None) -> None:
        """Attend over the pages."""
        rows = check_batch("attention", batch)
        check_shape("attention", "q", (rows, None, layer.dim), q.shape)
        check_shape("attention", "out", q.shape, out.shape)
        q_heads, heads = int(q.shape[1]), layer.heads
        if q_heads % heads:
            check_shape("attention", "q", (rows, max(heads, q_heads // heads * heads), layer.dim), q.shape)
        check_dtype("attention", "float32", q=q, out=out)
        _tables("attention", tables)
        if layer.dim > MAX_DIM:
            raise UnsupportedError(f"attention: expected heads of at most {MAX_DIM}, got {layer.dim}; this backend has no "
                                   "kernel for them", code="unsupported.head_dim")
        blocks = int(tables.shape[1])
        a_tile, slots, tiles = attention_plan(rows, q_heads, heads, blocks)
        partial, counters = self._room(rows, q_heads, heads, layer.dim, blocks) if slots else (0, 0)
        args = (out, stride(out), q, stride(q), layer.k, layer.v, batch.seq, batch.index, tables, blocks, rows, q_heads, heads,
                layer.dim, a_tile, slots, partial, counters, float(scale), window or 0, float(softcap or 0.0))
        self.emit("attention", self._kernel("attention"), tiles, args, (out, q, layer.k, layer.v, *batch, tables), scale=scale,
                  window=window, softcap=softcap)

    def _room(self, rows: int, q_heads: int, heads: int, dim: int, blocks: int) -> tuple[int, int]:
        """Return the addresses of the room for chunk results and of the counters."""
        chunks = -(-blocks // CHUNK_BLOCKS)
        floats, ints = rows * q_heads * chunks * (2 + -(-dim // BLOCK_TOKENS) * BLOCK_TOKENS), rows * heads
        if self._space is None:
            self._space = []
        if not self._space or self._space[-1][0].size < floats or self._space[-1][1].size < ints:
            last = self._space[-1] if self._space else (np.empty(0), np.empty(0))
            self._space.append((np.empty(max(floats, last[0].size), np.float32), np.zeros(max(ints, last[1].size), np.int32)))
        partial, counters = self._space[-1]
        return int(partial.ctypes.data), int(counters.ctypes.data)

    def kv_zero(self, layer: KVLayer, blocks: Any) -> None:
        """Zero whole blocks."""
        count = check_rows("kv_zero", None, blocks=blocks)
        args = (layer.k, layer.v, layer.heads * layer.dim * BLOCK_TOKENS, blocks, int(layer.k.shape[0]))
        self.emit("kv_zero", self._kernel("kv_zero"), count, args, (layer.k, layer.v, blocks))

    def kv_copy(self, layer: KVLayer, src: Any, dst: Any) -> None:
        """Copy whole blocks, in order."""
        count = check_rows("kv_copy", None, src=src, dst=dst)
        args = (layer.k, layer.v, layer.heads * layer.dim * BLOCK_TOKENS, src, dst, count, int(layer.k.shape[0]))
        self.emit("kv_copy", self._kernel("kv_copy"), 1, args, (layer.k, layer.v, src, dst))


def _queries(op: str, q: Any, k: Any) -> int:
    """Check q (T, Hq, D) and k (T, Hk, D); return T."""
    check_shape(op, "q", (None, None, None), q.shape)
    check_shape(op, "k", (q.shape[0], None, q.shape[2]), k.shape)
    check_dtype(op, "float32", q=q, k=k)
    return int(q.shape[0])


def _tables(op: str, tables: Any) -> None:
    check_shape(op, "tables", (None, None), tables.shape)
    check_dtype(op, "int32", tables=tables)


def _rope_table(op: str, table: Any, dim: int) -> None:
    check_shape(op, "table", (None, None), table.shape)
    if table.shape[1] % 2 or table.shape[1] > dim:
        check_shape(op, "table", (None, min(table.shape[1] // 2 * 2, dim)), table.shape)
    check_dtype(op, "float32", table=table)


def _norm_words(op: str, q: Any, k: Any, norms: QkNorm) -> tuple[Any, ...]:
    """Check the weights of a q/k norm; return words 10 to 14 of the kernel."""
    if norms.scope not in ("head", "full"):
        raise UnsupportedError(f"{op}: expected scope head or full, got {norms.scope!r}", code="unsupported.norm_scope")
    for what, x, weight in (("q_weight", q, norms.q), ("k_weight", k, norms.k)):
        size = x.shape[2] if norms.scope == "head" else x.shape[1] * x.shape[2]
        check_shape(op, what, (size,), weight.shape)
        check_dtype(op, "float32", **{what: weight})
    return norms.q, norms.k, float(norms.eps), float(norms.offset), int(norms.scope == "full")
