"""Room for tokens: reserving blocks, giving back those that left a window, and preparing fresh ones on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from metrale.backends.base import BLOCK_TOKENS, Backend, KVLayer
from metrale.cache.blocks import BlockPool
from metrale.cache.groups import CachePlan
from metrale.errors import CapacityError
from metrale.model.sequence import Sequence
from metrale.model.staging import PatchStaging

BLOCK_LIST = 64  # blocks named by one kv_zero or kv_copy


class Room:
    """Blocks of sequences, over all groups."""

    def __init__(self, backend: Backend, plan: CachePlan, pool: BlockPool, arrays: Items[KVLayer], *, poison: bool) -> None:
        """Serve blocks of `pool` whose pages lie in `arrays`. poison: fill fresh blocks with NaN instead of zeros."""
        self._backend = backend
        self._plan = plan
        self._pool = pool
        self._arrays = arrays
        self._poison = poison
        self._lists = backend.alloc((2, BLOCK_LIST), "i32", zero=True)

    def reserve(self, seq: Sequence, tokens: int, context: int) -> None:
        """Make sure that a sequence has blocks for its first `tokens` tokens in every group: for all of them or none.

        Raises: CapacityError ``capacity.context`` beyond the context, ``capacity.blocks`` when too few are free.
        """
        if tokens > context:
            raise CapacityError(
                f"sequence {seq.seq_id}: expected at most {context} tokens of context, got {tokens}; end it, or open "
                "the model with a larger max_context",
                code="capacity.context",
            )
        need = -(-tokens // BLOCK_TOKENS)
        missing = [max(0, need - len(table)) for table in seq.tables]
        blocks = self._pool.alloc(sum(missing))
        for table, count in zip(seq.tables, missing, strict=True):
            table.extend(blocks[:count])
            del blocks[:count]
        seq.reserved = min(need * BLOCK_TOKENS, context)

    def slide(self, seq: Sequence, index: int, patches: PatchStaging, table_offset: Any) -> None:
        """Release the blocks that no row at `index` or later sees; later work of the stream may reuse them.

        table_offset(group, row, block) is the word of a table's entry: released entries name the dummy block.
        """
        for group, table in enumerate(seq.tables):
            for logical in table.slide(self._plan.first_block(group, index, BLOCK_TOKENS)):
                if seq.clean and logical < seq.staged[group]:
                    patches.put(table_offset(group, seq.row, logical), 0)

    def prepare_fresh(self) -> None:
        """Ask the device to zero (or poison) the blocks handed out since the last call, before any step sees them."""
        if not self._pool.has_fresh:
            return
        blocks = self._pool.fresh
        if self._poison:
            for block in blocks:
                self._fill_nan(block)
        else:
            for part in self._parts(blocks):
                self._backend.upload(self._lists[0], part)
                for array in self._arrays:
                    self._backend.stream.ops.kv_zero(array, self._lists[0])
        self._pool.mark_zeroed(blocks)

    def copy(self, pairs: Items[tuple[int, int, int]]) -> None:
        """Copy blocks: (group, source, destination) each, in the arrays of the group."""
        for group in sorted({g for g, _, _ in pairs}):
            mine = [(src, dst) for g, src, dst in pairs if g == group]
            for src, dst in zip(self._parts([s for s, _ in mine]), self._parts([d for _, d in mine]), strict=True):
                self._backend.upload(self._lists[0], src)
                self._backend.upload(self._lists[1], dst)
                for array in self._plan.groups[group].arrays:
                    self._backend.stream.ops.kv_copy(self._arrays[array], self._lists[0], self._lists[1])

    def pages(self, group: int, block: int) -> Iterator[Any]:
        """Yield the device's views of a block's K and V in every array of its group."""
        for array in self._plan.groups[group].arrays:
            yield self._arrays[array].k[block]
            yield self._arrays[array].v[block]

    def _fill_nan(self, block: int) -> None:
        for array in self._arrays:
            for page in (array.k[block], array.v[block]):
                self._backend.upload(page, _nan_like(page))

    @staticmethod
    def _parts(blocks: Iterable[int]) -> Iterator[Any]:
        items = list(blocks)
        for start in range(0, len(items), BLOCK_LIST):
            part = np.full(BLOCK_LIST, -1, np.int32)
            part[: len(items[start : start + BLOCK_LIST])] = items[start : start + BLOCK_LIST]
            yield part


def _nan_like(page: Any) -> Any:
    """Return a host array of the page's shape whose every byte is 0xFF: NaN in every float type."""
    return np.full(page.nbytes, 0xFF, np.uint8).view(page.dtype).reshape(tuple(page.shape))
