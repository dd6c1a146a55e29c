"""Queries, keys, values and their pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from metrale.backends.base import BLOCK_TOKENS, KVLayer, RowBatch, check_shape
from metrale.backends.cuda.checks import batch_rows, check_dtype, check_layer, check_queries, check_tables, row_ints, strides_of
from metrale.backends.cuda.ops_numbers import NumberOps
from metrale.errors import DeviceError, UnsupportedError

_ATTENTION_THREADS = 128
_SHARED_BYTES = 48 << 10  # what a kernel gets without asking


class AttentionOps(NumberOps):
    """Norms and rotation of heads, K/V moves, attention."""

    def qk_norm(self, q: Any, k: Any, q_weight: Any, k_weight: Any, *, eps: float, offset: float, cast_first: bool,
                scope: str) -> None:
        """Normalise queries and keys in place."""
        if scope not in ("head", "full"):
            raise UnsupportedError(f"qk_norm: expected scope head or full, got {scope!r}", code="unsupported.norm_scope")
        check_queries("qk_norm", q, k)
        pairs = (("q", q, q_weight), ("k", k, k_weight))
        for what, x, weight in pairs:
            _, heads, dim = x.shape
            check_shape("qk_norm", f"{what}_weight", (dim if scope == "head" else heads * dim,), weight.shape)
            check_dtype("qk_norm", f"{what}_weight", weight, np.float32)
            self._activation("qk_norm", **{what: x})
            _, head_stride = strides_of("qk_norm", what, x)
            if scope == "full" and heads > 1 and head_stride != dim:
                raise DeviceError(
                    f"qk_norm: expected {what} without gaps between heads, got strides {x.strides}; a bug in the caller",
                    code="op.layout",
                )
        self._begin("qk_norm", q, k, q_weight, k_weight, eps=eps, offset=offset, cast_first=cast_first, scope=scope)
        for what, x, weight in pairs:
            _, heads, dim = x.shape
            row, head = strides_of("qk_norm", what, x)
            parts, width = (heads, dim) if scope == "head" else (1, heads * dim)
            self._norm(x, (row, head), x, (row, head), weight, parts, width, eps, offset, cast_first)

    def rope(self, q: Any, k: Any, table: Any, position: Any) -> None:
        """Rotate halves in place."""
        check_queries("rope", q, k)
        check_shape("rope", "table", (None, None), table.shape)
        if table.shape[1] % 2 or table.shape[1] > q.shape[2]:
            check_shape("rope", "table", (None, min(table.shape[1] // 2 * 2, q.shape[2])), table.shape)
        rows = row_ints("rope", q.shape[0], position=position)
        check_dtype("rope", "table", table, np.float32)
        self._activation("rope", q=q, k=k)
        strides = [strides_of("rope", what, x) for what, x in (("q", q), ("k", k))]
        if strides_of("rope", "table", table)[0] != table.shape[1] and table.shape[0] > 1:
            raise DeviceError(f"rope: expected a table without gaps, got strides {table.strides}; this is a bug in the caller",
                              code="op.layout")
        positions, half = table.shape[0], table.shape[1] // 2
        self._begin("rope", q, k, table, position)
        for x, stride in zip((q, k), strides, strict=True):
            count = rows * x.shape[1] * half
            self._flat("rope", count, x, table, position, count, x.shape[1], half, positions, *stride)

    def kv_write(self, layer: KVLayer, k: Any, v: Any, batch: RowBatch, tables: Any) -> None:
        """Store K and V of the rows."""
        rows = batch_rows("kv_write", batch)
        shape = (rows, layer.heads, layer.dim)
        check_shape("kv_write", "k", shape, k.shape)
        check_shape("kv_write", "v", shape, v.shape)
        self._pages("kv_write", layer)
        self._activation("kv_write", k=k, v=v)
        check_tables("kv_write", tables)
        strides = (*strides_of("kv_write", "k", k), *strides_of("kv_write", "v", v))
        count = rows * layer.heads * layer.dim
        self._begin("kv_write", layer, k, v, batch, tables)
        self._flat("kv_write", count, layer.k, layer.v, k, v, batch.seq, batch.index, tables, count, layer.heads, layer.dim,
                   layer.k.shape[0], *tables.shape, *strides)

    def attention(self, out: Any, q: Any, layer: KVLayer, batch: RowBatch, tables: Any, *, scale: float, window: int | None,
                  softcap: float | None) -> None:
        """Attend over the pages."""
        rows = batch_rows("attention", batch)
        check_shape("attention", "q", (rows, None, layer.dim), q.shape)
        check_shape("attention", "out", q.shape, out.shape)
        heads = int(q.shape[1])
        if heads % layer.heads:
            check_shape("attention", "q", (rows, max(layer.heads, heads // layer.heads * layer.heads), layer.dim), q.shape)
        self._pages("attention", layer)
        self._activation("attention", q=q, out=out)
        check_tables("attention", tables)
        shared = 4 * (2 * layer.dim + BLOCK_TOKENS)
        if shared > _SHARED_BYTES:
            most = (_SHARED_BYTES // 4 - BLOCK_TOKENS) // 2
            message = f"attention: expected heads of at most {most} numbers, got {layer.dim}; run this model on the CPU"
            raise UnsupportedError(message, code="unsupported.head_dim")
        strides = (*strides_of("attention", "out", out), *strides_of("attention", "q", q))
        self._begin("attention", out, q, layer, batch, tables, scale=scale, window=window, softcap=softcap)
        self._launch("attention", rows * heads, out, q, layer.k, layer.v, batch.seq, batch.index, tables, heads, layer.heads,
                     layer.dim, layer.k.shape[0], *tables.shape, *strides, scale, window or 0, softcap or 0.0,
                     threads=_ATTENTION_THREADS, shared_bytes=shared)

    def kv_zero(self, layer: KVLayer, blocks: Any) -> None:
        """Zero whole blocks."""
        count = row_ints("kv_zero", None, blocks=blocks)
        self._pages("kv_zero", layer)
        self._begin("kv_zero", layer, blocks)
        self._launch("kv_zero", count, layer.k, layer.v, blocks, layer.k.shape[0], _page(layer))

    def kv_copy(self, layer: KVLayer, src: Any, dst: Any) -> None:
        """Copy whole blocks."""
        count = row_ints("kv_copy", None, src=src, dst=dst)
        self._pages("kv_copy", layer)
        self._begin("kv_copy", layer, src, dst)
        self._launch("kv_copy", count, layer.k, layer.v, src, dst, layer.k.shape[0], _page(layer))

    def _pages(self, op: str, layer: KVLayer) -> None:
        check_layer(op, layer, BLOCK_TOKENS)
        self._activation(op, k_pages=layer.k, v_pages=layer.v)


def _page(layer: KVLayer) -> int:
    """Return the elements of one block of K or V."""
    return layer.heads * BLOCK_TOKENS * layer.dim
