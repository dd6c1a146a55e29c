"""Graph keys: what a captured step depends on besides device memory. Same key, same program.

A key is (kind, rung, logprobs). Rows, lengths, tables, sampling and penalties are device memory, so they are no part of
it. `logprobs` is: asking for log-probabilities costs a pass over the logits and a copy of them (the copy is penalised, the
original is reported), about 0.4 MB a row at 49,152 tokens, which batches without them should not pay.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple


class GraphKey(NamedTuple):
    """The identity of a captured step."""

    kind: str
    rung: int
    logprobs: bool


class Ladder(NamedTuple):
    """The rungs (padded batch sizes) of a kind of backend: `exact` counts one by one, then `steps`, then multiples.

    On the CPU a padding row costs as much as a real one, so counts are exact to 32; a GPU pads to few rungs because
    a capture costs more there than a padding row.
    """

    exact: int
    steps: tuple[int, ...]
    multiple: int

    def rung(self, rows: int, most: int) -> int:
        """Return the smallest rung that holds `rows`; never above `most`, the widest batch of the model."""
        if rows <= self.exact:
            return rows
        at = bisect.bisect_left(self.steps, rows)
        rung = self.steps[at] if at < len(self.steps) else -(-rows // self.multiple) * self.multiple
        return max(rows, min(rung, most))


CPU_LADDER = Ladder(exact=32, steps=(), multiple=8)
GPU_LADDER = Ladder(exact=1, steps=(2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128), multiple=32)


def ladder_of(backend_name: str) -> Ladder:
    """Return the ladder of a backend: GPUs pad to few rungs, everything else runs exact counts."""
    return GPU_LADDER if backend_name.startswith("cuda") else CPU_LADDER


def decode_key(rows: int, ladder: Ladder, most: int, *, logprobs: bool) -> GraphKey:
    """Return the key of a decode step over `rows` sequences."""
    return GraphKey("decode", ladder.rung(rows, most), logprobs)
