"""`Norm`: an RMS norm's weight and kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metrale.backends.base import Array, Ops, QTensor
from metrale.config.spec import NormSpec


@dataclass(frozen=True, slots=True)
class Norm:
    """weight (H,) float32 on the device."""

    weight: Any
    spec: NormSpec

    def forward(self, ops: Ops, out: Array | QTensor, x: Array) -> None:
        """Write norm(x) to `out`; both (T, H)."""
        s = self.spec
        ops.rms_norm(out, x, self.weight, eps=s.eps, offset=s.offset, cast_first=s.cast_first)

    def forward_sum(self, ops: Ops, out: Array | QTensor, residual: Array, x: Array) -> None:
        """Add x to the residual and write norm(residual) to `out`."""
        s = self.spec
        ops.add_rms_norm(out, residual, x, self.weight, eps=s.eps, offset=s.offset, cast_first=s.cast_first)

    def add_normed(self, ops: Ops, residual: Array, x: Array) -> None:
        """Add norm(x) to the residual; x is overwritten."""
        s = self.spec
        ops.norm_add(residual, x, self.weight, eps=s.eps, offset=s.offset, cast_first=s.cast_first)
