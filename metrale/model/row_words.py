"""A sequence's words in the row state: what the device knows of it, staged from what the host knows.

A sequence is *clean* when its words on the device follow from the host's: then only appended blocks are staged. Any
failure makes every sequence unclean, and the next step stages all of its words again, so that the host stays the one
place where truth lives.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from metrale.backends.base import BLOCK_TOKENS, Backend, RowState
from metrale.model.sampler import field_words, float_bits
from metrale.model.sequence import Sequence
from metrale.model.staging import PatchStaging


class RowWords:
    """Stage words of sequences into patches, and histories by upload."""

    def __init__(self, backend: Backend, state: RowState, patches: PatchStaging) -> None:
        """Write to `state` through `patches`."""
        self._backend = backend
        self._state = state
        self._patches = patches
        self._order: list[int] = [-1] * state.layout.rows
        self._order_known = False

    def stage(self, seq: Sequence) -> None:
        """Stage what the device lacks of a sequence's words. `accepted` says later that it has arrived."""
        if not seq.clean:
            self._stage_all(seq)
            return
        lay, row = self._state.layout, seq.row
        grown = False
        for group, table in enumerate(seq.tables):
            known = seq.staged[group]
            if len(table) > known:
                self._patches.put_words(lay.table(group, row, known), table.blocks[known:])
                grown = True
        if grown:
            self._patches.put(lay.field(row, "limit"), self.limit(seq))

    def stage_order(self, rows: Items[int], rung: int) -> None:
        """Stage the order words in which a decode batch of `rung` rows differs from the last one."""
        wanted = [*rows, *[-1] * (rung - len(rows))]
        if self._order_known:
            if self._order[:rung] == wanted:
                return
            for at, row in enumerate(wanted):
                if self._order[at] != row:
                    self._patches.put(at, row)
        else:
            wanted += [-1] * (len(self._order) - rung)
            self._patches.put_words(0, wanted)
        self._order[: len(wanted)] = wanted
        self._order_known = True

    def accepted(self, seq: Sequence) -> None:
        """Note that a sequence's staged words have been accepted by the device."""
        seq.clean = True
        for group, table in enumerate(seq.tables):
            seq.staged[group] = len(table)

    def forget_order(self) -> None:
        """Stop assuming what the device's order words are."""
        self._order_known = False

    def _stage_all(self, seq: Sequence) -> None:
        lay, row, sampling = self._state.layout, seq.row, seq.sampling
        token = seq.tokens[seq.launched] if seq.launched < len(seq.tokens) else 0
        words = field_words(sampling, token=token, index=seq.launched, limit=self.limit(seq), prompt_len=seq.prompt_len)
        put = self._patches.put_words
        put(lay.field(row, "token"), words)
        if sampling.bias:
            width = (lay.bias_values - lay.bias_ids) // lay.rows
            put(lay.bias_ids + row * width, [b.token for b in sampling.bias])
            put(lay.bias_values + row * width, [float_bits(b.value) for b in sampling.bias])
            put(lay.bias_until + row * width, [b.until for b in sampling.bias])
        for group, table in enumerate(seq.tables):
            put(lay.table(group, row), table.blocks)
        if seq.launched:
            start = lay.history + row * lay.max_tokens
            self._backend.upload(
                self._state.words[start : start + seq.launched], np.array(seq.tokens[: seq.launched], np.int32)
            )

    def limit(self, seq: Sequence) -> int:
        """Return the tokens that a sequence's reserved blocks can hold, never more than the context."""
        return min(min(len(table) for table in seq.tables) * BLOCK_TOKENS, self._state.layout.max_tokens)
