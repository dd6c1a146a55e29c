"""`DenseModel`: the layer stack of a dense decoder on one rank: weights and op calls, nothing else.

    model = DenseModel(backend, spec, weights, max_context)
    buffers = model.new_buffers(rows=512, head_rows=16)
    hidden = model.forward(ops, buffers, batch, tables, kv)  # residual rows, a view into `buffers`
    model.head(ops, buffers, logits, hidden[7:9])            # logits of chosen rows

`forward` and `head` allocate nothing and read nothing back, so they run eagerly and inside a capture alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metrale.backends.base import Array, Backend, KVLayer, Ops, QkNorm, RowBatch
from metrale.config.spec import LayerSpec, ModelSpec, RopeSpec
from metrale.errors import ConfigError, DeviceError, UnsupportedError
from metrale.layers.attention import Attention
from metrale.layers.block import Block
from metrale.layers.buffers import BufferSizes, StepBuffers
from metrale.layers.embed import Embedding, Head, rounded_scale
from metrale.layers.linear import Linear, RowLinear
from metrale.layers.mlp import Mlp
from metrale.layers.norm import Norm
from metrale.layers.rope import rope_table
from metrale.weights.loader import Weights


class DenseModel:
    """A dense decoder's layers on one rank of a backend.

    spec: the whole model. local: this rank's share (heads, feed-forward), which says what K/V to allocate: layer i stores
    ``local.layers[i].attention.kv_heads`` heads of ``head_dim``.
    max_context: positions the rope tables hold; ids at or past it must not be fed.
    """

    def __init__(self, backend: Backend, spec: ModelSpec, weights: Weights, max_context: int) -> None:
        """Wire weights into layers and upload the rope tables.

        Raises: UnsupportedError ``parallel.split``, ``config.unsupported``; ConfigError ``engine.max_context``.
        """
        if not 1 <= max_context <= spec.max_context:
            raise ConfigError(
                f"max_context: expected 1 to the model's {spec.max_context} tokens, got {max_context}; lower it",
                code="engine.max_context",
            )
        self.spec, self.local = spec, spec.split(backend.comm.size)
        self.max_context = max_context
        self._backend = backend
        self._tables: dict[RopeSpec, Any] = {}
        scale = rounded_scale(spec.embed_scale, weights.embed_format) if spec.embed_scale_rounds else spec.embed_scale
        self.embedding = Embedding(weights.matrices["embed"], scale)
        self.blocks = tuple(self._block(i, layer, weights) for i, layer in enumerate(self.local.layers))
        matrix = Linear.of(backend, weights.matrices.get("head", weights.matrices["embed"]))
        self._head = Head(Norm(weights.vectors["norm"], spec.norm), matrix, spec.logit_softcap, matrix.weight.n != spec.vocab)
        self.sizes = self._sizes()

    # -- a step --

    def new_buffers(self, rows: int, head_rows: int | None = None) -> StepBuffers:
        """Allocate the buffers of steps of up to `rows` rows and `head_rows` rows of logits (None: `rows`)."""
        head_rows = rows if head_rows is None else head_rows
        return StepBuffers(self._backend, self.sizes, rows, head_rows, self._scratch_bytes(rows))

    def forward(self, ops: Ops, buffers: StepBuffers, batch: RowBatch, tables: Sequence[Array], kv: Sequence[KVLayer]) -> Array:
        """Run all layers over the rows of a step; return the residual (T, H), a view into `buffers`, before the final norm.

        batch: arrays of T rows, T at most ``buffers.rows``. tables: (R, max_blocks) int32, and kv: the pages, one a layer each;
        layers of one KV group share a table.
        Writes:  the rows' K/V; every buffer
        Raises:  DeviceError ``op.rows``
        """
        rows = int(batch.ids.shape[0])
        if rows > buffers.rows:
            raise DeviceError(
                f"forward: expected at most {buffers.rows} rows, got {rows}; cut the step into chunks", code="op.rows"
            )
        s = buffers.at(rows)
        self.embedding.forward(ops, s.residual, batch.ids)
        for block, table, layer in zip(self.blocks, tables, kv, strict=True):
            block.forward(ops, s, batch, table, layer)
        residual: Array = s.residual
        return residual

    def pick(self, ops: Ops, buffers: StepBuffers, rows: Array) -> Array:
        """Gather residual rows of the last `forward`: rows (M,) int32 -> (M, H), a view into `buffers`."""
        picked: Array = buffers.at(int(rows.shape[0])).product
        ops.gather_rows(picked, buffers.residual, rows)
        return picked

    def head(self, ops: Ops, buffers: StepBuffers, logits: Array, hidden: Array) -> None:
        """Write float32 logits (M, V) of residual rows (M, H): a slice of what `forward` returned, or what `pick` did.

        Keeps the residual, so it may be called again for other rows.
        Raises: DeviceError ``op.rows``
        """
        count = int(logits.shape[0])
        whole = self.sizes.logits_part == self.sizes.logits_pairs == 0
        limit = buffers.rows if whole else min(buffers.rows, buffers.head_rows)
        if count > limit:
            raise DeviceError(f"head: expected at most {limit} rows, got {count}; ask for fewer at a time", code="op.rows")
        self._head.forward(ops, buffers.at(count), logits, hidden)

    # -- construction --

    def _block(self, i: int, layer: LayerSpec, weights: Weights) -> Block:
        name, backend = f"layers.{i}.", self._backend

        def norm(title: str) -> Norm | None:
            found = weights.vectors.get(f"{name}{title}")
            return None if found is None else Norm(found, layer.norm)

        a, qk = layer.attention, None
        if a.qk_norm is not None:
            n = layer.norm
            qk = QkNorm(
                weights.vectors[f"{name}q_norm"], weights.vectors[f"{name}k_norm"], n.eps, n.offset, n.cast_first, a.qk_norm
            )
        m = weights.matrices
        attention = Attention(
            a,
            Linear.of(backend, m[f"{name}qkv"]),
            RowLinear.closing(backend, m[f"{name}o"]),
            None if a.rope is None else self._rope(a.rope),
            qk,
            a.qk_norm == "full" and backend.comm.size > 1,
        )
        mlp = Mlp(Linear.of(backend, m[f"{name}gate_up"]), RowLinear.closing(backend, m[f"{name}down"]), layer.mlp.act)
        after = norm("post_attention_layernorm")
        if layer.placement == "pre":  # here the name means the norm before the MLP
            return Block(attention, mlp, norm("input_layernorm"), None, after, None)
        return Block(
            attention,
            mlp,
            norm("input_layernorm"),
            after,
            norm("pre_feedforward_layernorm"),
            norm("post_feedforward_layernorm"),
        )

    def _rope(self, spec: RopeSpec) -> Any:
        """Return the device table of a rope, made once for all layers that share it."""
        if spec not in self._tables:
            table = rope_table(spec, self.max_context)
            device = self._backend.alloc(table.shape, "f32")
            self._backend.upload(device, table)
            self._tables[spec] = device
        return self._tables[spec]

    def _sizes(self) -> BufferSizes:
        first = self.local.layers[0]
        a, whole = first.attention, self.spec.layers[0].attention
        shapes = {(x.attention.heads, x.attention.kv_heads, x.attention.head_dim, x.mlp.size) for x in self.local.layers}
        if len(shapes) != 1:
            raise UnsupportedError(
                f"{self.spec.family}: expected layers of one size, got {len(shapes)} sizes; "
                "this build has no layers of different sizes",
                code="config.unsupported",
            )
        blocks, rank = self.blocks, self._backend.comm.rank
        shared = blocks[0].attention.whole_norm
        normed = [x for b in blocks for x in (b.attention.qkv, b.mlp.gate_up)]
        head = self._head.matrix
        down = [b.mlp.down for b in blocks]
        return BufferSizes(
            hidden=self.spec.hidden,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            all_heads=whole.heads if shared else a.heads,
            all_kv_heads=whole.kv_heads if shared else a.kv_heads,
            first_head=rank * a.heads if shared else 0,
            first_kv_head=rank * a.kv_heads if shared else 0,
            middle=first.mlp.size,
            quantized_normed=any(x.quantized for x in normed),
            quantized_heads=any(b.attention.out.quantized for b in blocks),
            plain_middle=any(not x.quantized for x in down),
            quantized_middle=any(x.quantized for x in down),
            logits_part=head.weight.n if self._head.split and not head.quantized else 0,
            logits_pairs=head.weight.n if head.quantized else 0,
        )

    def _scratch_bytes(self, rows: int) -> int:
        ops = self._backend.stream.ops
        need = 0
        for block in self.blocks:
            need = max(
                need,
                ops.mlp_up_scratch_bytes(rows, block.mlp.gate_up.weight),
                ops.linear_residual_scratch_bytes(rows, block.attention.out.weight),
                ops.linear_residual_scratch_bytes(rows, block.mlp.down.weight),
            )
        return need
