"""What the tests of ops, models and engines share: tolerances, random data, poison, row states, scattered pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from metrale.backends.base import (
    BLOCK_TOKENS,
    MAX_BIAS,
    MAX_TOP_LOGPROBS,
    ROW_FIELDS,
    Backend,
    KVLayer,
    PatchRing,
    QTensor,
    ResultRing,
    RowBatch,
    RowLayout,
    RowState,
    WeightPart,
)
from metrale.dtypes import bf16_to_f32, f32_to_bf16, numpy_dtype

# --- tolerances ------------------------------------------------------------------------------------------------------

ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def tolerance(dtype: str, reduction_length: int = 1) -> float:
    """Return the relative error a correct op may show: sums in float32, the result rounded to `dtype`.

    Relative to the sum of the absolute terms. The sums of an op nest (a dot product is split in lanes), so their errors
    grow with the root of the length; 8 covers the few roundings around them.
    """
    return 2 * ROUNDOFF[dtype] + ROUNDOFF["f32"] * (8 + 2 * math.sqrt(reduction_length))


def assert_close(got: Any, want: Any, dtype: str = "f32", n: int = 1, magnitude: Any | None = None) -> None:
    """Compare with `tolerance`, relative to `magnitude` (default |want|); NaN must meet NaN, infinity infinity."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    assert np.isfinite(got[finite]).all(), f"not finite at {np.argwhere(finite & ~np.isfinite(got))[:5].tolist()}"
    size = np.broadcast_to(np.abs(want) if magnitude is None else magnitude, want.shape)
    smallest = 2.0**-24 if dtype == "f16" else 2.0**-126  # a step among the smallest values
    excess = np.abs(got[finite] - want[finite]) - tolerance(dtype, n) * size[finite]
    if excess.size:
        worst = int(np.argmax(excess))
        where = np.argwhere(finite)[worst].tolist()
        assert excess[worst] <= smallest, f"at {where}: {got[finite][worst]}, expected {want[finite][worst]} ({dtype}, n={n})"


# --- host and device -------------------------------------------------------------------------------------------------


def round_to(x: Any, dtype: str) -> np.ndarray:
    """Return float32 values that `dtype` can hold."""
    x = np.asarray(x, np.float32)
    if dtype == "bf16":
        return np.asarray(bf16_to_f32(f32_to_bf16(x)))
    return x.astype(np.float16).astype(np.float32) if dtype == "f16" else x


def floats(backend: Backend, rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Return normal random float32 values that the backend's activation type can hold."""
    return round_to(rng.standard_normal(shape) * scale, backend.activation_dtype)


def up(backend: Backend, x: Any, dtype: str | None = None) -> Any:
    """Upload an array: floats in the activation dtype, integers as int32, unless `dtype` says otherwise."""
    x = np.asarray(x)
    if dtype is None:
        dtype = backend.activation_dtype if x.dtype.kind == "f" else "i32"
    device = backend.alloc(x.shape, dtype)
    host = f32_to_bf16(x) if dtype == "bf16" else x.astype(numpy_dtype(dtype))
    backend.upload(device, np.ascontiguousarray(host))
    return device


def down(backend: Backend, x: Any) -> np.ndarray:
    """Download an array; bf16 and float16 come back as float32."""
    host = backend.download(x)
    if host.dtype == np.uint16:
        return np.asarray(bf16_to_f32(host))
    return host.astype(np.float32) if host.dtype == np.float16 else np.asarray(host)


def poisoned(backend: Backend, *shape: int, dtype: str | None = None) -> Any:
    """Return a device array full of NaN (floats) or -77 (integers): an element nobody writes shows."""
    dtype = dtype or backend.activation_dtype
    return up(backend, np.full(shape, np.nan if dtype in ROUNDOFF else -77), dtype)


def poisoned_q(backend: Backend, rows: int, k: int) -> QTensor:
    """Return a QTensor of poison."""
    return QTensor(poisoned(backend, rows, k, dtype="i8"), poisoned(backend, rows, k // 32, dtype="f32"),
                   poisoned(backend, rows, k // 16, dtype="i16"))


def scratch(backend: Backend, nbytes: int) -> Any:
    """Return a scratch buffer whose bytes are NaN in every float type."""
    return up(backend, np.full(nbytes, 0xFF, np.uint8), "u8")


# --- int8 activations ------------------------------------------------------------------------------------------------


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return int8 data, scales and sums of finite float32 rows, as the contract states it, block by block."""
    rows, k = x.shape
    data, scales = np.zeros((rows, k), np.int8), np.zeros((rows, k // 32), np.float32)
    sums = np.zeros((rows, k // 16), np.int16)
    for t in range(rows):
        for b in range(k // 32):
            block = x[t, 32 * b : 32 * b + 32].astype(np.float32)
            amax = np.abs(block).max()
            if amax > 1e-36:
                scales[t, b] = amax / np.float32(127)
                data[t, 32 * b : 32 * b + 32] = np.rint(block * (np.float32(127) / amax))
        for s in range(k // 16):
            sums[t, s] = data[t, 16 * s : 16 * s + 16].astype(int).sum()
    return data, scales, sums


def up_q(backend: Backend, x: np.ndarray) -> QTensor:
    """Upload float rows as a QTensor."""
    data, scales, sums = quantized(x)
    return QTensor(up(backend, data, "i8"), up(backend, scales, "f32"), up(backend, sums, "i16"))


def q_values(parts: Any) -> np.ndarray:
    """Return the float64 values of (data, scales, ...) on the host."""
    return parts[0].astype(np.float64) * np.repeat(parts[1].astype(np.float64), 32, axis=1)


# --- weights ---------------------------------------------------------------------------------------------------------

DENSE_FORMATS = ("f32", "f16", "bf16")
# Block size, block bytes, and the offsets of its float16 fields with the range each is drawn from.
_BLOCKS: dict[str, tuple[int, int, tuple[tuple[int, float, float], ...]]] = {
    "q4_0": (32, 18, ((0, -0.1, 0.1),)),
    "q4_1": (32, 20, ((0, 0.01, 0.1), (2, -0.8, 0.0))),
    "q5_0": (32, 22, ((0, -0.05, 0.05),)),
    "q5_1": (32, 24, ((0, 0.01, 0.05), (2, -0.8, 0.0))),
    "q8_0": (32, 34, ((0, -0.008, 0.008),)),
    "q4_k": (256, 144, ((0, 0.001, 0.003), (2, 0.001, 0.02))),
    "q5_k": (256, 176, ((0, 0.0005, 0.0015), (2, 0.001, 0.02))),
    "q6_k": (256, 210, ((208, -0.0005, 0.0005),)),
}
BLOCK_FORMATS = tuple(_BLOCKS)
FORMATS = (*DENSE_FORMATS, *BLOCK_FORMATS)


def block_size(form: str) -> int:
    """Return the inputs that share a block; K is a multiple of it."""
    return _BLOCKS[form][0] if form in _BLOCKS else 1


def random_part(rng: np.random.Generator, form: str, n: int, k: int) -> WeightPart:
    """Return a random (n, k) matrix in any format; every bit pattern of the packed integers occurs."""
    if form in DENSE_FORMATS:
        x = rng.standard_normal((n, k)).astype(np.float32)
        return WeightPart(form, n, k, {"f32": x, "f16": x.astype(np.float16), "bf16": f32_to_bf16(x)}[form])
    size, nbytes, halves = _BLOCKS[form]
    raw = rng.integers(0, 256, (n * k // size, nbytes), dtype=np.uint8)
    for offset, low, high in halves:
        value = rng.uniform(low, high, (len(raw), 1)).astype("<f2")
        raw[:, offset : offset + 2] = value.view(np.uint8).reshape(-1, 2)
    return WeightPart(form, n, k, raw.reshape(n, -1))


def widened(part: WeightPart) -> np.ndarray:
    """Return a part as float64 (n, k); block formats by the `gguf` package, which shares no code with metrale."""
    if part.format == "bf16":
        return np.asarray(bf16_to_f32(part.data)).astype(np.float64)
    if part.format in DENSE_FORMATS:
        return np.asarray(part.data, np.float64)
    import gguf

    kind = gguf.GGMLQuantizationType[part.format.upper()]
    return np.asarray(gguf.dequantize(np.asarray(part.data), kind), np.float64).reshape(part.n, part.k)


# --- row state -------------------------------------------------------------------------------------------------------

_FLOATS = {"temperature", "top_p", "min_p", "repetition", "presence", "frequency"}
_NEUTRAL = {"top_p": 1.0, "repetition": 1.0, "logprobs": -1, "limit": 2**31 - 1}


class HostRows:
    """A row state written on the host: neutral sampling, empty tables, order -1, poisoned histories."""

    def __init__(self, rows: int, *, max_blocks: int = 3, max_tokens: int = 37, groups: int = 1) -> None:
        self.layout = RowLayout(rows, max_blocks, max_tokens, groups)
        self.words = np.zeros(self.layout.words, np.int32)
        self.words[:rows] = -1
        self.words[self.layout.history :] = -77
        for row in range(rows):
            self.set(row, **_NEUTRAL)

    def set(self, row: int, **values: float) -> HostRows:
        """Set fields of a row by name; `seed` takes 64 bits."""
        if "seed" in values:
            seed = int(values.pop("seed"))
            values |= {"seed_lo": seed & 0xFFFFFFFF, "seed_hi": seed >> 32}
        for name, value in values.items():
            word = np.float32(value).view(np.int32) if name in _FLOATS else np.uint32(int(value) & 0xFFFFFFFF).view(np.int32)
            self.words[self.layout.field(row, name)] = word
        return self

    def order(self, *rows: int) -> HostRows:
        """Set which state row each step row takes."""
        self.words[: len(rows)] = rows
        return self

    def bias(self, row: int, *entries: tuple[int, float, int]) -> HostRows:
        """Set a row's bias entries: (token id, value, until)."""
        assert len(entries) <= MAX_BIAS
        first = row * MAX_BIAS
        for i, (token, value, until) in enumerate(entries):
            self.words[self.layout.bias_ids + first + i] = token
            self.words[self.layout.bias_values + first + i] = np.float32(value).view(np.int32)
            self.words[self.layout.bias_until + first + i] = until
        return self.set(row, num_bias=len(entries))

    def history(self, row: int, tokens: Any) -> HostRows:
        """Set the first tokens of a row's history."""
        start = self.layout.history + row * self.layout.max_tokens
        self.words[start : start + len(tokens)] = tokens
        return self

    def table(self, group: int, row: int, blocks: Any) -> HostRows:
        """Set the first entries of a block table."""
        start = self.layout.table(group, row)
        self.words[start : start + len(blocks)] = blocks
        return self

    def upload(self, backend: Backend) -> RowState:
        """Return the state on a device."""
        return RowState(up(backend, self.words), self.layout)

    @classmethod
    def read(cls, backend: Backend, state: RowState) -> HostRows:
        """Return a copy of a device's state."""
        rows = cls.__new__(cls)
        rows.layout, rows.words = state.layout, backend.download(state.words)
        return rows

    def get(self, row: int, name: str) -> float:
        """Return a field of a row."""
        word = self.words[self.layout.field(row, name)]
        return float(word.view(np.float32)) if name in _FLOATS else int(word)

    def tokens(self, row: int) -> np.ndarray:
        """Return a row's whole history."""
        start = self.layout.history + row * self.layout.max_tokens
        return self.words[start : start + self.layout.max_tokens]


def up_batch(backend: Backend, seq: Any, index: Any, *, ids: Any | None = None, position: Any | None = None) -> RowBatch:
    """Upload a row batch; position defaults to index, ids to 0."""
    seq = np.asarray(seq)
    return RowBatch(up(backend, np.zeros_like(seq) if ids is None else np.asarray(ids)), up(backend, seq),
                    up(backend, np.asarray(index)), up(backend, np.asarray(index if position is None else position)))


def poisoned_batch(backend: Backend, rows: int) -> RowBatch:
    """Return a row batch of poison."""
    return RowBatch(*(poisoned(backend, rows, dtype="i32") for _ in RowBatch._fields))


def patch_ring(backend: Backend, depth: int, capacity: int, *, cursor: int = 0) -> tuple[PatchRing, Any]:
    """Return a patch ring and its host side, the pinned entries."""
    pinned = backend.alloc_pinned((depth, 2 + 2 * capacity), "i32")
    return PatchRing(backend.device_view(pinned), up(backend, np.array([cursor]))), pinned


def result_ring(backend: Backend, depth: int, rows: int, *, cursor: int = 1) -> tuple[ResultRing, dict[str, Any]]:
    """Return a result ring full of poison and its host side by field name."""
    shapes = {"header": ((depth, 4), "i32"), "ids": ((depth, rows), "i32"), "logprob": ((depth, rows), "f32"),
              "top_ids": ((depth, rows, MAX_TOP_LOGPROBS), "i32"), "top_logprobs": ((depth, rows, MAX_TOP_LOGPROBS), "f32")}
    pinned = {name: backend.alloc_pinned(shape, dtype) for name, (shape, dtype) in shapes.items()}
    for array in pinned.values():
        array[...] = np.nan if array.dtype.kind == "f" else -77
    views = [backend.device_view(array) for array in pinned.values()]
    return ResultRing(*views, up(backend, np.array([cursor]))), pinned


# --- pages -----------------------------------------------------------------------------------------------------------


@dataclass
class Paged:
    """Sequences in one layer's pages, blocks scattered at random; every byte no token owns is NaN."""

    layer: KVLayer
    host_tables: np.ndarray  # (rows, max_blocks)
    tables: Any  # the same on the device
    k: list[np.ndarray]  # (length, Hk, D) a sequence
    v: list[np.ndarray]
    free: list[int]  # blocks nobody owns


def paged(backend: Backend, rng: np.random.Generator, lengths: Any, heads: int, dim: int, *, room: int = 2) -> Paged:
    """Write sequences of random K and V through `kv_write`; tables have `room` blocks to spare, which are owned too.

    Table entries past a sequence's blocks name a block that holds only NaN.
    """
    blocks = [-(-length // BLOCK_TOKENS) + room for length in lengths]
    order = (1 + rng.permutation(sum(blocks) + 3)).tolist()
    tables = np.full((len(lengths), max(blocks) + 1), order[-1], np.int32)
    for row, count in enumerate(blocks):
        tables[row, :count] = [order.pop(0) for _ in range(count)]
    layer = poisoned_kv(backend, sum(blocks) + 4, heads, dim)
    k = [floats(backend, rng, length, heads, dim) for length in lengths]
    v = [floats(backend, rng, length, heads, dim) for length in lengths]
    result = Paged(layer, tables, up(backend, tables), k, v, order)
    seq = np.concatenate([np.full(length, row) for row, length in enumerate(lengths)])
    index = np.concatenate([np.arange(length) for length in lengths])
    if len(seq):
        backend.stream.ops.kv_write(layer, up(backend, np.concatenate(k)), up(backend, np.concatenate(v)),
                                    up_batch(backend, seq, index), result.tables)
    return result


def poisoned_kv(backend: Backend, blocks: int, heads: int, dim: int) -> KVLayer:
    """Return pages full of NaN."""
    layer = backend.alloc_kv(blocks, heads, dim)
    for pages in (layer.k, layer.v):
        bits = {2: 0x7FC0, 4: 0x7FC00000}[pages.dtype.itemsize]
        backend.upload(pages, np.full(pages.shape, bits, f"u{pages.dtype.itemsize}").view(pages.dtype))
    return layer


def fields_of(words: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Return the field table of host words, (R, fields)."""
    return words[layout.fields : layout.bias_ids].reshape(layout.rows, len(ROW_FIELDS))


