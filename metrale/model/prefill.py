"""Whole prompts: a prompt is its chunks, one after the other."""

from __future__ import annotations

from metrale.errors import RequestError
from metrale.model.chunks import PrefillChunks
from metrale.model.core import Core
from metrale.model.plan import Chunk, TokenResult


class Prefill:
    """Prefill of a whole prompt."""

    def __init__(self, core: Core, chunks: PrefillChunks) -> None:
        """Work on a model's core through its chunks."""
        self._core = core
        self._chunks = chunks

    def run(self, seq_id: int) -> TokenResult:
        """Run all tokens not launched yet. See `ModelForward.prefill`."""
        seq = self._core.find(seq_id)
        while True:
            stop = min(len(seq.tokens), seq.launched + self._core.limits.chunk_tokens)
            result = self._chunks.run(Chunk(seq_id, seq.launched, stop))
            if result is not None:
                return result
            if seq.launched >= len(seq.tokens):
                raise RequestError(f"sequence {seq_id}: expected tokens to prefill, got none; decode it", code="sequence.state")
