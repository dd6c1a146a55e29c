"""Logits on the host: of the last step, and at every token of a text."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from metrale.model.chunks import PrefillChunks
from metrale.model.core import Core
from metrale.model.lifecycle import Lifecycle
from metrale.model.logits import row_logits
from metrale.model.plan import Chunk, RowSampling, SequenceSpec

PRIVATE_ID = -1  # of the sequence that scoring and diagnosis run; the engine's ids are not negative


class Scoring:
    """Looking at logits."""

    def __init__(self, core: Core, lifecycle: Lifecycle, chunks: PrefillChunks) -> None:
        """Work on a model's core."""
        self._core = core
        self._lifecycle = lifecycle
        self._chunks = chunks

    def of_step(self) -> Any:
        """Return the logits of the last step that sampled. See `ModelLogits.step_logits`."""
        return self._core.backend.download(self._core.logits[: self._core.sampled_rows])

    def score(self, tokens: Items[int]) -> Any:
        """Return the logits at each token. See `ModelLogits.score`."""
        core, found = self._core, []
        seq = self._lifecycle.alloc(SequenceSpec(PRIVATE_ID, tuple(tokens), len(tokens), RowSampling()))
        try:
            core.recover()
            for start in range(0, len(tokens), core.limits.chunk_tokens):
                chunk = Chunk(PRIVATE_ID, start, min(len(tokens), start + core.limits.chunk_tokens))
                core.make_room(seq, chunk.start, chunk.stop)
                with core.step([seq]):
                    _, hidden = self._chunks.forward(seq, chunk)
                    found += list(row_logits(core, hidden))
                    seq.launched = chunk.stop
        finally:
            self._lifecycle.free(PRIVATE_ID)
        core.sampled_rows = 0
        return np.concatenate(found)
