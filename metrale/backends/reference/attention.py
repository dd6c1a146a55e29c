"""Queries, keys, values and their pages: norms, rope, K/V moves, attention. Pages are (blocks, Hk, P, D)."""

from __future__ import annotations

from typing import Any

import numpy as np

from metrale.backends.base import BLOCK_TOKENS, KVLayer, RowBatch
from metrale.backends.reference.arrays import F64, f32, load, store
from metrale.backends.reference.numbers import capped, check_range, normalised


def qk_norm(q: Any, k: Any, q_weight: Any, k_weight: Any, *, eps: float, offset: float, cast_first: bool, scope: str) -> None:
    """See `Ops.qk_norm`."""
    for x, weight in ((q, q_weight), (k, k_weight)):
        values = load(x)
        if scope == "full":
            values = values.reshape(values.shape[0], -1)
        result = normalised(values, load(weight), x.dtype, eps=eps, offset=offset, cast_first=cast_first)
        store(x, result.reshape(x.shape))


def rope(q: Any, k: Any, table: Any, position: Any) -> None:
    """See `Ops.rope`."""
    check_range("rope", "positions", position, table.shape[0])
    half = table.shape[1] // 2
    angles = load(table)[position][:, None, :]
    cos, sin = angles[..., :half], angles[..., half:]
    for x in (q, k):
        values = load(x)
        first, second = values[..., :half].copy(), values[..., half : 2 * half].copy()
        values[..., :half] = first * cos - second * sin
        values[..., half : 2 * half] = second * cos + first * sin
        store(x, values)


def kv_write(layer: KVLayer, k: Any, v: Any, batch: RowBatch, tables: Any) -> None:
    """See `Ops.kv_write`."""
    for t, (seq, index) in enumerate(zip(batch.seq, batch.index, strict=True)):
        block = tables[seq, index // BLOCK_TOKENS] if seq >= 0 else 0
        layer.k[block, :, index % BLOCK_TOKENS] = k[t]
        layer.v[block, :, index % BLOCK_TOKENS] = v[t]


def attention(out: Any, q: Any, layer: KVLayer, batch: RowBatch, tables: Any, *, scale: float, window: int | None,
              softcap: float | None) -> None:
    """See `Ops.attention`. A row at a time, its keys and values gathered first."""
    queries = load(q)
    result = np.zeros(queries.shape)
    for t, (seq, index) in enumerate(zip(batch.seq, batch.index, strict=True)):
        if seq >= 0:
            first = 0 if window is None else max(0, int(index) - window + 1)
            places = np.arange(first, int(index) + 1)
            blocks = tables[seq, places // BLOCK_TOKENS]
            keys = load(layer.k[blocks, :, places % BLOCK_TOKENS])
            values = load(layer.v[blocks, :, places % BLOCK_TOKENS])
            result[t] = attend(queries[t], keys, values, scale=scale, softcap=softcap)
    store(out, result)


def attend(q: F64, keys: F64, values: F64, *, scale: float, softcap: float | None) -> F64:
    """Return one row's attention: q (Hq, D), keys and values (n, Hk, D) -> (Hq, D)."""
    grouped = q.reshape(keys.shape[1], -1, q.shape[1])  # (Hk, Hq / Hk, D)
    scores = np.einsum("hgd,nhd->hgn", grouped, keys) * f32(scale)
    if softcap is not None:
        scores = capped(scores, softcap)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hgn,nhd->hgd", weights, values).reshape(q.shape))


def kv_zero(layer: KVLayer, blocks: Any) -> None:
    """See `Ops.kv_zero`."""
    check_range("kv_zero", "blocks", blocks[blocks >= 0], layer.k.shape[0])
    layer.k[blocks[blocks >= 0]] = 0
    layer.v[blocks[blocks >= 0]] = 0


def kv_copy(layer: KVLayer, src: Any, dst: Any) -> None:
    """See `Ops.kv_copy`."""
    used = (src >= 0) & (dst >= 0)
    for blocks in (src[used], dst[used]):
        check_range("kv_copy", "blocks", blocks, layer.k.shape[0])
    layer.k[dst[used]] = layer.k[src[used]]
    layer.v[dst[used]] = layer.v[src[used]]
