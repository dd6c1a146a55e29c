"""`Attention`: projected queries, keys and values, their norms and rope, the paged K/V, and the attention itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metrale.backends.base import Array, KVLayer, Ops, QkNorm, QTensor, RowBatch
from metrale.config.spec import AttentionSpec
from metrale.layers.buffers import StepViews
from metrale.layers.linear import Linear, RowLinear


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention on one rank.

    spec: this rank's heads. rope: table (positions, d) float32, or None. whole_norm: the q/k norm spans the heads of all
    ranks; `qkv` then holds all of them on each rank, and only attention itself is split.
    """

    spec: AttentionSpec
    qkv: Linear
    out: RowLinear
    rope: Any | None
    norms: QkNorm | None
    whole_norm: bool = False

    def forward(
        self, ops: Ops, s: StepViews, x: Array | QTensor, batch: RowBatch, table: Array, kv: KVLayer
    ) -> Array | QTensor:
        """Attend; return the heads' outputs side by side, as `out` reads them: (T, heads * head_dim).

        x: (T, H) as `qkv` reads it. table: (R, max_blocks) int32 of this layer's KV group. Writes the rows' K/V to `kv`.
        """
        a = self.spec
        self.qkv.forward(ops, s.qkv, x)
        norms = self.norms
        if norms is not None and self.whole_norm:
            ops.qk_norm(
                s.q_all,
                s.k_all,
                norms.q,
                norms.k,
                eps=norms.eps,
                offset=norms.offset,
                cast_first=norms.cast_first,
                scope=norms.scope,
            )
            norms = None
        ops.qkv_rope_write(s.q, s.k, s.v, kv, batch, table, self.rope, norms)
        ops.attention(s.heads, s.q, kv, batch, table, scale=a.scale, window=a.window, softcap=a.softcap)
        if self.out.quantized:
            ops.quantize(s.heads_q, s.heads_flat)
        heads: Array | QTensor = self.out.pick(s.heads_flat, s.heads_q)
        return heads
