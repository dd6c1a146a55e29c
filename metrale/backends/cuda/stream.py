"""Streams and events over CuPy's, and what a capture refuses.

A capture is the driver's own (thread-local mode: other threads stay free to allocate) and keeps the contract's records
beside it. While it is open, an array that CuPy would allocate on this thread raises instead of entering the graph.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from metrale.backends.base import Event, Graph, Record, Stream
from metrale.backends.cuda.driver import device_errors
from metrale.backends.cuda.graph import CudaGraph
from metrale.backends.cuda.ops import CudaOps
from metrale.errors import CaptureError, DeviceError

if TYPE_CHECKING:
    from metrale.backends.cuda.backend import CudaBackend


class CudaStream(Stream):
    """A non-blocking CUDA stream."""

    def __init__(self, backend: CudaBackend) -> None:
        """Create the stream on the backend's device."""
        self.backend = backend
        with device_errors("stream"):
            self.handle: Any = backend.cupy.cuda.Stream(non_blocking=True)
        self.ops = CudaOps(self)
        self._recording: list[Record] | None = None
        self._broken = ""  # what broke the open recording
        self._guard = ExitStack()  # undoes the raising allocator

    # -- capture --

    @property
    def capturing(self) -> bool:
        """Say whether a recording is open."""
        return self._recording is not None

    def begin_capture(self) -> None:
        """Start recording."""
        self.backend.enter("begin_capture")
        if self._recording is not None:
            raise self._break("begin_capture", "nested")
        cuda = self.backend.cupy.cuda
        with device_errors("begin_capture"):
            self.handle.begin_capture(cuda.runtime.streamCaptureModeThreadLocal)
        self._recording, self._broken = [], ""
        self._guard.enter_context(cuda.using_allocator(self._allocate))

    def end_capture(self) -> Graph:
        """Stop recording and return the graph."""
        self.backend.enter("end_capture")
        if self._recording is None:
            raise CaptureError("end_capture: expected an open capture, got none; call begin_capture first", code="capture.none")
        recording, broken = self._recording, self._broken
        if broken:
            self.abort_capture()
            raise CaptureError(
                f"end_capture: expected a recording of ops alone, got {broken} inside it; move it out of the capture",
                code="capture.broken",
            )
        self._leave()
        try:
            executable = self.handle.end_capture()
        except RuntimeError as error:
            raise CaptureError(
                f"end_capture: expected the driver to instantiate the recording, got: {error}; run the step eagerly",
                code="capture.broken",
            ) from error
        return CudaGraph(self, executable, recording)

    def abort_capture(self) -> None:
        """Discard an open recording."""
        if self._recording is None:
            return
        self._leave()
        runtime = self.backend.cupy.cuda.runtime
        try:
            graph = runtime.streamEndCapture(self.handle.ptr)
        except RuntimeError:
            return  # the driver had given the recording up; the stream has left it all the same
        if graph:
            runtime.graphDestroy(graph)

    def _leave(self) -> None:
        self._recording = None
        self._guard.close()

    def note(self, record: Record) -> None:
        """Add an op to the open recording, if there is one."""
        if self._recording is not None:
            self._recording.append(record)

    def refuse(self, what: str, code: str) -> None:
        """Raise CaptureError if a recording is open, which is broken from then on."""
        if self._recording is not None:
            raise self._break(what, code)

    def _allocate(self, nbytes: int) -> Any:
        """Stand in for CuPy's allocator."""
        raise self._break(f"an array of {nbytes} bytes", "alloc")

    def _break(self, what: str, code: str) -> CaptureError:
        self._broken = what
        return CaptureError(
            f"{what}: expected no open capture, got one; a replay could not repeat it, move it out of the capture",
            code=f"capture.{code}",
        )

    # -- events --

    def record(self) -> Event:
        """Return an event at the current end of the queue."""
        self.backend.enter("record")
        self.refuse("record", "event")
        with device_errors("record"):
            event = self.backend.cupy.cuda.Event(disable_timing=True)
            event.record(self.handle)
        return CudaEvent(self.backend, event)

    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for `event`."""
        self.backend.enter("wait")
        self.refuse("wait", "event")
        if not isinstance(event, CudaEvent):
            raise DeviceError(
                f"wait: expected an event of this backend, got {type(event).__name__}; record it on a stream of it",
                code="op.dtype",
            )
        with device_errors("wait"):
            self.handle.wait_event(event.handle)

    def synchronize(self) -> None:
        """Wait on the host until the queue is empty."""
        self.backend.enter("synchronize")
        self.backend.refuse_in_capture("synchronize", "sync")
        with device_errors("synchronize"):
            self.handle.synchronize()


class CudaEvent(Event):
    """A CUDA event."""

    def __init__(self, backend: CudaBackend, handle: Any) -> None:
        """Hold a recorded event of CuPy."""
        self._backend = backend
        self.handle = handle

    def query(self) -> bool:
        """Say whether the point has been passed."""
        self._backend.enter("query")
        with device_errors("query"):
            return bool(self.handle.done)

    def synchronize(self) -> None:
        """Wait on the host until the point has been passed."""
        self._backend.enter("synchronize")
        self._backend.refuse_in_capture("synchronize", "sync")
        with device_errors("synchronize"):
            self.handle.synchronize()
