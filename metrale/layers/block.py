"""`Block`: one decoder layer, in the three placements of its norms.

pre       h += attention(norm(h));          h += mlp(norm(h))
sandwich  h += norm(attention(norm(h)));    h += norm(mlp(norm(h)))
post      h += norm(attention(h));          h += norm(mlp(h))
"""

from __future__ import annotations

from dataclasses import dataclass

from metrale.backends.base import Array, KVLayer, Ops, QTensor, RowBatch
from metrale.layers.attention import Attention
from metrale.layers.buffers import StepViews
from metrale.layers.linear import Linear, RowLinear
from metrale.layers.mlp import Mlp
from metrale.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class Block:
    """before_x norms the input of x, after_x its output; which are None decides the placement."""

    attention: Attention
    mlp: Mlp
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None

    def forward(self, ops: Ops, s: StepViews, batch: RowBatch, table: Array, kv: KVLayer) -> None:
        """Advance the residual s.residual (T, H) by this layer; writes the rows' K/V to `kv`."""
        x = _input(ops, s, self.before_attention, self.attention.qkv)
        heads = self.attention.forward(ops, s, x, batch, table, kv)
        out, down = self.attention.out, self.mlp.down
        if self.after_attention is None and self.before_mlp is not None:
            x = self.mlp.gate_up.pick(s.normed, s.normed_q)
            out.add_and_norm(ops, x, s.residual, heads, self.before_mlp, s.product, s.scratch)
        else:
            _close(ops, s, self.after_attention, self.attention.out, heads)
            x = _input(ops, s, self.before_mlp, self.mlp.gate_up)
        _close(ops, s, self.after_mlp, down, self.mlp.forward(ops, s, x))


def _input(ops: Ops, s: StepViews, norm: Norm | None, consumer: Linear) -> Array | QTensor:
    """Return the branch's input as its first matrix reads it."""
    if norm is not None:
        x: Array | QTensor = consumer.pick(s.normed, s.normed_q)
        norm.forward(ops, x, s.residual)
        return x
    if consumer.quantized:
        ops.quantize(s.normed_q, s.residual)
        quantized: QTensor = s.normed_q
        return quantized
    residual: Array = s.residual
    return residual


def _close(ops: Ops, s: StepViews, norm: Norm | None, matrix: RowLinear, x: Array | QTensor) -> None:
    """Add a branch to the residual."""
    if norm is None:
        matrix.add_to(ops, s.residual, x, s.product, s.scratch)
    else:
        matrix.product(ops, s.product, x)
        norm.add_normed(ops, s.residual, s.product)
