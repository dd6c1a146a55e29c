"""The CUDA backend: one GPU through CuPy's memory, streams and driver calls, and kernels of our own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from metrale import env
from metrale.backends.base import BLOCK_TOKENS, Backend, Comm, KVLayer, PackedWeight, SoloComm, Stream, WeightPart, check_shape
from metrale.backends.cuda import compiler
from metrale.backends.cuda.driver import device_errors, open_device
from metrale.backends.cuda.emit import Kernel
from metrale.backends.cuda.memory import PinnedBlock, copy_to_device, copy_to_host, host_address
from metrale.backends.cuda.stream import CudaStream
from metrale.backends.cuda.variants import architecture, variants_of
from metrale.backends.cuda.weights import CudaWeight
from metrale.dtypes import ITEMSIZE, bf16_to_f32, numpy_dtype
from metrale.errors import CapacityError, ConfigError, DeviceError, UnsupportedError
from metrale.log import get_logger

log = get_logger(__name__)

ACTIVATION_DTYPES: Final = ("f32", "bf16", "f16")
_OLDEST: Final = (8, 0)
_COMPILER_THREADS: Final = 4


class CudaBackend(Backend):
    """One GPU. Not for use by two threads at once.

    Its memory is a pool and its pinned memory are blocks of its own; CuPy's global allocators stay as they are. The
    device becomes the calling thread's current one.
    """

    name = "cuda"

    def __init__(self, *, activations: str = "f32", activation_dtype: str = "f32", comm: Comm | None = None,
                 ordinal: int = 0) -> None:
        """Open a device and load its kernels; the first time on a machine they are compiled, which takes seconds.

        activations: "int8" if products of block formats shall take QTensor by default.
        activation_dtype: "f32", "bf16" or "f16": the type of activations and K/V.
        Raises: ConfigError (``config.activation_dtype``, ``config.activations``); UnsupportedError (``device.unavailable``,
                ``device.too_old``, ``unsupported.comm``); DeviceError (``device.nvrtc``, ``device.compile``).
        """
        if activations not in ("int8", "f32"):
            raise ConfigError(f"activations: expected int8 or f32, got {activations!r}; choose one", code="config.activations")
        if activation_dtype not in ACTIVATION_DTYPES:
            raise ConfigError(
                f"activation_dtype: expected one of {', '.join(ACTIVATION_DTYPES)}, got {activation_dtype!r}; choose one",
                code="config.activation_dtype",
            )
        self.comm = SoloComm() if comm is None else comm
        if self.comm.size != 1:
            raise UnsupportedError(f"comm: expected one rank, got {self.comm.size}; use device='cpu'", code="unsupported.comm")
        self.activation_dtype = activation_dtype
        self.element = numpy_dtype(activation_dtype)
        self.int8_activations = activations == "int8"
        self.cupy: Any = open_device(ordinal)
        self._ordinal = ordinal
        self.trace = int(env.get("METRALE_TRACE"))
        self._closed = False
        self._pool = self.cupy.cuda.MemoryPool()
        self._pinned: list[PinnedBlock] = []
        self._streams: weakref.WeakSet[CudaStream] = weakref.WeakSet()
        self.kernels = self._load_kernels()
        self._stream = self._make_stream()

    def _load_kernels(self) -> dict[str, Kernel]:
        """Compile or fetch every variant of the activation dtype and load all its entry points."""
        with device_errors("device"):
            properties = self.cupy.cuda.runtime.getDeviceProperties(self._ordinal)
        capability = (int(properties["major"]), int(properties["minor"]))
        if capability < _OLDEST:
            raise UnsupportedError(
                f"device: expected compute capability {_OLDEST[0]}.{_OLDEST[1]} or newer, got "
                f"{capability[0]}.{capability[1]}; use device='cpu'",
                code="device.too_old",
            )
        arch, nvrtc, variants = architecture(capability), compiler.CupyNvrtc(), variants_of(self.activation_dtype)
        with ThreadPoolExecutor(_COMPILER_THREADS) as threads:
            cubins = list(threads.map(lambda variant: compiler.cubin(variant, arch, nvrtc), variants))
        kernels = {}
        with device_errors("kernels"):
            for variant, cubin in zip(variants, cubins, strict=True):
                module = self.cupy.cuda.function.Module()
                module.load(cubin)
                for name, letters in compiler.entry_points(variant).items():
                    kernels[name] = Kernel(name, module.get_function(f"{name}{variant.suffix}"), letters)
        log.info("cuda device %d: %s, %d kernels", self._ordinal, arch, len(kernels))
        return kernels

    def enter(self, name: str) -> None:
        """Begin a call: refuse it on a closed backend, let tests make it fail, make the device current."""
        if self._closed:
            raise DeviceError(f"{name}: expected an open backend, got a closed one; open a new engine", code="device.closed")
        if self.fault is not None:
            self.fault(name)
        runtime = self.cupy.cuda.runtime
        if runtime.getDevice() != self._ordinal:
            runtime.setDevice(self._ordinal)

    def refuse_in_capture(self, what: str, code: str) -> None:
        """Raise CaptureError while any stream records."""
        for stream in self._streams:
            stream.refuse(what, code)

    # -- streams --

    def _make_stream(self) -> CudaStream:
        stream = CudaStream(self)
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

    def _on(self, stream: Stream | None) -> Any:
        """Return CuPy's stream."""
        chosen = self._stream if stream is None else stream
        assert isinstance(chosen, CudaStream)
        return chosen.handle

    def _drain(self) -> None:
        for stream in list(self._streams):
            stream.handle.synchronize()

    # -- memory --

    def alloc(self, shape: Sequence[int], dtype: str, *, zero: bool = False) -> Any:
        """Allocate a device array.

        Waits for every stream: the pool may hand out memory that queued work still reads.
        """
        self.enter("alloc")
        self.refuse_in_capture("alloc", "alloc")
        sizes = tuple(int(size) for size in shape)
        nbytes = ITEMSIZE[dtype]
        for size in sizes:
            nbytes *= size
        with device_errors("alloc"):
            self._drain()
            _, total = self.cupy.cuda.runtime.memGetInfo()
            memory = self._malloc(nbytes) if nbytes <= total else None
            if memory is None:
                free, _ = self.memory()
                raise CapacityError(
                    f"alloc: expected at most {free} free bytes, got a request for {nbytes}; use a smaller model, context or "
                    "batch",
                    code="capacity.memory",
                )
            if zero and nbytes:
                memory.memset_async(0, nbytes, self._stream.handle)
                self._stream.handle.synchronize()  # another stream may use it next
        return self.cupy.ndarray(sizes, numpy_dtype(dtype), memptr=memory)

    def _malloc(self, nbytes: int) -> Any | None:
        try:
            return self._pool.malloc(nbytes)
        except self.cupy.cuda.memory.OutOfMemoryError:
            return None

    def alloc_pinned(self, shape: Sequence[int], dtype: str) -> Any:
        """Allocate zeroed page-locked memory that the device can read and write."""
        self.enter("alloc_pinned")
        self.refuse_in_capture("alloc_pinned", "alloc")
        sizes = tuple(int(size) for size in shape)
        nbytes = ITEMSIZE[dtype] * int(np.prod(sizes, dtype=np.int64))
        block = PinnedBlock(self.cupy, nbytes)
        self._pinned.append(block)
        return np.asarray(block)[:nbytes].view(numpy_dtype(dtype)).reshape(sizes)

    def _block_of(self, array: Any) -> PinnedBlock | None:
        """Return the pinned block that an array lies in."""
        address = host_address(array)
        return next((block for block in self._pinned if block.holds(address)), None)

    def device_view(self, pinned: Any) -> Any:
        """Return the device's view of pinned memory.

        Raises: DeviceError (``device.pinned``) for other memory.
        """
        block = self._block_of(pinned)
        if block is None or not pinned.flags.c_contiguous:
            raise DeviceError(
                "device_view: expected a whole array of this backend's alloc_pinned, got other memory; allocate it there",
                code="device.pinned",
            )
        cuda = self.cupy.cuda
        offset = host_address(pinned) - block.address
        memory = cuda.UnownedMemory(block.device_address, block.nbytes, block, self._ordinal)
        return self.cupy.ndarray(pinned.shape, pinned.dtype, memptr=cuda.MemoryPointer(memory, offset))

    def upload(self, dst: Any, src: Any, stream: Stream | None = None) -> None:
        """Copy a host array into a device array; pinned memory is read when the stream comes to it, other memory now."""
        self.enter("upload")
        self.refuse_in_capture("upload", "upload")
        source = np.asarray(src)
        check_shape("upload", "src", dst.shape, source.shape)
        if source.dtype != dst.dtype:
            raise DeviceError(f"upload: expected src as {dst.dtype}, got {source.dtype}; convert it first", code="op.dtype")
        late = self._block_of(source) is not None and source.flags.c_contiguous
        source, handle = np.ascontiguousarray(source), self._on(stream)
        with device_errors("upload"):
            copy_to_device(self.cupy, dst, source, handle)
            if not late:
                handle.synchronize()  # the caller may change or drop its array

    def download(self, src: Any, stream: Stream | None = None) -> Any:
        """Return a NumPy copy of a device array, after the stream's queued work."""
        self.enter("download")
        self.refuse_in_capture("download", "download")
        out, handle = np.empty(src.shape, src.dtype), self._on(stream)
        with device_errors("download"):
            copy_to_host(self.cupy, out, src, handle)
            handle.synchronize()
        return out

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes; what the pool holds unused counts as free."""
        self.enter("memory")
        with device_errors("memory"):
            free, total = self.cupy.cuda.runtime.memGetInfo()
        return int(free) + int(self._pool.free_bytes()), int(total)

    # -- weights --

    def pack(self, parts: Sequence[WeightPart], bias: Any | None = None) -> PackedWeight:
        """Upload matrices as they are."""
        self.enter("pack")
        return CudaWeight(self, parts, bias)

    def unpack(self, weight: PackedWeight) -> Any:
        """Return the matrix as float32 (N, K)."""
        assert isinstance(weight, CudaWeight)
        return weight.widened(self)

    # -- K/V --

    def alloc_kv(self, blocks: int, heads: int, dim: int) -> KVLayer:
        """Allocate one layer's pages, (blocks, Hk, P, D) each."""
        shape = (blocks, heads, BLOCK_TOKENS, dim)
        k, v = (self.alloc(shape, self.activation_dtype, zero=True) for _ in range(2))
        return KVLayer(k, v, heads, dim)

    def kv_read(self, layer: KVLayer, block: int) -> tuple[Any, Any]:
        """Return one block's K and V as (P, Hk, D) float32 each."""
        pages = [self.download(pages[block]) for pages in (layer.k, layer.v)]
        wide = [bf16_to_f32(page) if page.dtype == np.uint16 else page.astype(np.float32) for page in pages]
        k, v = (page.transpose(1, 0, 2).copy() for page in wide)
        return k, v

    def kv_block_bytes(self, heads: int, dim: int) -> int:
        """Return the bytes of one block of one layer."""
        return 2 * heads * BLOCK_TOKENS * dim * ITEMSIZE[self.activation_dtype]

    def close(self) -> None:
        """Wait for the device, let go of memory and kernels, and refuse further calls."""
        if self._closed:
            return
        self._closed = True
        for stream in list(self._streams):
            stream.abort_capture()
        try:
            with device_errors("close"):
                self._drain()
                self._pool.free_all_blocks()
        except DeviceError as error:
            log.warning("closing after a fault: %s", error)
        self._pinned.clear()
        self.kernels = {}
