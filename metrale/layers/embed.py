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
    """The final norm and the projection to the vocabulary; with `split`, each rank computes its share of the logits."""

    norm: Norm
    matrix: Linear
    softcap: float | None
    split: bool

    def forward(self, ops: Ops, s: StepViews, logits: Array, hidden: Array) -> None:
        """Write float32 logits (M, V) of hidden rows (M, H)."""
        x = self.matrix.pick(s.normed, s.normed_q)
        self.norm.forward(ops, x, hidden)
        out = s.logits_part if self.split else logits
        ops.head(out, x, self.matrix.weight, scale=1.0, cap=self.softcap)
        if self.split:
            ops.all_gather(logits, out)


def rounded_scale(scale: float, form: str) -> float:
    """Return an embedding scale rounded to the embedding's dtype, as Gemma's reference does (block formats: float32)."""
    import numpy as np

    if form == "bf16":
        return float(bf16_to_f32(f32_to_bf16(np.array([scale], np.float32)))[0])
    return float(np.float16(scale)) if form == "f16" else float(np.float32(scale))
