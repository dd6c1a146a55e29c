"""A captured step on the CPU: the native program, the contract's records, and the buffers they name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metrale._ext import program as native
from metrale.backends.base import Graph, Program, Record
from metrale.errors import DeviceError

if TYPE_CHECKING:
    from metrale.backends.cpu.stream import CpuStream


class CpuGraph(Graph):
    """Replays a program on the stream it was captured on."""

    def __init__(self, stream: CpuStream, ops: native.Program, records: tuple[Record, ...]) -> None:
        """Hold what was captured; made by `CpuStream.end_capture`."""
        self._stream = stream
        self._ops: native.Program | None = ops
        self._records = records
        self._in_flight = 0

    @property
    def ops(self) -> native.Program:
        """Return the native program: two captures of one key have equal ops, byte for byte.

        Raises: DeviceError (``device.graph``) after `destroy`.
        """
        if self._ops is None:
            raise DeviceError("graph: expected a live graph, got a destroyed one; capture the step again", code="device.graph")
        return self._ops

    @property
    def program(self) -> Program:
        """Return what was recorded; empty after `destroy`."""
        return Program(self._records)

    def launch(self) -> None:
        """Run the program, or queue it on a deferred stream."""
        stream = self._stream
        stream.backend.enter("launch")
        ops = self.ops
        stream.refuse("launch", "launch")
        if not stream.deferred:
            stream.execute(ops)
            return
        self._in_flight += 1
        stream.enqueue(lambda: stream.execute(ops), self._landed)

    def _landed(self) -> None:
        self._in_flight -= 1

    def destroy(self) -> None:
        """Release the program and its buffers; harmless twice.

        Raises: DeviceError (``device.graph``) while a launch is queued.
        """
        if self._in_flight:
            raise DeviceError("graph: expected no launch in flight at its destruction, got "
                              f"{self._in_flight}; wait for the stream first", code="device.graph")
        self._ops = None
        self._records = ()
