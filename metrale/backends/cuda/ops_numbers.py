"""Rows of numbers: embedding, norms, products, gates."""

from __future__ import annotations

from typing import Any

import numpy as np

from metrale.backends.base import ACTIVATIONS, PackedWeight, QTensor, check_shape
from metrale.backends.cuda.checks import check_dtype, check_q, row_ints, row_stride, strides_of
from metrale.backends.cuda.emit import Emitter
from metrale.backends.cuda.weights import CudaWeight
from metrale.errors import DeviceError, UnsupportedError

_PRODUCT_THREADS = 128  # 4 warps, an output each
_MAX_GRID_Y = 65535


class NumberOps(Emitter):
    """One thread an element, one warp an output, one block a row."""

    def embed(self, out: Any, ids: Any, weight: PackedWeight, *, scale: float) -> None:
        """Gather rows of an embedding."""
        rows = row_ints("embed", None, ids=ids)
        check_shape("embed", "out", (rows, weight.k), out.shape)
        self._activation("embed", out=out)
        stride, packed = row_stride("embed", "out", out), _mine("embed", weight)
        self._begin("embed", out, ids, weight, scale=scale)
        for part in packed.segments:
            self._flat("embed", rows * weight.k, out, ids, part.data, part.number, rows * weight.k, weight.k, part.start,
                       part.n, weight.n, part.row_bytes, stride, scale)

    def gather_rows(self, out: Any, x: Any, rows: Any) -> None:
        """Copy rows."""
        check_shape("gather_rows", "x", (None, None), x.shape)
        check_shape("gather_rows", "out", (row_ints("gather_rows", None, rows=rows), x.shape[1]), out.shape)
        self._begin("gather_rows", out, x, rows)
        self._copy_rows("gather_rows", out, x, rows)

    def _copy_rows(self, op: str, out: Any, x: Any, rows: Any | None) -> None:
        check_dtype(op, "out", out, x.dtype)
        check_dtype(op, "x", x, np.float32, np.float16, np.uint16, np.int32)
        count, width = int(out.shape[0]) * int(out.shape[1]), out.shape[1]
        strides = row_stride(op, "out", out), row_stride(op, "x", x)
        self._flat(f"gather_rows_{x.dtype.itemsize}", count, out, x, rows, count, width, x.shape[0], *strides)

    def add(self, residual: Any, x: Any) -> None:
        """Add in place."""
        check_shape("add", "residual", (None, None), residual.shape)
        check_shape("add", "x", residual.shape, x.shape)
        self._activation("add", residual=residual)
        ending = self._suffix("add", "x", x)
        rows, width = residual.shape
        strides = row_stride("add", "residual", residual), row_stride("add", "x", x)
        self._begin("add", residual, x)
        self._flat(f"add{ending}", rows * width, residual, x, rows * width, width, *strides)

    def scale(self, x: Any, *, factor: float) -> None:
        """Multiply in place by a constant."""
        self._in_place("scale", x, factor, factor=factor)

    def softcap(self, x: Any, *, cap: float) -> None:
        """Cap in place."""
        self._in_place("softcap", x, cap, cap=cap)

    def _in_place(self, op: str, x: Any, value: float, **params: float) -> None:
        check_shape(op, "x", (None, None), x.shape)
        ending, stride = self._suffix(op, "x", x), row_stride(op, "x", x)
        rows, width = x.shape
        self._begin(op, x, **params)
        self._flat(f"{op}{ending}", rows * width, x, rows * width, width, stride, value)

    def rms_norm(self, out: Any, x: Any, weight: Any, *, eps: float, offset: float, cast_first: bool) -> None:
        """Normalise rows."""
        if len(x.shape) != 3:
            check_shape("rms_norm", "x", (None, None), x.shape)
        check_shape("rms_norm", "weight", (x.shape[-1],), weight.shape)
        check_shape("rms_norm", "out", x.shape, out.shape)
        self._activation("rms_norm", x=x)
        check_dtype("rms_norm", "weight", weight, np.float32)
        params: dict[str, Any] = {"eps": eps, "offset": offset, "cast_first": cast_first}
        if isinstance(out, QTensor):
            check_q("rms_norm", out, x.shape)
            stride = row_stride("rms_norm", "x", x)
            self._begin("rms_norm", out, x, weight, **params)
            self._launch("rms_norm_q", x.shape[0], *out, x, weight, x.shape[1], stride, eps, offset, cast_first)
            return
        self._activation("rms_norm", out=out)
        to, at = _row_and_head("rms_norm", "out", out), _row_and_head("rms_norm", "x", x)
        self._begin("rms_norm", out, x, weight, **params)
        self._norm(out, to, x, at, weight, x.shape[1] if len(x.shape) == 3 else 1, x.shape[-1], eps, offset, cast_first)

    def _norm(self, out: Any, to: tuple[int, int], x: Any, at: tuple[int, int], weight: Any, heads: int, width: int, eps: float,
              offset: float, cast_first: bool) -> None:
        """Launch the norm of rows of heads; `to` and `at` are the strides of row and head."""
        self._launch("rms_norm", x.shape[0] * heads, out, x, weight, heads, width, *to, *at, eps, offset, cast_first)

    def quantize(self, out: QTensor, x: Any) -> None:
        """Quantize rows to int8."""
        check_shape("quantize", "x", (None, None), x.shape)
        check_shape("quantize", "out", x.shape, out.shape)
        check_q("quantize", out, x.shape)
        self._activation("quantize", x=x)
        rows, width = x.shape
        stride = row_stride("quantize", "x", x)
        self._begin("quantize", out, x)
        self._flat("quantize", rows * width, *out, x, rows * width, width, stride)

    def quantize_rest(self, out: QTensor, x: Any, q: QTensor) -> None:
        """Quantize what a quantization left."""
        check_shape("quantize_rest", "x", (None, None), x.shape)
        for tensor in (out, q):
            check_shape("quantize_rest", "out and q", x.shape, tensor.shape)
            check_q("quantize_rest", tensor, x.shape)
        self._activation("quantize_rest", x=x)
        rows, width = x.shape
        stride = row_stride("quantize_rest", "x", x)
        self._begin("quantize_rest", out, x, q)
        self._flat("quantize_rest", rows * width, *out, x, q.data, q.scales, rows * width, width, stride)

    def linear(self, out: Any, x: Any, weight: PackedWeight, *, lora: Any | None = None) -> None:
        """Multiply."""
        check_shape("linear", "x", (None, weight.k), x.shape)
        check_shape("linear", "out", (x.shape[0], weight.n), out.shape)
        if lora is not None:
            raise UnsupportedError("linear: expected no adapter, got one; this backend has none", code="unsupported.lora")
        ending, stride = self._suffix("linear", "out", out, "_to_f32"), row_stride("linear", "out", out)
        packed = _mine("linear", weight)
        values: tuple[Any, ...]
        strides: tuple[int, ...]
        if isinstance(x, QTensor):
            check_q("linear", x, x.shape)
            if not weight.takes_q:
                message = f"linear: expected block formats for a QTensor, got {weight.formats}; pass floats"
                raise DeviceError(message, code="op.dtype")
            name, values, strides = f"linear_q{ending}", tuple(x), (stride,)
        else:
            self._activation("linear", x=x)
            name, values, strides = f"linear{ending}", (x,), (stride, row_stride("linear", "x", x))
        rows = int(x.shape[0])
        self._begin("linear", out, x, weight)
        for part in packed.segments:
            stop = part.start + part.n
            bias = None if weight.bias is None else weight.bias[part.start : stop]
            grid = (-(-part.n // (_PRODUCT_THREADS // 32)), min(rows, _MAX_GRID_Y))
            self._launch(name, grid, out[:, part.start : stop], *values, part.data, bias, part.number, rows, part.n, weight.k,
                         part.row_bytes, *strides, threads=_PRODUCT_THREADS)

    def act_mul(self, out: Any, gate_up: Any, *, act: str) -> None:
        """Gate."""
        if act not in ACTIVATIONS:
            raise UnsupportedError(f"act_mul: expected one of {ACTIVATIONS}, got {act!r}", code="unsupported.activation")
        check_shape("act_mul", "out", (None, None), out.shape)
        rows, width = out.shape
        check_shape("act_mul", "gate_up", (rows, 2 * width), gate_up.shape)
        ending, stride = self._suffix("act_mul", "gate_up", gate_up), row_stride("act_mul", "gate_up", gate_up)
        number = ACTIVATIONS.index(act)
        if isinstance(out, QTensor):
            check_q("act_mul", out, out.shape)
            self._begin("act_mul", out, gate_up, act=act)
            self._flat(f"act_mul_q{ending}", rows * width, *out, gate_up, rows * width, width, stride, number)
            return
        self._activation("act_mul", out=out)
        to = row_stride("act_mul", "out", out)
        self._begin("act_mul", out, gate_up, act=act)
        self._flat(f"act_mul{ending}", rows * width, out, gate_up, rows * width, width, to, stride, number)

    # -- collectives of one rank --

    def all_reduce(self, x: Any) -> None:
        """Leave x as it is: one rank."""
        self._begin("all_reduce", x)

    def all_gather(self, out: Any, x: Any) -> None:
        """Copy: one rank."""
        check_shape("all_gather", "x", (None, None), x.shape)
        check_shape("all_gather", "out", x.shape, out.shape)
        self._begin("all_gather", out, x)
        self._copy_rows("all_gather", out, x, None)


def _mine(op: str, weight: Any) -> CudaWeight:
    if not isinstance(weight, CudaWeight):
        raise DeviceError(
            f"{op}: expected a weight packed by this backend, got {type(weight).__name__}; call backend.pack", code="op.dtype"
        )
    return weight


def _row_and_head(op: str, what: str, x: Any) -> tuple[int, int]:
    """Return the strides of rows and heads of a (T, W) or (T, heads, W) array."""
    row, *head = strides_of(op, what, x)
    return row, head[0] if head else 0
