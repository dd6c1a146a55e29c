"""Choosing tokens on the CPU: penalties, sampling, argmax, log-probabilities. A tile is a row."""

from __future__ import annotations

from typing import Any

from metrale.backends.base import MAX_BIAS, ROW_FIELDS, ResultRing, RowState, check_shape
from metrale.backends.cpu import jit
from metrale.backends.cpu.checks import check_dtype, check_ring, check_rows, check_state, stride
from metrale.backends.cpu.emit import Emitter

FIELDS = len(ROW_FIELDS)


def _logits(op: str, logits: Any, **rows: Any) -> tuple[int, int]:
    """Check float32 logits (T, V) and (T,) arrays beside them; return T and V."""
    check_shape(op, "logits", (None, None), logits.shape)
    check_dtype(op, "float32", logits=logits)
    check_rows(op, int(logits.shape[0]), **rows)
    return int(logits.shape[0]), int(logits.shape[1])


class SampleOps(Emitter):
    """Ops over float32 logits."""

    def penalize(self, logits: Any, seq: Any, index: Any, state: RowState, counts: Any) -> None:
        """Apply the rows' penalties in place."""
        rows, vocab = _logits("penalize", logits, seq=seq, index=index)
        check_state("penalize", state)
        check_shape("penalize", "counts", logits.shape, counts.shape)
        check_dtype("penalize", "int32", counts=counts)
        lay = state.layout
        args = (logits, stride(logits), counts, stride(counts), seq, index, rows, vocab, state.words, lay.fields, FIELDS,
                lay.bias_ids, lay.bias_values, lay.bias_until, MAX_BIAS, lay.history, lay.max_tokens)
        self.emit("penalize", jit.address("penalize"), rows, args, (logits, seq, index, state.words, counts))

    def sample(self, ids: Any, logits: Any, seq: Any, index: Any, state: RowState, scratch: Any) -> None:
        """Choose an id a row."""
        rows, vocab = _logits("sample", logits, ids=ids, seq=seq, index=index)
        check_state("sample", state)
        check_shape("sample", "scratch", logits.shape, scratch.shape)
        check_dtype("sample", "float32", scratch=scratch)
        fields = state.layout.fields
        args = (ids, logits, stride(logits), scratch, stride(scratch), seq, index, rows, vocab, state.words, fields, FIELDS)
        self.emit("sample", jit.address("sample"), rows, args, (ids, logits, seq, index, state.words, scratch))

    def argmax(self, ids: Any, logits: Any) -> None:
        """Choose the largest of each row."""
        rows, vocab = _logits("argmax", logits, ids=ids)
        self.emit("argmax", jit.address("argmax"), rows, (ids, logits, stride(logits), rows, vocab), (ids, logits))

    def logprobs(self, ring: ResultRing, logits: Any, ids: Any, seq: Any, state: RowState) -> None:
        """Write log-probabilities into the ring's next entry."""
        rows, vocab = _logits("logprobs", logits, ids=ids, seq=seq)
        check_state("logprobs", state, rows)
        check_ring("logprobs", ring, state)
        lay = state.layout
        args = (logits, stride(logits), ids, seq, rows, vocab, state.words, lay.fields, FIELDS, ring.cursor,
                int(ring.header.shape[0]), lay.rows, ring.logprob, ring.top_ids, ring.top_logprobs)
        buffers = (ring.logprob, ring.top_ids, ring.top_logprobs, ring.cursor, logits, ids, seq, state.words)
        self.emit("logprobs", jit.address("logprobs"), rows, args, buffers)
