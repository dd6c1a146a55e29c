"""How an op reaches the device: one record, then its kernels on its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from metrale.backends.base import Ops, Record
from metrale.backends.cuda.checks import check_dtype
from metrale.backends.cuda.driver import device_error, device_errors
from metrale.errors import DeviceError
from metrale.log import get_logger

if TYPE_CHECKING:
    from metrale.backends.cuda.stream import CudaStream

log = get_logger(__name__)

THREADS: Final = 256
_SCALARS: Final = {"i": np.int32, "l": np.int64, "f": np.float32}


class Kernel(NamedTuple):
    """A loaded entry point and the letters of its parameters (see `compiler.entry_points`)."""

    name: str
    function: Any
    letters: str

    def arguments(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the arguments as the kernel takes them: addresses and scalars, by value."""
        if len(args) != len(self.letters):
            raise DeviceError(
                f"{self.name}: expected {len(self.letters)} arguments, got {len(args)}; this is a bug", code="op.arity"
            )
        pairs = zip(self.letters, args, strict=True)
        return [_address(arg) if letter == "p" else _SCALARS[letter](arg) for letter, arg in pairs]


def _address(array: Any | None) -> Any:
    return np.uintp(0 if array is None else array.data.ptr)


class Emitter(Ops):
    """Recording and launching, for the families of ops in the files beside this one."""

    def __init__(self, stream: CudaStream) -> None:
        """Emit to a stream."""
        self._stream = stream
        self._backend = stream.backend
        self.comm = stream.backend.comm

    def _begin(self, op: str, *buffers: Any, **params: Any) -> None:
        """Start an op whose arguments have been checked; tests may make it fail here."""
        self._backend.enter(op)
        self._stream.note(Record(op, buffers, params))

    def _launch(self, name: str, blocks: int | tuple[int, int], *args: Any, threads: int = THREADS,
                shared_bytes: int = 0) -> None:
        """Launch a kernel; without blocks there is nothing to do."""
        grid = (blocks,) if isinstance(blocks, int) else blocks
        if not all(grid):
            return
        kernel = self._backend.kernels[name]
        values = kernel.arguments(args)
        try:
            kernel.function(grid, (threads,), values, shared_mem=shared_bytes, stream=self._stream.handle)
        except RuntimeError as error:
            raise device_error(name, error) from error
        if self._backend.trace and not self._stream.capturing:
            self._show(name, args)

    def _show(self, name: str, args: tuple[Any, ...]) -> None:
        """Do what METRALE_TRACE asks for after a launch."""
        shown = (f"{arg.dtype}{list(arg.shape)}" if hasattr(arg, "dtype") else str(arg) for arg in args)
        log.info("%s(%s)", name, ", ".join(shown))
        if self._backend.trace >= 2:
            with device_errors(name):
                self._stream.handle.synchronize()
        out = args[0]
        if self._backend.trace >= 3 and out.dtype.kind == "f":
            bad = int((~np.isfinite(self._backend.download(out, self._stream))).sum())
            if bad:  # a warning and no error: rows of padding may hold NaN
                log.warning("%s: %d of %d values of its destination are not finite", name, bad, out.size)

    def _flat(self, name: str, count: int, *args: Any) -> None:
        """Launch one thread for each of `count` elements."""
        self._launch(name, -(-count // THREADS), *args)

    # -- types --

    def _activation(self, op: str, **arrays: Any) -> None:
        """Check that arrays are of the activation dtype."""
        for what, array in arrays.items():
            check_dtype(op, what, array, self._backend.element)

    def _suffix(self, op: str, what: str, array: Any, ending: str = "_f32") -> str:
        """Return the ending of the entry point for an array of the activation dtype ("") or of float32."""
        check_dtype(op, what, array, self._backend.element, np.float32)
        return "" if array.dtype == self._backend.element else ending
