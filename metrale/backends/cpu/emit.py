"""The one way from an op's Python method to its kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from metrale.backends.base import Comm

if TYPE_CHECKING:
    from metrale.backends.cpu.backend import CpuBackend
    from metrale.backends.cpu.stream import CpuStream


class Emitter:
    """Base of the op mixins: `emit` runs, queues or records one native op of a stream."""

    def __init__(self, stream: CpuStream) -> None:
        """Emit to `stream`."""
        self.stream = stream
        self.backend: CpuBackend = stream.backend
        self.comm: Comm = stream.backend.comm

    def emit(self, name: str, fn: int, tiles: int, args: tuple[Any, ...], buffers: tuple[Any, ...] = (), **params: Any) -> None:
        """Run, queue or record kernel `fn` in `tiles` tiles.

        args: what the kernel's words are made of: NumPy arrays with contiguous rows (only the first axis may have a
        stride of its own), ints, floats (bits of a double), None (0). buffers: what the record names, destination first
        (default: the arrays among `args`); params: its frozen numbers. Everything named is kept alive as long as it can run.

        Raises: CaptureError (``capture.address``) inside a capture for memory that is not the backend's;
                DeviceError ``op.args``, ``op.layout``, ``device.kernel``, ``device.closed``.
        """
        stream = self.stream
        if stream.direct:  # eager, nothing to record, watch or log: 0.6 us with six arrays
            stream.team.call(fn, args, tiles, name)
        else:
            stream.submit(name, fn, tiles, args, buffers, params)
