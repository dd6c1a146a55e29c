"""`Embedding` and `Head`: token ids in, logits out."""

from __future__ import annotations

from dataclasses import dataclass

from metrale.backends.base import Array, Ops, PackedWeight
from metrale.dtypes import bf16_to_f32, f32_to_bf16
from metrale.layers.buffers import StepViews
from metrale.layers.linear import Linear
from metrale.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class Embedding:
    """weight (V, H), whole on each rank; rows are multiplied by `scale`."""

    weight: PackedWeight
    scale: float

    def forward(self, ops: Ops, out: Array, ids: Array) -> None:
        """Gather: out (T, H) = weight[ids] * scale."""
        ops.embed(out, ids, self.weight, scale=self.scale)


@dataclass(frozen=True, slots=True)
class Head:
    """The final norm and the projection to the vocabulary; with `split`, each rank computes its share of the logits.

    An int8 head quantizes twice: its rows, then what that left, and adds the two products. One product's error goes
    straight into the logits and was a third of the whole model's divergence (SmolLM2 Q4_1: mean KL 0.0039 with one,
    0.0033 with two). The matrix is still read once, so that a decode step costs little more.
    """

    norm: Norm
    matrix: Linear
    softcap: float | None
    split: bool

    def forward(self, ops: Ops, s: StepViews, logits: Array, hidden: Array) -> None:
        """Write float32 logits (M, V) of hidden rows (M, H)."""
        self.norm.forward(ops, s.normed, hidden)
        if self.matrix.quantized:
            rows = hidden.shape[0]
            high, low = s.head_q.rows(0, rows), s.head_q.rows(rows, 2 * rows)
            ops.quantize(high, s.normed)
            ops.quantize_rest(low, s.normed, high)
            ops.head(s.logits_pairs, s.head_q, self.matrix.weight, scale=1.0, cap=None)
            out = s.logits_pairs[:rows]
            ops.add(out, s.logits_pairs[rows:])
            if self.softcap is not None:
                ops.softcap(out, cap=self.softcap)
            ops.all_gather(logits, out)  # on one rank a copy
        elif self.split:
            ops.head(s.logits_part, s.normed, self.matrix.weight, scale=1.0, cap=self.softcap)
            ops.all_gather(logits, s.logits_part)
        else:
            ops.head(logits, s.normed, self.matrix.weight, scale=1.0, cap=self.softcap)


def rounded_scale(scale: float, form: str) -> float:
    """Return an embedding scale rounded to the embedding's dtype, as Gemma's reference does (block formats: float32)."""
    import numpy as np

    if form == "bf16":
        return float(bf16_to_f32(f32_to_bf16(np.array([scale], np.float32)))[0])
    return float(np.float16(scale)) if form == "f16" else float(np.float32(scale))
