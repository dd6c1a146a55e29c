"""Norms, sums, scalings and copies of rows on the CPU."""

from __future__ import annotations

from typing import Any, Final

from metrale.backends.base import QTensor, check_shape
from metrale.backends.cpu import jit
from metrale.backends.cpu.checks import check_dtype, check_out, check_rows, parts, row_tiles, stride
from metrale.backends.cpu.emit import Emitter

PLAIN, ADD_FIRST, ADD_AFTER = range(3)  # modes of the rms_norm kernel
ADD, SCALE, SOFTCAP = range(3)  # modes of the elementwise kernel
PIECE: Final = 16384  # numbers of a row that one tile changes


class NormOps(Emitter):
    """Ops whose rows are computed alone, number by number or after one sum."""

    def gather_rows(self, out: Any, x: Any, rows: Any) -> None:
        """Copy rows."""
        check_shape("gather_rows", "x", (None, None), x.shape)
        count = check_rows("gather_rows", None, rows=rows)
        check_shape("gather_rows", "out", (count, x.shape[1]), out.shape)
        check_dtype("gather_rows", "float32", out=out, x=x)
        width = int(x.shape[1])
        args = (out, x, rows, count, width, stride(out), stride(x), int(x.shape[0]))
        self.emit("gather_rows", jit.address("gather_rows"), row_tiles(count, width), args, (out, x, rows))

    def add(self, residual: Any, x: Any) -> None:
        """Add in place."""
        check_shape("add", "residual", (None, None), residual.shape)
        check_shape("add", "x", residual.shape, x.shape)
        check_dtype("add", "float32", residual=residual, x=x)
        self._elementwise("add", residual, x, 0.0, ADD)

    def scale(self, x: Any, *, factor: float) -> None:
        """Multiply in place by a constant."""
        check_shape("scale", "x", (None, None), x.shape)
        check_dtype("scale", "float32", x=x)
        self._elementwise("scale", x, None, factor, SCALE, factor=factor)

    def softcap(self, x: Any, *, cap: float) -> None:
        """Cap in place."""
        check_shape("softcap", "x", (None, None), x.shape)
        check_dtype("softcap", "float32", x=x)
        self._elementwise("softcap", x, None, cap, SOFTCAP, cap=cap)

    def _elementwise(self, op: str, x: Any, y: Any | None, number: float, mode: int, **params: float) -> None:
        rows, width = (int(size) for size in x.shape)
        pieces = -(-width // PIECE)
        tiles = rows * pieces if pieces > 1 else row_tiles(rows, width)
        args = (x, y, rows, width, stride(x), 0 if y is None else stride(y), float(number), mode)
        self.emit(op, jit.address("elementwise"), tiles, args, (x,) if y is None else (x, y), **params)

    def rms_norm(self, out: Any, x: Any, weight: Any, *, eps: float, offset: float, cast_first: bool) -> None:
        """Normalise rows; `cast_first` changes nothing in float32."""
        if len(x.shape) != 3:
            check_shape("rms_norm", "x", (None, None), x.shape)
        to = check_out("rms_norm", out, tuple(x.shape))
        self._norm("rms_norm", to, x, None, weight, (*parts(out), x, weight), PLAIN, stride(out), eps, offset, cast_first)

    def add_rms_norm(self, out: Any | QTensor, residual: Any, x: Any, weight: Any, *, eps: float, offset: float,
                     cast_first: bool) -> None:
        """Add to the residual, then normalise it."""
        self._pair("add_rms_norm", residual, x)
        to = check_out("add_rms_norm", out, tuple(residual.shape))
        buffers = (*parts(out), residual, x, weight)
        self._norm("add_rms_norm", to, x, residual, weight, buffers, ADD_FIRST, stride(out), eps, offset, cast_first)

    def norm_add(self, residual: Any, x: Any, weight: Any, *, eps: float, offset: float, cast_first: bool) -> None:
        """Add the normalised x, which is overwritten, to the residual."""
        self._pair("norm_add", residual, x)
        to = (x, None, None, None)
        self._norm("norm_add", to, x, residual, weight, (residual, x, weight), ADD_AFTER, stride(x), eps, offset, cast_first)

    def _pair(self, op: str, residual: Any, x: Any) -> None:
        check_shape(op, "residual", (None, None), residual.shape)
        check_shape(op, "x", residual.shape, x.shape)
        check_dtype(op, "float32", residual=residual)

    def _norm(self, op: str, to: tuple[Any, Any, Any, Any], x: Any, residual: Any | None, weight: Any, buffers: tuple[Any, ...],
              mode: int, out_stride: int, eps: float, offset: float, cast_first: bool) -> None:
        width = int(x.shape[-1])
        check_shape(op, "weight", (width,), weight.shape)
        check_dtype(op, "float32", x=x, weight=weight)
        rows, heads = int(x.shape[0]), int(x.shape[1]) if len(x.shape) == 3 else 1
        strides = (out_stride, stride(x), 0 if residual is None else stride(residual))
        args = (*to, x, residual, weight, rows, heads, width, *strides, float(eps), float(offset), mode)
        self.emit(op, jit.address("rms_norm"), row_tiles(rows, heads * width, 4096), args, buffers, eps=eps, offset=offset,
                  cast_first=cast_first)
