"""Results: the host's end of the ring the device writes sampled tokens to.

A step's result carries a number; the device writes it last, so that number standing in the entry means that the rest is
there. The host learns of a fault from the stream, since a number that never comes would otherwise hang it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from metrale._ext.argmax import RingReader
from metrale.backends.base import MAX_TOP_LOGPROBS, Backend, ResultRing
from metrale.errors import DeviceError
from metrale.model.plan import OUT_OF_ROOM


class Ticket(NamedTuple):
    """A launched step's result: its number, its rows, and how many patches the device had been asked to read by then."""

    number: int
    rows: int
    patches: int


class ResultReader:
    """The result ring of one model."""

    def __init__(self, backend: Backend, depth: int, rows: int) -> None:
        """Allocate pinned memory for `depth` results of `rows` rows."""
        self._backend = backend
        self._header = backend.alloc_pinned((depth, 4), "i32")
        self._ids = backend.alloc_pinned((depth, rows), "i32")
        self._reader = RingReader(self._header, self._ids)
        self._logprob = backend.alloc_pinned((depth, rows), "f32")
        self._top_ids = backend.alloc_pinned((depth, rows, MAX_TOP_LOGPROBS), "i32")
        self._top_logprobs = backend.alloc_pinned((depth, rows, MAX_TOP_LOGPROBS), "f32")
        view = backend.device_view
        self.ring = ResultRing(
            view(self._header),
            view(self._ids),
            view(self._logprob),
            view(self._top_ids),
            view(self._top_logprobs),
            backend.alloc((1,), "i32", zero=True),
        )
        self._depth = depth
        self._next = 1
        self.reset()

    def launched(self, rows: int, patches: int) -> Ticket:
        """Return the ticket of a step that the device has accepted, with the next result number."""
        ticket = Ticket(self._next, rows, patches)
        self._next += 1
        return ticket

    def read(self, ticket: Ticket) -> list[int]:
        """Wait for a result and return its ids, one a step row.

        Raises: DeviceError after a fault, when the stream ends without the result (``result.missing``), or when a row had
        no room (``row.room``).
        """
        if not self._reader.ready(ticket.number):
            # The end of the queue is at or after the end of the step: past it the result is there or will never be.
            self._reader.wait(ticket.number, self._backend.stream.record().query)
        ids, flags = self._reader.read(ticket.number, ticket.rows)
        if flags & OUT_OF_ROOM:
            raise DeviceError(
                "step: expected a K/V block for every row, got a row without room; this is a bug", code="row.room"
            )
        return ids

    def logprobs(self, ticket: Ticket, row: int, k: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Return the chosen token's log-probability and the k best (id, log-probability) of a row that asked for them."""
        entry = ticket.number % self._depth
        top = zip(self._top_ids[entry, row, :k].tolist(), self._top_logprobs[entry, row, :k].tolist(), strict=True)
        return float(self._logprob[entry, row]), tuple(top)

    def reset(self) -> None:
        """Make ring and cursor agree with the host's count again; the device is idle when this is called."""
        self._header[...] = 0
        self._backend.upload(self.ring.cursor, np.array([self._next], np.int32))
