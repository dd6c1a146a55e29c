"""`Linear`: a packed matrix and whether its inputs come quantized; `RowLinear` closes a branch of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metrale.backends.base import Array, Backend, Ops, PackedWeight, QTensor
from metrale.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class Linear:
    """quantized: the product takes a QTensor."""

    weight: PackedWeight
    quantized: bool

    @classmethod
    def of(cls, backend: Backend, weight: PackedWeight) -> Linear:
        """Choose int8 inputs where the backend wants them and every part of the matrix allows them."""
        return cls(weight, backend.int8_activations and weight.takes_q)

    def pick(self, plain: Any, quantized: Any) -> Any:
        """Return the buffer this matrix reads."""
        return quantized if self.quantized else plain

    def forward(self, ops: Ops, out: Array, x: Array | QTensor) -> None:
        """Multiply: out (T, N) = x (T, K) @ weight.T + bias."""
        ops.linear(out, x, self.weight)


@dataclass(frozen=True, slots=True)
class RowLinear(Linear):
    """The matrix at the end of attention or MLP; its inputs are split over the ranks, its products summed over them."""

    ranks: int = 1

    @classmethod
    def closing(cls, backend: Backend, weight: PackedWeight) -> RowLinear:
        """Return the closing matrix of a branch."""
        return cls(weight, backend.int8_activations and weight.takes_q, backend.comm.size)

    def product(self, ops: Ops, out: Array, x: Array | QTensor) -> None:
        """Write the whole product, summed over the ranks, to `out` (T, H)."""
        ops.linear(out, x, self.weight)
        if self.ranks > 1:
            ops.all_reduce(out)

    def add_to(self, ops: Ops, residual: Array, x: Array | QTensor, product: Array, scratch: Array) -> None:
        """Add the product to the residual (T, H)."""
        if self.ranks == 1:
            ops.linear_residual(residual, x, self.weight, scratch=scratch)
        else:
            self.product(ops, product, x)
            ops.add(residual, product)

    def add_and_norm(
        self, ops: Ops, out: Array | QTensor, residual: Array, x: Array | QTensor, norm: Norm, product: Array, scratch: Array
    ) -> None:
        """Add the product to the residual and write the norm of the sum to `out`."""
        if self.ranks == 1:
            ops.linear_residual(residual, x, self.weight, scratch=scratch)
            norm.forward(ops, out, residual)
        else:
            self.product(ops, product, x)
            norm.forward_sum(ops, out, residual, product)
