"""`Mlp`: the gated feed-forward of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from metrale.backends.base import Array, Ops, QTensor
from metrale.layers.buffers import StepViews
from metrale.layers.linear import Linear, RowLinear


@dataclass(frozen=True, slots=True)
class Mlp:
    """act: "silu" or "gelu_tanh"; gate_up: parts gate then up; down closes the branch."""

    gate_up: Linear
    down: RowLinear
    act: str

    def forward(self, ops: Ops, s: StepViews, x: Array | QTensor) -> Array | QTensor:
        """Return act(gate(x)) * up(x) as `down` reads it: (T, I). x: (T, H) as `gate_up` reads it."""
        middle: Array | QTensor = self.down.pick(s.middle, s.middle_q)
        ops.mlp_up(middle, x, self.gate_up.weight, act=self.act, scratch=s.scratch)
        return middle
