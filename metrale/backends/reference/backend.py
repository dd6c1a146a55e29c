"""The reference backend: host memory, plain layouts, one thread."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from metrale import env
from metrale.backends.base import BLOCK_TOKENS, Backend, Comm, KVLayer, PackedWeight, SoloComm, Stream, WeightPart, check_shape
from metrale.backends.cpu import cgroup  # the host is the device here too
from metrale.backends.reference.arrays import load
from metrale.backends.reference.stream import ReferenceStream
from metrale.backends.reference.weight import ReferenceWeight
from metrale.dtypes import ITEMSIZE, numpy_dtype
from metrale.errors import CapacityError, ConfigError, DeviceError

ACTIVATION_DTYPES = ("f32", "bf16", "f16")
CHECKED_FROM_BYTES = 64 << 20  # asking how much memory is free means reading files: only for large requests


class ReferenceBackend(Backend):
    """NumPy arrays as device memory.

    Not for use by two threads at once. Memory that is not asked to be zero is filled with bytes 0xFF: NaN in every float
    type, -1 in the signed ones, so that reading what nothing wrote shows.
    """

    name = "reference"

    def __init__(self, *, activations: str = "f32", activation_dtype: str = "f32", comm: Comm | None = None,
                 deferred: bool | None = None) -> None:
        """Open the backend.

        activations: "int8" if products of block formats shall take QTensor by default.
        activation_dtype: "f32", "bf16" or "f16": the type of activations and K/V.
        deferred: queue streams and run them as late as their events allow; None: as METRALE_STREAMS says.
        Raises: ConfigError (``config.activation_dtype``, ``config.activations``).
        """
        if activations not in ("int8", "f32"):
            raise ConfigError(f"activations: expected int8 or f32, got {activations!r}", code="config.activations")
        if activation_dtype not in ACTIVATION_DTYPES:
            raise ConfigError(
                f"activation_dtype: expected one of {', '.join(ACTIVATION_DTYPES)}, got {activation_dtype!r}",
                code="config.activation_dtype",
            )
        self.activation_dtype = activation_dtype
        self.int8_activations = activations == "int8"
        self.comm = SoloComm() if comm is None else comm
        self._deferred = env.get("METRALE_STREAMS") == "deferred" if deferred is None else deferred
        self._closed = False
        self._pinned: list[Any] = []
        self._streams: weakref.WeakSet[ReferenceStream] = weakref.WeakSet()
        self._stream = self._make_stream()

    def enter(self, name: str) -> None:
        """Begin a call: refuse it on a closed backend, let tests make it fail."""
        if self._closed:
            raise DeviceError(f"{name}: expected an open backend, got a closed one; open a new engine", code="device.closed")
        if self.fault is not None:
            self.fault(name)

    def refuse_in_capture(self, what: str, code: str) -> None:
        """Raise CaptureError while any stream records."""
        for stream in self._streams:
            stream.refuse(what, code)

    # -- streams --

    def _make_stream(self) -> ReferenceStream:
        stream = ReferenceStream(self, deferred=self._deferred)
        self._streams.add(stream)
        return stream

    @property
    def stream(self) -> Stream:
        """Return the default stream."""
        return self._stream

    def new_stream(self) -> Stream:
        """Return a further stream."""
        self.enter("new_stream")
        return self._make_stream()

    # -- memory --

    def alloc(self, shape: Sequence[int], dtype: str, *, zero: bool = False) -> Any:
        """Allocate a device array."""
        self.enter("alloc")
        self.refuse_in_capture("alloc", "alloc")
        return _allocate(shape, dtype, fill=0 if zero else 0xFF)

    def alloc_pinned(self, shape: Sequence[int], dtype: str) -> Any:
        """Allocate zeroed host memory that lives as long as the backend."""
        self.enter("alloc_pinned")
        self.refuse_in_capture("alloc_pinned", "alloc")
        self._pinned.append(_allocate(shape, dtype, fill=0))
        return self._pinned[-1]

    def device_view(self, pinned: Any) -> Any:
        """Return the array itself."""
        return pinned

    def upload(self, dst: Any, src: Any, stream: Stream | None = None) -> None:
        """Copy a host array into a device array; pinned memory is read when the stream comes to it, other memory now."""
        self.enter("upload")
        self.refuse_in_capture("upload", "upload")
        source = np.asarray(src)
        check_shape("upload", "src", dst.shape, source.shape)
        if source.dtype != dst.dtype:
            raise DeviceError(f"upload: expected src as {dst.dtype}, got {source.dtype}; convert it first", code="op.dtype")
        if not any(np.may_share_memory(source, pinned) for pinned in self._pinned):
            source = source.copy()
        self._on(stream).enqueue(lambda: np.copyto(dst, source))

    def download(self, src: Any, stream: Stream | None = None) -> Any:
        """Return a copy of a device array after the stream's queued work."""
        self.enter("download")
        self.refuse_in_capture("download", "download")
        target = self._on(stream)
        target.run_to(target.queued)
        return np.array(src)

    def _on(self, stream: Stream | None) -> ReferenceStream:
        chosen = self._stream if stream is None else stream
        assert isinstance(chosen, ReferenceStream)
        return chosen

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of the machine or its cgroup."""
        return cgroup.memory()

    # -- weights --

    def pack(self, parts: Sequence[WeightPart], bias: Any | None = None) -> PackedWeight:
        """Copy matrices as they are."""
        self.enter("pack")
        return ReferenceWeight(parts, bias)

    def unpack(self, weight: PackedWeight) -> Any:
        """Return the matrix as float32 (N, K)."""
        assert isinstance(weight, ReferenceWeight)
        return weight.rows(np.arange(weight.n))

    # -- K/V --

    def alloc_kv(self, blocks: int, heads: int, dim: int) -> KVLayer:
        """Allocate one layer's pages, (blocks, Hk, P, D) each."""
        shape = (blocks, heads, BLOCK_TOKENS, dim)
        k, v = (self.alloc(shape, self.activation_dtype, zero=True) for _ in range(2))
        return KVLayer(k, v, heads, dim)

    def kv_read(self, layer: KVLayer, block: int) -> tuple[Any, Any]:
        """Return one block's K and V as (P, Hk, D) float32 each."""
        pages = [self.download(pages[block]) for pages in (layer.k, layer.v)]
        k, v = (load(page).astype(np.float32).transpose(1, 0, 2).copy() for page in pages)
        return k, v

    def kv_block_bytes(self, heads: int, dim: int) -> int:
        """Return the bytes of one block of one layer."""
        return 2 * heads * BLOCK_TOKENS * dim * ITEMSIZE[self.activation_dtype]

    def close(self) -> None:
        """Forget the pinned memory and refuse further calls."""
        self._closed = True
        self._pinned.clear()


def _allocate(shape: Sequence[int], dtype: str, *, fill: int) -> Any:
    count = 1
    for size in shape:
        count *= int(size)
    nbytes = count * ITEMSIZE[dtype]
    free = cgroup.memory()[0] if nbytes >= CHECKED_FROM_BYTES else nbytes
    if nbytes > free:
        raise CapacityError(
            f"alloc: expected at most {free} free bytes, got a request for {nbytes}; use a smaller model, context or batch",
            code="capacity.memory",
        )
    raw = np.full(nbytes, fill, np.uint8) if fill else np.zeros(nbytes, np.uint8)
    return raw.view(numpy_dtype(dtype)).reshape(tuple(shape))
