"""Moving sequences to other rows, so that the live ones lie together."""

from __future__ import annotations

from collections.abc import Callable

from metrale.errors import CapacityError, RequestError
from metrale.model.core import Core


class Compact:
    """Row moves. No graph depends on rows, so none is dropped; a moved sequence's words are staged afresh."""

    def __init__(self, core: Core, settle: Callable[[], None]) -> None:
        """Work on a model's core."""
        self._core = core
        self._settle = settle

    def move(self, seq_id: int, row: int) -> None:
        """Move a sequence to a free row. See `ModelLifecycle.compact_sequence`."""
        seq = self._core.find(seq_id)
        if seq.row == row:
            return
        self._settle()
        try:
            guard = self._core.rows.claim(row)
        except CapacityError:
            raise RequestError(
                f"compact: expected a free row below {self._core.limits.rows}, got row {row}; retire its sequence first",
                code="sequence.row",
            ) from None
        # Nothing is in flight, so the old row is idle; the new one is owned before the old one is given up.
        old, seq.guard = seq.guard, guard
        seq.clean = False
        if old is not None:
            old.release()

    def pack(self) -> None:
        """Move the sequences with the highest rows to the lowest free ones, until rows 0 .. n - 1 are those in use."""
        owners = {seq.row: seq.seq_id for seq in self._core.sequences.values() if seq.guard is not None}
        holes = [row for row in range(len(owners)) if row not in owners]
        for hole, row in zip(holes, sorted((r for r in owners if r >= len(owners)), reverse=True), strict=True):
            self.move(owners[row], hole)
