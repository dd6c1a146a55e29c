"""Rows of numbers: embedding, norms, products, gates. Each function writes its first argument."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from metrale.backends.base import QTensor
from metrale.backends.reference.arrays import F64, f32, load, rounded, store
from metrale.backends.reference.weight import ReferenceWeight
from metrale.errors import DeviceError


def embed(out: Any, ids: Any, weight: ReferenceWeight, *, scale: float) -> None:
    """See `Ops.embed`."""
    check_range("embed", "ids", ids, weight.n)
    store(out, weight.rows(ids).astype(np.float64) * f32(scale))


def gather_rows(out: Any, x: Any, rows: Any) -> None:
    """See `Ops.gather_rows`."""
    check_range("gather_rows", "rows", rows[rows >= 0], x.shape[0])
    copy = x[rows]
    out[rows >= 0] = copy[rows >= 0]


def add(residual: Any, x: Any) -> None:
    """See `Ops.add`."""
    store(residual, load(residual) + load(x))


def scale(x: Any, *, factor: float) -> None:
    """See `Ops.scale`."""
    store(x, load(x) * f32(factor))


def rms_norm(out: Any, x: Any, weight: Any, *, eps: float, offset: float, cast_first: bool) -> None:
    """See `Ops.rms_norm`."""
    dtype = x.dtype if isinstance(out, QTensor) else out.dtype
    store(out, normalised(load(x), load(weight), dtype, eps=eps, offset=offset, cast_first=cast_first))


def normalised(x: F64, weight: F64, dtype: Any, *, eps: float, offset: float, cast_first: bool) -> F64:
    """Return x / rms(x) * (offset + weight) over the last axis, the quotient rounded to `dtype` first when asked."""
    unit = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + f32(eps))
    if cast_first:
        unit = load(rounded(unit, dtype))
    return np.asarray(unit * (f32(offset) + weight))


def quantize(out: QTensor, x: Any) -> None:
    """See `Ops.quantize`."""
    store(out, load(x))


def quantize_rest(out: QTensor, x: Any, q: QTensor) -> None:
    """See `Ops.quantize_rest`."""
    store(out, load(x) - load(q))


def linear(out: Any, x: Any, weight: ReferenceWeight) -> None:
    """See `Ops.linear`.

    One matrix-vector product a row: the library sums a matrix-matrix product in another order for another T.
    """
    rows = load(x)
    result = np.empty((rows.shape[0], weight.n))
    for start, piece in weight.pieces():
        wide = piece.astype(np.float64)
        for t in range(rows.shape[0]):
            result[t, start : start + wide.shape[0]] = wide @ rows[t]
    store(out, result if weight.bias is None else result + weight.bias)


def act_mul(out: Any, gate_up: Any, *, act: str) -> None:
    """See `Ops.act_mul`."""
    gate, up = np.split(load(gate_up), 2, axis=-1)
    store(out, (silu(gate) if act == "silu" else gelu_tanh(gate)) * up)


def silu(x: F64) -> F64:
    """Return x * sigmoid(x)."""
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)))


def gelu_tanh(x: F64) -> F64:
    """Return the tanh form of GELU (Hendrycks and Gimpel 2016)."""
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def softcap(x: Any, *, cap: float) -> None:
    """See `Ops.softcap`."""
    store(x, capped(load(x), cap))


def capped(x: F64, cap: float) -> F64:
    """Return cap * tanh(x / cap)."""
    return f32(cap) * np.tanh(x / f32(cap))


def check_range(op: str, what: str, values: Any, limit: int) -> None:
    """Raise DeviceError (``op.index``) unless every value lies in [0, limit)."""
    if values.size and (values.min() < 0 or values.max() >= limit):
        got = f"{int(values.min())} to {int(values.max())}"
        raise DeviceError(f"{op}: expected {what} in [0, {limit}), got {got}; this is a bug in the caller", code="op.index")
