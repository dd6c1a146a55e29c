"""The CPU backend: memory from one arena, streams over one thread team."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from metrale import env
from metrale._ext.arena import Arena
from metrale._ext.program import Team
from metrale.backends.base import BLOCK_TOKENS, Backend, Comm, KVLayer, PackedWeight, SoloComm, Stream, WeightPart, check_shape
from metrale.backends.cpu import cgroup
from metrale.backends.cpu.stream import CpuStream
from metrale.backends.cpu.threads import choose_threads
from metrale.dtypes import ITEMSIZE, numpy_dtype
from metrale.errors import CapacityError, ConfigError, DeviceError
from metrale.log import get_logger

log = get_logger(__name__)

# Below this size an allocation is not compared with the free memory (which means reading files).
CHECKED_FROM_BYTES = 64 << 20


class CpuBackend(Backend):
    """Host memory as device memory. One thread at a time calls it; ranks of a ThreadComm each have their own.

    Memory that is not asked to be zero is filled with bytes 0xFF (NaN, -1) below 1 MiB; larger blocks are mapped: zero,
    and resident only where they have been touched.
    """

    name = "cpu"
    activation_dtype = "f32"

    def __init__(self, *, threads: int | None = None, activations: str = "int8", isa: str | None = None,
                 comm: Comm | None = None, streams: str | None = None) -> None:
        """Open the backend; its threads start with the first op that has work for two.

        threads: of the team, this one included; None: METRALE_THREADS, else what the machine offers (threads.py).
        activations: "int8" if products of block formats shall take QTensor by default, "f32" if not.
        isa: instruction set of the C kernels; None: METRALE_ISA, else the best this machine runs.
        streams: "eager" or "deferred" (stream.py); None: as METRALE_STREAMS says.
        Raises: ConfigError ``config.activations``, ``config.streams``, ``config.isa``, ``engine.threads``.
        """
        if activations not in ("int8", "f32"):
            raise ConfigError(f"activations: expected int8 or f32, got {activations!r}; correct it", code="config.activations")
        chosen = env.get("METRALE_STREAMS") if streams is None else streams
        if chosen not in ("", "eager", "deferred"):
            raise ConfigError(f"streams: expected eager or deferred, got {chosen!r}; correct it", code="config.streams")
        self.int8_activations = activations == "int8"
        self.comm: Comm = SoloComm() if comm is None else comm
        self.isa = choose_isa(isa)
        self.threads = choose_threads(threads)
        self.team = Team(self.threads.count)
        self.arena = Arena()
        self.recording: set[CpuStream] = set()  # streams with an open capture
        self._deferred = chosen == "deferred"
        self._trace = int(env.get("METRALE_TRACE"))
        self._fault: Callable[[str], None] | None = None
        self._closed = False
        self._pinned: list[Any] = []
        self._streams: list[CpuStream] = []
        self._stream = self._make_stream()
        log.info("CPU backend: %d threads (%s), instruction set %s", self.threads.count, self.threads.reason, self.isa)

    # -- every call --

    @property
    def fault(self) -> Callable[[str], None] | None:
        """Return the hook that tests use to make a call fail: called with each op's and backend call's name first."""
        return self._fault

    @fault.setter
    def fault(self, hook: Callable[[str], None] | None) -> None:
        self._fault = hook
        for stream in self._streams:
            stream.choose_path()

    def enter(self, name: str) -> None:
        """Begin a call: refuse it on a closed backend, let tests make it fail."""
        if self._closed:
            raise DeviceError(f"{name}: expected an open backend, got a closed one; open a new engine", code="device.closed")
        if self._fault is not None:
            self._fault(name)

    def refuse_in_capture(self, what: str, code: str) -> None:
        """Raise CaptureError while any stream records."""
        for stream in tuple(self.recording):
            stream.refuse(what, code)

    def abort_comm(self) -> None:
        """Tell the other ranks that this one has failed."""
        abort = getattr(self.comm, "abort", None)
        if abort is not None:
            abort()

    # -- streams --

    def _make_stream(self) -> CpuStream:
        stream = CpuStream(self, deferred=self._deferred, trace_level=self._trace, name=f"stream {len(self._streams)}")
        self._streams.append(stream)
        return stream

    @property
    def stream(self) -> Stream:
        """Return the default stream."""
        return self._stream

    def new_stream(self) -> Stream:
        """Return a further stream."""
        self.enter("new_stream")
        return self._make_stream()

    def _on(self, stream: Stream | None) -> CpuStream:
        if stream is None:
            return self._stream
        if not isinstance(stream, CpuStream) or stream.backend is not self:
            raise DeviceError("stream: expected one of this backend, got another's; use backend.stream", code="op.dtype")
        return stream

    # -- memory --

    def alloc(self, shape: Sequence[int], dtype: str, *, zero: bool = False) -> Any:
        """Allocate a device array, aligned to 64 bytes."""
        self.enter("alloc")
        self.refuse_in_capture("alloc", "alloc")
        return self._allocate(shape, dtype, zero)

    def alloc_pinned(self, shape: Sequence[int], dtype: str) -> Any:
        """Allocate zeroed host memory that lives as long as the backend."""
        self.enter("alloc_pinned")
        self.refuse_in_capture("alloc_pinned", "alloc")
        self._pinned.append(self._allocate(shape, dtype, True))
        return self._pinned[-1]

    def _allocate(self, shape: Sequence[int], dtype: str, zero: bool) -> Any:
        sizes = tuple(int(size) for size in shape)
        if dtype not in ITEMSIZE or min(sizes, default=0) < 0:
            raise DeviceError(f"alloc: expected a known dtype and sizes from 0, got {dtype!r} and {sizes}; this is a bug "
                              "in the caller", code="op.dtype")
        nbytes = math.prod(sizes) * ITEMSIZE[dtype]
        free = self.memory()[0] if nbytes >= CHECKED_FROM_BYTES else nbytes
        try:
            if nbytes > free:
                raise MemoryError
            block = self.arena.alloc(nbytes, zero)
        except MemoryError:
            raise CapacityError(f"alloc: expected {nbytes} bytes of free memory for {sizes} {dtype}, got {self.memory()[0]}; "
                                "use a smaller model, context or batch", code="capacity.memory") from None
        return np.ndarray(sizes, numpy_dtype(dtype), buffer=memoryview(block))

    def device_view(self, pinned: Any) -> Any:
        """Return the array itself."""
        return pinned

    def upload(self, dst: Any, src: Any, stream: Stream | None = None) -> None:
        """Copy a host array into a device array; pinned memory is read when the stream comes to it, other memory now."""
        self.enter("upload")
        self.refuse_in_capture("upload", "upload")
        target = self._on(stream)
        source = np.asarray(src)
        check_shape("upload", "src", dst.shape, source.shape)
        if source.dtype != dst.dtype:
            raise DeviceError(f"upload: expected src as {dst.dtype}, got {source.dtype}; convert it first", code="op.dtype")
        if not target.deferred:
            np.copyto(dst, source)
            return
        if not any(np.may_share_memory(source, pinned) for pinned in self._pinned):
            source = source.copy()
        target.enqueue(lambda: np.copyto(dst, source))

    def download(self, src: Any, stream: Stream | None = None) -> Any:
        """Return a copy of a device array after the stream's queued work."""
        self.enter("download")
        self.refuse_in_capture("download", "download")
        target = self._on(stream)
        target.run_to(target.queued)
        return np.array(src)

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of the machine, or of the cgroup where that is less."""
        return cgroup.memory()

    # -- weights --

    def pack(self, parts: Sequence[WeightPart], bias: Any | None = None) -> PackedWeight:
        """Pack matrices into panels of 16 rows."""
        self.enter("pack")
        self.refuse_in_capture("pack", "alloc")
        from metrale.backends.cpu.pack import pack

        return pack(self, parts, bias)

    def unpack(self, weight: PackedWeight) -> Any:
        """Return the matrix as float32 (N, K)."""
        from metrale.backends.cpu.pack import CpuWeight, unpack

        if not isinstance(weight, CpuWeight):
            raise DeviceError(f"unpack: expected a weight of this backend, got {type(weight).__name__}; pack it here",
                              code="op.dtype")
        return unpack(weight)

    # -- K/V --

    def alloc_kv(self, blocks: int, heads: int, dim: int) -> KVLayer:
        """Allocate one layer's pages: k (blocks, Hk, D, P), so that 16 lanes are 16 tokens, v (blocks, Hk, P, D)."""
        k = self.alloc((blocks, heads, dim, BLOCK_TOKENS), "f32", zero=True)
        v = self.alloc((blocks, heads, BLOCK_TOKENS, dim), "f32", zero=True)
        return KVLayer(k, v, heads, dim)

    def kv_read(self, layer: KVLayer, block: int) -> tuple[Any, Any]:
        """Return one block's K and V as (P, Hk, D) float32 each."""
        k, v = self.download(layer.k[block]), self.download(layer.v[block])
        return np.ascontiguousarray(k.transpose(2, 0, 1)), np.ascontiguousarray(v.transpose(1, 0, 2))

    def kv_block_bytes(self, heads: int, dim: int) -> int:
        """Return the bytes of one block of one layer, K and V together."""
        return 2 * heads * BLOCK_TOKENS * dim * ITEMSIZE["f32"]

    def close(self) -> None:
        """Join the threads, forget the pinned memory, refuse further calls. Queued work is dropped."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.abort_capture()
        self.team.close()
        self._pinned.clear()


def choose_isa(wanted: str | None) -> str:
    """Return the instruction set of the C kernels: the option, else METRALE_ISA, else the best this machine runs.

    Raises: ConfigError (``config.isa``) for one that this build or machine does not have.
    """
    from metrale._ext import cpu_kernels

    supported: tuple[str, ...] = cpu_kernels.supported()
    chosen = wanted or env.get("METRALE_ISA") or supported[0]
    if chosen not in supported:
        raise ConfigError(f"isa: expected one of {', '.join(supported)} on this machine, got {chosen!r}; unset METRALE_ISA",
                          code="config.isa")
    return chosen
