"""A captured step on the GPU: the driver's executable graph, the contract's records, and the buffers they name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from metrale.backends.base import Graph, Program, Record
from metrale.backends.cuda.driver import device_errors
from metrale.errors import DeviceError

if TYPE_CHECKING:
    from metrale.backends.cuda.stream import CudaStream


class CudaGraph(Graph):
    """Replays a recording on the stream it was captured on."""

    def __init__(self, stream: CudaStream, executable: Any, records: Sequence[Record]) -> None:
        """Hold what was captured; the records keep its buffers alive."""
        self._stream = stream
        self._executable = executable
        self._program = Program(tuple(records))

    @property
    def program(self) -> Program:
        """Return what was recorded; empty after `destroy`."""
        return self._program

    def launch(self) -> None:
        """Queue the step."""
        self._stream.backend.enter("launch")
        if self._executable is None:
            raise DeviceError("launch: expected a live graph, got a destroyed one; capture the step again", code="device.graph")
        self._stream.refuse("launch", "launch")
        if self._program.records:
            with device_errors("launch"):
                self._executable.launch(stream=self._stream.handle)

    def destroy(self) -> None:
        """Release the graph and its buffers."""
        self._executable = None
        self._program = Program(())
