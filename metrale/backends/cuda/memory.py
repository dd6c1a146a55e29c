"""Memory of the backend's own: page-locked host memory, and copies of arrays whose rows may have gaps."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from metrale.backends.cuda.checks import strides_of
from metrale.errors import CapacityError

_TO_DEVICE: Final = "memcpyHostToDevice"
_TO_HOST: Final = "memcpyDeviceToHost"


class PinnedBlock:
    """Zeroed page-locked host memory, mapped into the device; freed when no view of it is left on either side."""

    def __init__(self, cupy: Any, nbytes: int) -> None:
        """Allocate. Raises: CapacityError (``capacity.pinned``)."""
        runtime = cupy.cuda.runtime
        self.address = 0
        self.nbytes = max(1, nbytes)
        self._free = runtime.freeHost
        try:
            self.address = runtime.hostAlloc(self.nbytes, runtime.hostAllocPortable | runtime.hostAllocMapped)
        except RuntimeError as error:
            raise CapacityError(
                f"pinned memory: expected {nbytes} bytes, got: {error}; use fewer rows or raise the limit of locked memory",
                code="capacity.pinned",
            ) from error
        ctypes.memset(self.address, 0, self.nbytes)
        self.device_address = int(runtime.pointerGetAttributes(self.address).devicePointer)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Show the bytes to NumPy, whose arrays keep this object alive."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def holds(self, address: int) -> bool:
        """Say whether a host address lies inside."""
        return self.address <= address < self.address + self.nbytes

    def __del__(self) -> None:
        if self.address:
            try:
                self._free(self.address)
            except RuntimeError:  # the driver is gone, and the memory with it
                return


def host_address(array: Any) -> int:
    """Return where a NumPy array begins."""
    return int(array.__array_interface__["data"][0])


def copy_to_device(cupy: Any, dst: Any, src: Any, stream: Any) -> None:
    """Queue the copy of a contiguous host array into a device array."""
    _copy(cupy, _TO_DEVICE, dst, dst.data.ptr, host_address(src), stream)


def copy_to_host(cupy: Any, dst: Any, src: Any, stream: Any) -> None:
    """Queue the copy of a device array into a contiguous host array."""
    _copy(cupy, _TO_HOST, src, src.data.ptr, host_address(dst), stream)


def _copy(cupy: Any, kind: str, device_array: Any, device: int, host: int, stream: Any) -> None:
    runtime = cupy.cuda.runtime
    for offset, at, nbytes in _runs(device_array):
        ends = (device + offset, host + at) if kind == _TO_DEVICE else (host + at, device + offset)
        runtime.memcpyAsync(*ends, nbytes, getattr(runtime, kind), stream.ptr)


def _runs(x: Any) -> Iterator[tuple[int, int, int]]:
    """Yield (device offset, host offset, bytes) of the pieces without gaps of a device array."""
    if x.size == 0:
        return
    if x.flags.c_contiguous:
        yield 0, 0, x.nbytes
        return
    strides, size, width = strides_of("copy", "array", x), x.dtype.itemsize, x.shape[-1]
    for number, place in enumerate(np.ndindex(*x.shape[:-1])):
        offset = sum(i * stride for i, stride in zip(place, strides, strict=True))
        yield offset * size, number * width * size, width * size
