"""Products with packed weights, embeddings, quantization and gates on the CPU."""

from __future__ import annotations

from typing import Any, Final

from metrale._ext import cpu_kernels
from metrale.backends.base import ACTIVATIONS, QTensor, check_shape
from metrale.backends.cpu.checks import check_dtype, check_out, parts, row_tiles, stride
from metrale.backends.cpu.emit import Emitter
from metrale.backends.cpu.pack import PANEL_ROWS, CpuWeight
from metrale.errors import DeviceError, UnsupportedError

ROWS_A_TILE: Final = 64  # what the kernels' L1 scratch holds
FEW_ROWS: Final = 8
TILE_BYTES: Final = 64 << 10  # of weights, when few rows read them: about 4 us; half as much cost q6_k a sixth of its rate
MANY_TILES: Final = 64


def tile_shape(rows: int, panels: int, panel_bytes: int, step: int = 1) -> tuple[int, int, int]:
    """Return (panels a tile, rows a tile, tiles): a function of the shape alone. Panels a tile is a multiple of `step`.

    Few rows: tiles of about TILE_BYTES, but at least eight tiles. Many rows: four panels by 64 rows, or two panels where
    that would make few tiles.
    """
    if rows <= FEW_ROWS:
        across = min(max(1, TILE_BYTES // max(1, panel_bytes)), max(1, panels // 16))
        down = max(1, rows)
    else:
        down = min(rows, ROWS_A_TILE)
        across = 4 if -(-rows // down) * panels >= 4 * MANY_TILES else 2
    across = -(-across // step) * step
    return across, down, -(-panels // across) * -(-rows // down)


class LinearOps(Emitter):
    """The ops that read packed weights, and the elementwise ones around them."""

    def kernel(self, name: str) -> int:
        """Return the address of a kernel in the backend's instruction set."""
        return cpu_kernels.address(name, self.backend.isa)

    def embed(self, out: Any, ids: Any, weight: Any, *, scale: float) -> None:
        """Gather rows of an embedding."""
        check_shape("embed", "ids", (None,), ids.shape)
        check_shape("embed", "out", (ids.shape[0], weight.k), out.shape)
        check_dtype("embed", "float32", out=out)
        rows = int(ids.shape[0])
        for part in _mine("embed", weight).segments:
            args = (
                out,
                ids,
                part.panels,
                rows,
                part.n,
                weight.k,
                stride(out),
                part.number,
                float(scale),
                part.start,
                weight.n,
            )
            self.emit("embed", self.kernel("embed"), -(-rows // 8), args, (out, ids, part.panels), scale=scale)

    def quantize(self, out: QTensor, x: Any) -> None:
        """Quantize rows to int8."""
        check_shape("quantize", "x", (None, None), x.shape)
        check_out("quantize", out, x.shape)
        check_dtype("quantize", "float32", x=x)
        rows, k = x.shape
        args = (*out, x, rows, k, stride(x))
        self.emit("quantize", self.kernel("quantize"), row_tiles(rows, k), args, (*out, x))

    def quantize_rest(self, out: QTensor, x: Any, q: QTensor) -> None:
        """Quantize what a quantization left."""
        check_shape("quantize_rest", "x", (None, None), x.shape)
        check_out("quantize_rest", out, x.shape)
        check_out("quantize_rest", q, x.shape)
        check_dtype("quantize_rest", "float32", x=x)
        rows, k = x.shape
        args = (*out, x, rows, k, stride(x), q.data, q.scales)
        self.emit("quantize_rest", self.kernel("quantize_rest"), row_tiles(rows, k), args, (*out, x, *q))

    def act_mul(self, out: Any, gate_up: Any, *, act: str) -> None:
        """Gate rows."""
        check_shape("act_mul", "gate_up", (None, 2 * out.shape[1]), gate_up.shape)
        rows, width = int(gate_up.shape[0]), int(gate_up.shape[1]) // 2
        to = check_out("act_mul", out, (rows, width))
        check_dtype("act_mul", "float32", gate_up=gate_up)
        args = (*to, gate_up[:, :width], gate_up[:, width:], rows, width, stride(gate_up), stride(out), _act(act))
        self.emit("act_mul", self.kernel("act_mul"), row_tiles(rows, width), args, (*parts(out), gate_up), act=act)

    def linear(self, out: Any, x: Any, weight: Any, *, lora: Any | None = None) -> None:
        """Multiply."""
        self._linear("linear", out, x, weight, None, 1.0, lora)

    def linear_residual(self, residual: Any, x: Any, weight: Any, *, scratch: Any, lora: Any | None = None) -> None:
        """Add a product to the residual."""
        self._linear("linear_residual", residual, x, weight, residual, 1.0, lora)

    def linear_residual_scratch_bytes(self, rows: int, weight: Any) -> int:
        """Return 0: the product is added as it leaves its registers."""
        return 0

    def mlp_up_scratch_bytes(self, rows: int, weight: Any) -> int:
        """Return 0 where gate and up are fused, else the room of both."""
        return 0 if _mine("mlp_up", weight).halves() else 4 * rows * weight.n

    def mlp_up(self, out: Any, x: Any, weight: Any, *, act: str, scratch: Any, lora: Any | None = None) -> None:
        """Multiply by gate and up, and gate, in one op; a QTensor is quantized where it is made."""
        halves = _mine("mlp_up", weight).halves()
        if halves is None:
            super().mlp_up(out, x, weight, act=act, scratch=scratch, lora=lora)  # type: ignore[misc]
            return
        gate, up = halves
        rows, xs = self._input("mlp_up", x, weight, lora)
        to = check_out("mlp_up", out, (rows, gate.n))
        q = isinstance(out, QTensor)
        panels = -(-gate.n // PANEL_ROWS)
        across, down, tiles = tile_shape(rows, panels, gate.panel_bytes + up.panel_bytes, 2 if q else 1)
        biases = (None, None) if weight.bias is None else (weight.bias[: gate.n], weight.bias[gate.n :])
        args = (
            to[0],
            *xs,
            gate.panels,
            up.panels,
            *biases,
            *to[1:],
            rows,
            gate.n,
            weight.k,
            stride(out),
            gate.number,
            up.number,
            _act(act),
            across,
            down,
        )
        name = "mlp_up_q" if isinstance(x, QTensor) else "mlp_up_f"
        self.emit("mlp_up", self.kernel(name), tiles, args, (*parts(out), *parts(x), gate.panels, up.panels), act=act)

    def head(self, logits: Any, x: Any, weight: Any, *, scale: float, cap: float | None) -> None:
        """Project to logits; the factor is applied as they leave their registers."""
        self._linear("head", logits, x, weight, None, float(scale), None)
        if cap is not None:
            self.softcap(logits, cap=cap)  # type: ignore[attr-defined]

    # -- inside --

    def _linear(self, op: str, out: Any, x: Any, weight: Any, residual: Any | None, factor: float, lora: Any | None) -> None:
        segments = _mine(op, weight).segments
        rows, xs = self._input(op, x, weight, lora)
        check_shape(op, "out", (rows, weight.n), out.shape)
        check_dtype(op, "float32", out=out)
        name = self.kernel("linear_q" if isinstance(x, QTensor) else "linear_f")
        for part in segments:
            stop = part.start + part.n
            whole = len(segments) == 1
            to = out if whole else out[:, part.start : stop]
            old = None if residual is None else to
            bias = weight.bias if whole or weight.bias is None else weight.bias[part.start : stop]
            across, down, tiles = tile_shape(rows, -(-part.n // PANEL_ROWS), part.panel_bytes)
            args = (
                to,
                *xs,
                part.panels,
                bias,
                old,
                rows,
                part.n,
                weight.k,
                stride(out),
                stride(out),
                part.number,
                across,
                down,
                factor,
            )
            params = {} if factor == 1.0 else {"scale": factor}
            self.emit(op, name, tiles, args, (to, *parts(x), part.panels), **params)

    def _input(self, op: str, x: Any, weight: CpuWeight, lora: Any | None) -> tuple[int, tuple[Any, Any, Any]]:
        """Check the rows of a product; return their number and arguments 1 to 3 of the kernel."""
        check_shape(op, "x", (None, weight.k), x.shape)
        if lora is not None:
            raise UnsupportedError(f"{op}: expected no adapter, got one; this backend has none", code="unsupported.lora")
        if not isinstance(x, QTensor):
            check_dtype(op, "float32", x=x)
            return int(x.shape[0]), (x, stride(x), 0)
        if not weight.takes_q:
            raise DeviceError(f"{op}: expected block formats for a QTensor, got {weight.formats}; pass floats", code="op.dtype")
        check_out(op, x, x.shape)
        return int(x.shape[0]), (x.data, x.scales, x.sums)


def _mine(op: str, weight: Any) -> CpuWeight:
    if not isinstance(weight, CpuWeight):
        raise DeviceError(
            f"{op}: expected a weight packed by this backend, got {type(weight).__name__}; call backend.pack", code="op.dtype"
        )
    return weight


def _act(act: str) -> int:
    if act not in ACTIVATIONS:
        raise UnsupportedError(
            f"act: expected one of {', '.join(ACTIVATIONS)}, got {act!r}; this model needs another version",
            code="unsupported.activation",
        )
    return ACTIVATIONS.index(act)
