"""Streams, events and graphs of the reference backend.

A stream runs its work at once; a *deferred* one queues it and runs it as late as allowed: when the host synchronises,
downloads or asks for an event, or when another stream reaches a wait for one of its events. A missing event edge, or
pinned memory rewritten too early, then shows as a wrong number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from metrale.backends.base import Event, Graph, Program, Record, Stream
from metrale.backends.reference.ops import ReferenceOps
from metrale.errors import CaptureError, DeviceError

if TYPE_CHECKING:
    from metrale.backends.reference.backend import ReferenceBackend

Work = Callable[[], None]


class ReferenceStream(Stream):
    """An ordered queue of closures."""

    def __init__(self, backend: ReferenceBackend, *, deferred: bool) -> None:
        self.backend = backend
        self.deferred = deferred
        self.ops = ReferenceOps(self)
        self.queued = 0  # pieces of work ever queued
        self.done = 0  # and run
        self._queue: deque[Work] = deque()
        self._recording: list[tuple[Record, Work]] | None = None
        self._broken = ""  # what broke the open recording

    # -- work --

    def submit(self, record: Record, work: Work) -> None:
        """Record an op, or queue it."""
        self.backend.enter(record.op)
        if self._recording is not None:
            self._recording.append((record, work))
        else:
            self.enqueue(work)

    def enqueue(self, work: Work) -> None:
        """Queue one piece of work; run it now unless the stream is deferred."""
        self._queue.append(work)
        self.queued += 1
        if not self.deferred:
            self.run_to(self.queued)

    def run_to(self, ticket: int) -> None:
        """Run queued work until `ticket` pieces have run. After a failure the rest of the queue is dropped."""
        while self.done < ticket:
            work = self._queue.popleft()
            self.done += 1
            try:
                work()
            except BaseException:
                self._queue.clear()
                self.done = self.queued
                raise

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
        self._recording, self._broken = [], ""

    def end_capture(self) -> Graph:
        """Stop recording and return the graph."""
        self.backend.enter("end_capture")
        if self._recording is None:
            raise CaptureError("end_capture: expected an open capture, got none; call begin_capture first", code="capture.none")
        recording, self._recording = self._recording, None
        if self._broken:
            raise CaptureError(
                f"end_capture: expected a recording of ops alone, got {self._broken} inside it; move it out of the capture",
                code="capture.broken",
            )
        return ReferenceGraph(self, recording)

    def abort_capture(self) -> None:
        """Discard an open recording."""
        self._recording = None

    def refuse(self, what: str, code: str) -> None:
        """Raise CaptureError if a recording is open, which is broken from then on."""
        if self._recording is not None:
            raise self._break(what, code)

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
        return ReferenceEvent(self, self.queued)

    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for `event`."""
        self.backend.enter("wait")
        self.refuse("wait", "event")
        if not isinstance(event, ReferenceEvent):
            raise DeviceError(f"wait: expected an event of this backend, got {type(event).__name__}", code="op.dtype")
        self.enqueue(partial(event.stream.run_to, event.ticket))

    def synchronize(self) -> None:
        """Run everything that is queued."""
        self.backend.enter("synchronize")
        self.backend.refuse_in_capture("synchronize", "sync")
        self.run_to(self.queued)


class ReferenceEvent(Event):
    """The end of the first `ticket` pieces of a stream's work."""

    def __init__(self, stream: ReferenceStream, ticket: int) -> None:
        self.stream = stream
        self.ticket = ticket

    def query(self) -> bool:
        """Run the stream up to the event; so it has always been passed."""
        self.stream.backend.enter("query")
        self.stream.run_to(self.ticket)
        return True

    def synchronize(self) -> None:
        """Run the stream up to the event."""
        self.stream.backend.enter("synchronize")
        self.stream.backend.refuse_in_capture("synchronize", "sync")
        self.stream.run_to(self.ticket)


class ReferenceGraph(Graph):
    """The recorded closures; they hold their buffers."""

    def __init__(self, stream: ReferenceStream, recording: list[tuple[Record, Work]]) -> None:
        self._stream = stream
        self._work: tuple[Work, ...] | None = tuple(work for _, work in recording)
        self._program = Program(tuple(record for record, _ in recording))

    @property
    def program(self) -> Program:
        """Return what was recorded; empty after `destroy`."""
        return self._program

    def launch(self) -> None:
        """Queue the recorded work on its stream."""
        self._stream.backend.enter("launch")
        if self._work is None:
            raise DeviceError("launch: expected a live graph, got a destroyed one; capture the step again", code="device.graph")
        self._stream.refuse("launch", "launch")
        for work in self._work:
            self._stream.enqueue(work)

    def destroy(self) -> None:
        """Release the recording and its buffers."""
        self._work = None
        self._program = Program(())
