"""Streams and events of the CPU backend.

An eager stream runs each op when it is emitted; its events have always passed. A *deferred* stream (METRALE_STREAMS=deferred,
for tests) queues everything and runs it as late as a correct program allows: when the host synchronises, downloads or
waits for an event, or when another stream whose turn it is waits for one of its events. So a missing event edge, pinned memory
rewritten too early, or a host read without a wait shows as a wrong number, every time. Work that nobody waits for
never runs. `Event.query` answers no `QUERIES_BEFORE_RUN` times and then runs the stream, so that a loop that polls ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from metrale._ext.program import Program, Team
from metrale.backends.base import Event, Graph, Record, Stream
from metrale.backends.cpu import trace
from metrale.backends.cpu.graph import CpuGraph
from metrale.errors import CaptureError, DeviceError

if TYPE_CHECKING:
    from metrale.backends.base import Ops
    from metrale.backends.cpu.backend import CpuBackend

QUERIES_BEFORE_RUN = 3  # polls that a deferred event answers with "not yet"


class _Recording:
    """An open capture."""

    def __init__(self) -> None:
        self.ops = Program()
        self.records: list[Record] = []
        self.broken = ""  # what broke it


class CpuStream(Stream):
    """An ordered queue of native ops; all streams of a backend share its thread team."""

    def __init__(self, backend: CpuBackend, *, deferred: bool, trace_level: int, name: str) -> None:
        """Open a stream; made by the backend."""
        self.backend = backend
        self.team: Team = backend.team
        self.deferred = deferred
        self.name = name
        self.queued = 0  # pieces of work ever queued
        self.done = 0  # and run or dropped
        self._trace = trace_level
        self._recording: _Recording | None = None
        self._queue: deque[tuple[Callable[[], None], Callable[[], None] | None]] = deque()
        self._ops: Ops | None = None
        # Dropped work, as (first, last ticket, error): events among it have failed.
        self._dropped: list[tuple[int, int, BaseException]] = []
        self.direct = False
        self.choose_path()

    @property
    def ops(self) -> Ops:  # type: ignore[override]
        """Return the ops that run here."""
        if self._ops is None:
            from metrale.backends.cpu.ops import CpuOps  # kernels are found and compiled from here on

            self._ops = CpuOps(self)
        return self._ops

    def choose_path(self) -> None:
        """Note whether an op may go straight to the team; called when anything that matters for it changes."""
        plain = not self.deferred and not self._trace and self._recording is None
        self.direct = plain and self.backend.fault is None and self.backend.comm.size == 1

    # -- work --

    def submit(self, name: str, fn: int, tiles: int, args: tuple[Any, ...], buffers: tuple[Any, ...],
               params: dict[str, Any]) -> None:
        """Take an op the long way: record it, queue it, or run it watched."""
        recording = self._recording
        if recording is not None:
            try:
                self.backend.enter(name)
                recording.ops.append(fn, args, tiles, name, self.backend.arena)
            except BaseException:
                recording.broken = recording.broken or name  # a replay would lack this op
                raise
            named = buffers or tuple(arg for arg in args if isinstance(arg, np.ndarray))
            recording.records.append(Record(name, named, params))
            return
        self.backend.enter(name)
        op = Program()  # checks and freezes the arguments now, whenever it runs
        op.append(fn, args, tiles, name)
        self.enqueue(lambda: self.execute(op))
        if self._trace >= 2:
            self.run_to(self.queued)

    def enqueue(self, work: Callable[[], None], landed: Callable[[], None] | None = None) -> None:
        """Queue one piece of work, or run it now on an eager stream; `landed` is called when it has run or was dropped."""
        self._queue.append((work, landed))
        self.queued += 1
        if not self.deferred:
            self.run_to(self.queued)

    def run_to(self, ticket: int) -> None:
        """Run queued work until `ticket` pieces are done. After a failure the rest is dropped, and its events have failed."""
        while self.done < ticket:
            work, landed = self._queue.popleft()
            self.done += 1
            try:
                work()
            except BaseException as error:
                self._drop(error)
                raise
            finally:
                if landed is not None:
                    landed()

    def _drop(self, error: BaseException) -> None:
        """Drop what is queued behind a failed piece of work."""
        self._dropped.append((self.done, self.queued, error))
        self._dropped = self._dropped[-64:]
        self.done = self.queued
        while self._queue:
            _, landed = self._queue.popleft()
            if landed is not None:
                landed()

    def fault_at(self, ticket: int) -> BaseException | None:
        """Return the error that kept the first `ticket` pieces of work from running, if one did."""
        return next((error for first, last, error in self._dropped if first <= ticket <= last), None)

    def execute(self, ops: Program) -> None:
        """Run a program on the team. A failure tells the other ranks, which would wait for this one in a collective."""
        try:
            if not self._trace:
                self.team.run(ops)
                return
            for i in range(len(ops)):
                name, _, tiles, _ = ops.op(i)
                args = ops.kept_args(i)
                trace.log_op(self.name, name, tiles, args)
                self.team.run(ops, i, i + 1)
                if self._trace >= 3:
                    trace.log_finite(name, args)
        except BaseException:
            self.backend.abort_comm()
            raise

    # -- capture --

    @property
    def capturing(self) -> bool:
        """Say whether a recording is open."""
        return self._recording is not None

    def begin_capture(self) -> None:
        """Start recording."""
        self.backend.enter("begin_capture")
        self.refuse("begin_capture", "nested")
        self._recording = _Recording()
        self.backend.recording.add(self)
        self.choose_path()

    def end_capture(self) -> Graph:
        """Stop recording and return the graph."""
        self.backend.enter("end_capture")
        recording = self._recording
        if recording is None:
            raise CaptureError("end_capture: expected an open capture, got none; call begin_capture first", code="capture.none")
        self.abort_capture()
        if recording.broken:
            raise CaptureError(f"end_capture: expected a recording of ops alone, got a failed {recording.broken} inside it; "
                               "move it out of the capture", code="capture.broken")
        return CpuGraph(self, recording.ops, tuple(recording.records))

    def abort_capture(self) -> None:
        """Discard an open recording."""
        self._recording = None
        self.backend.recording.discard(self)
        self.choose_path()

    def refuse(self, what: str, code: str) -> None:
        """Raise CaptureError (``capture.<code>``) if this stream records; the recording is broken from then on."""
        if self._recording is not None:
            self._recording.broken = self._recording.broken or what
            raise CaptureError(f"{what}: expected no open capture, got one; a replay could not repeat it, move it out of the "
                               "capture", code=f"capture.{code}")

    # -- events --

    def record(self) -> Event:
        """Return an event at the current end of the queue."""
        self.backend.enter("record")
        self.refuse("record", "event")
        return CpuEvent(self, self.queued)

    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for `event`."""
        self.backend.enter("wait")
        self.refuse("wait", "event")
        if not isinstance(event, CpuEvent):
            raise DeviceError(f"wait: expected an event of a CPU stream, got {type(event).__name__}; streams of two devices "
                              "meet on the host", code="op.dtype")
        self.enqueue(event.reach)

    def synchronize(self) -> None:
        """Run everything that is queued."""
        self.backend.enter("synchronize")
        self.backend.refuse_in_capture("synchronize", "sync")
        self.run_to(self.queued)


class CpuEvent(Event):
    """The end of the first `ticket` pieces of a stream's work."""

    def __init__(self, stream: CpuStream, ticket: int) -> None:
        """Mark a point; made by `CpuStream.record`."""
        self._stream = stream
        self._ticket = ticket
        self._queries = 0

    def reach(self) -> None:
        """Run the stream up to this point. Raises the error that kept it from getting here."""
        error = self._stream.fault_at(self._ticket)
        if error is not None:
            raise DeviceError(f"event: expected the work before it to run, but it failed: {error}; see the first error",
                              code="device.fault") from error
        self._stream.run_to(self._ticket)

    def query(self) -> bool:
        """Say whether the point has been passed; see the module's text for deferred streams."""
        self._stream.backend.enter("query")
        if self._stream.done < self._ticket:
            self._queries += 1
            if self._queries <= QUERIES_BEFORE_RUN:
                return False
        self.reach()
        return True

    def synchronize(self) -> None:
        """Run the stream up to this point."""
        self._stream.backend.enter("synchronize")
        self._stream.backend.refuse_in_capture("synchronize", "sync")
        self.reach()
