"""Every op on the GPU: the families of the files beside this one, and choosing tokens."""

from __future__ import annotations

from typing import Any

from metrale.backends.base import ResultRing, RowState, check_shape
from metrale.backends.cuda.checks import at_most_rows, check_dtype, check_logits, check_ring, row_stride
from metrale.backends.cuda.ops_attention import AttentionOps
from metrale.backends.cuda.ops_rows import RowOps, fields_of, histories_of


class ChoosingOps(RowOps):
    """One block of threads a row of logits."""

    def penalize(self, logits: Any, seq: Any, index: Any, state: RowState, counts: Any) -> None:
        """Apply penalties, bias and bans in place."""
        check_logits("penalize", logits, state, seq=seq, index=index)
        check_shape("penalize", "counts", logits.shape, counts.shape)
        check_dtype("penalize", "counts", counts, "int32")
        strides = row_stride("penalize", "logits", logits), row_stride("penalize", "counts", counts)
        lay, words = state.layout, state.words
        bias = (words[lay.bias_ids :], words[lay.bias_values :], words[lay.bias_until :])
        self._begin("penalize", logits, seq, index, state, counts)
        self._launch("penalize", logits.shape[0], logits, counts, seq, index, fields_of(state), *bias, histories_of(state),
                     logits.shape[1], lay.rows, lay.max_tokens, *strides)

    def sample(self, ids: Any, logits: Any, seq: Any, index: Any, state: RowState, scratch: Any) -> None:
        """Choose an id a row by Gumbel-max over filtered logits."""
        check_logits("sample", logits, state, ids=ids, seq=seq, index=index)
        check_shape("sample", "scratch", logits.shape, scratch.shape)
        check_dtype("sample", "scratch", scratch, "float32")
        strides = row_stride("sample", "logits", logits), row_stride("sample", "scratch", scratch)
        self._begin("sample", ids, logits, seq, index, state, scratch)
        self._launch("sample", logits.shape[0], ids, logits, seq, index, fields_of(state), scratch, logits.shape[1],
                     state.layout.rows, *strides)

    def argmax(self, ids: Any, logits: Any) -> None:
        """Choose the largest of each row."""
        check_logits("argmax", logits, None, ids=ids)
        stride = row_stride("argmax", "logits", logits)
        self._begin("argmax", ids, logits)
        self._launch("argmax", logits.shape[0], ids, logits, logits.shape[1], stride)

    def logprobs(self, ring: ResultRing, logits: Any, ids: Any, seq: Any, state: RowState) -> None:
        """Write log-probabilities into the ring's next entry."""
        check_logits("logprobs", logits, state, ids=ids, seq=seq)
        at_most_rows("logprobs", logits.shape[0], state)
        check_ring("logprobs", ring, state)
        stride = row_stride("logprobs", "logits", logits)
        self._begin("logprobs", ring, logits, ids, seq, state)
        self._launch("logprobs", logits.shape[0], ring.logprob, ring.top_ids, ring.top_logprobs, ring.cursor, logits, ids, seq,
                     fields_of(state), logits.shape[1], state.layout.rows, ring.header.shape[0], stride)


class CudaOps(ChoosingOps, AttentionOps):
    """Every primitive; the fused ops are the contract's own compositions."""
