"""A sequence's block table in one KV group: logical block -> physical block."""

from __future__ import annotations

from metrale.cache.blocks import DUMMY_BLOCK, BlockPool


class BlockTable:
    """Blocks of one sequence in one group, in logical order.

    Entries below `start` have left the group's window: they were released and read as the dummy block. Every entry at or
    above it holds one reference.
    """

    __slots__ = ("blocks", "pool", "start")

    def __init__(self, pool: BlockPool) -> None:
        """Make an empty table over a pool."""
        self.pool = pool
        self.blocks: list[int] = []
        self.start = 0

    def __len__(self) -> int:
        """Return the number of logical blocks, released ones included."""
        return len(self.blocks)

    @property
    def held(self) -> int:
        """Return the number of blocks this table holds a reference to."""
        return len(self.blocks) - self.start

    def extend(self, blocks: list[int]) -> None:
        """Append blocks whose references now belong to this table."""
        self.blocks.extend(blocks)

    def share_into(self, other: BlockTable, count: int) -> None:
        """Make an empty `other` share the first `count` entries (window-released ones stay released)."""
        for block in self.blocks[self.start : count]:
            self.pool.share(block)
        other.start = min(self.start, count)
        other.blocks.extend(self.blocks[:count])

    def slide(self, first_block: int) -> list[int]:
        """Release the entries below `first_block`; return their logical numbers."""
        gone = list(range(self.start, min(first_block, len(self.blocks))))
        for logical in gone:
            self.pool.release(self.blocks[logical])
            self.blocks[logical] = DUMMY_BLOCK
            self.start = logical + 1
        return gone

    def release_all(self) -> None:
        """Release every block; harmless twice. Tail first, so that the pool's LIFO list hands the head out again first."""
        while len(self.blocks) > self.start:
            self.pool.release(self.blocks.pop())
        self.blocks.clear()
        self.start = 0
