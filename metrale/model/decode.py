"""One sequence, one token: the batch of one, which has its own rung and so its own graph."""

from __future__ import annotations

from metrale.model.batch import DecodeBatch
from metrale.model.plan import TokenResult


class Decode:
    """Decode of a single sequence."""

    def __init__(self, batch: DecodeBatch) -> None:
        """Run through the batch path: one path, one set of kernels, equal bits."""
        self._batch = batch

    def run(self, seq_id: int) -> TokenResult:
        """Advance one sequence by one token."""
        return self._batch.run((seq_id,))[0]
