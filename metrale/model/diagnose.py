"""Finding out what went wrong: counters, the best tokens of a step, and the layer where a run first goes bad."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from metrale.dtypes import bf16_to_f32
from metrale.model.chunks import PrefillChunks
from metrale.model.core import Core
from metrale.model.lifecycle import Lifecycle
from metrale.model.plan import Chunk, RowSampling, SequenceSpec
from metrale.model.protocols import ModelStats
from metrale.model.scoring import PRIVATE_ID


class Diagnose:
    """Questions about an open model; none is on a serving path."""

    def __init__(self, core: Core, lifecycle: Lifecycle, chunks: PrefillChunks) -> None:
        """Look at a model's core."""
        self._core = core
        self._lifecycle = lifecycle
        self._chunks = chunks

    @property
    def stats(self) -> ModelStats:
        """Return the counters and the present use of blocks and rows."""
        core, pool, n = self._core, self._core.pool.stats, self._core.counters
        return ModelStats(
            n.decode_steps,
            n.prefill_chunks,
            core.graphs.captures,
            core.graphs.replays,
            n.eager_steps,
            len(core.graphs),
            pool.free,
            core.rows.free,
            pool.peak,
            n.failed_steps,
        )

    def top_tokens(self, row: int, k: int) -> tuple[tuple[int, float], ...]:
        """Return the k best (token, logit) of a row of the last step; NaN counts as -inf, ties go to the lower id."""
        logits = self._core.backend.download(self._core.logits[row])
        values = np.where(np.isnan(logits), -np.inf, logits)
        return tuple((int(i), float(values[i])) for i in np.argsort(-values, kind="stable")[:k])

    def locate_fault(self, tokens: Items[int]) -> str | None:
        """Run tokens (as many as one chunk holds) with a look after every layer. See `ModelDiagnosis.locate_fault`."""
        core = self._core
        used = tuple(tokens[: core.limits.chunk_tokens])
        seq = self._lifecycle.alloc(SequenceSpec(PRIVATE_ID, used, len(used), RowSampling()))
        try:
            core.recover()
            core.make_room(seq, 0, len(used))
            with core.step([seq]):
                return self._walk(self._chunks.stage(seq, Chunk(PRIVATE_ID, 0, len(used))))
        finally:
            self._lifecycle.free(PRIVATE_ID)

    def _walk(self, batch: Any) -> str | None:
        """Run the stack layer by layer; return the first bad place."""
        core, ops = self._core, self._core.ops
        stack, views = core.net.stack, core.net.buffers.at(int(batch.ids.shape[0]))
        stack.embedding.forward(ops, views.residual, batch.ids)
        bad = self._look("embedding", views.residual)
        for i, (block, table, pages) in enumerate(zip(stack.blocks, core.net.tables, core.net.kv, strict=True)):
            if bad is not None:
                return bad
            block.forward(ops, views, batch, table, pages)
            bad = self._look(f"layer {i}", views.residual)
        if bad is None:
            core.net.head(ops, core.logits[:1], views.residual[:1])
            bad = self._look("head", core.logits[:1])
        return bad

    def _look(self, place: str, array: Any) -> str | None:
        """Return what is wrong after a place: values that are not finite, or guard bands that were written."""
        host = self._core.backend.download(array)
        values = bf16_to_f32(host) if host.dtype == np.uint16 else host
        wrong = np.argwhere(~np.isfinite(values))
        if len(wrong):
            row, column = (int(i) for i in wrong[0])
            return f"{place}: {len(wrong)} of {values.size} values are not finite, the first in row {row}, column {column}"
        broken = self._core.broken_guards()
        return f"{place}: guard bands were written: {', '.join(broken)}" if broken else None
