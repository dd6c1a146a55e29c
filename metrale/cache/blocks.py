"""The pool of K/V blocks: a LIFO free list with reference counts.

Block 0 is the dummy block: padding rows write it, it is never handed out and never freed. Blocks are numbers here; the
backend owns the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from metrale.errors import CapacityError, MetraleError

DUMMY_BLOCK = 0


class PoolStats(NamedTuple):
    """Blocks in use, free, in all (the dummy block not counted), and the most ever in use."""

    used: int
    free: int
    total: int
    peak: int


class BlockPool:
    """Hand out block numbers 1 .. blocks - 1.

    A block handed out again is *fresh* until `mark_zeroed` says that the device has been asked to zero it; fresh blocks
    must be zeroed before a step reads their table, so that no stray read meets another request's K/V. In its first life
    a block is as the backend made it, zero, and need not be touched (which would also make its pages resident early).
    """

    def __init__(self, blocks: int, *, born_zero: bool = True) -> None:
        """Make a pool of `blocks` blocks, the dummy block included. born_zero False: blocks are fresh in their first life too.

        Raises: CapacityError (``capacity.blocks``) for fewer than two.
        """
        if blocks < 2:
            raise CapacityError(
                f"block pool: expected at least 2 blocks (one is the dummy block), got {blocks}; give the K/V "
                "cache more memory",
                code="capacity.blocks",
            )
        self._refs = [0] * blocks
        self._refs[DUMMY_BLOCK] = 1
        self._free = list(range(blocks - 1, 0, -1))
        self._fresh: dict[int, None] = {}
        self._used = [not born_zero] * blocks
        self._peak = 0

    def alloc(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each: all of them or none.

        Raises: CapacityError (``capacity.blocks``) when fewer are free.
        """
        if count > len(self._free):
            raise CapacityError(
                f"K/V cache: expected {count} free blocks, got {len(self._free)} of {len(self._refs) - 1}; "
                "free or preempt a sequence, or give the cache more memory",
                code="capacity.blocks",
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
            if self._used[block]:
                self._fresh[block] = None
            self._used[block] = True
        self._peak = max(self._peak, len(self._refs) - 1 - len(self._free))
        return taken

    def share(self, block: int) -> None:
        """Add a reference to a block in use.

        Raises: MetraleError (``cache.refs``) for a block that is free, the dummy block, or no block.
        """
        self._check(block, "share")
        self._refs[block] += 1

    def release(self, block: int) -> bool:
        """Drop a reference; return whether the block became free.

        Raises: MetraleError (``cache.refs``) for a block that is already free, the dummy block, or no block; the pool is
        unchanged then (a second free must not hand one block to two sequences).
        """
        self._check(block, "release")
        self._refs[block] -= 1
        if self._refs[block]:
            return False
        self._fresh.pop(block, None)
        self._free.append(block)
        return True

    def refs(self, block: int) -> int:
        """Return a block's reference count."""
        return self._refs[block]

    @property
    def fresh(self) -> tuple[int, ...]:
        """Return the blocks that the device has not been asked to zero yet, oldest first."""
        return tuple(self._fresh)

    @property
    def has_fresh(self) -> bool:
        """Say whether any block awaits zeroing."""
        return bool(self._fresh)

    def mark_zeroed(self, blocks: Iterable[int]) -> None:
        """Take blocks off the fresh list, after the device accepted the work."""
        for block in blocks:
            self._fresh.pop(block, None)

    @property
    def free(self) -> int:
        """Return how many blocks are free."""
        return len(self._free)

    @property
    def stats(self) -> PoolStats:
        """Return the present counts."""
        total = len(self._refs) - 1
        return PoolStats(total - len(self._free), len(self._free), total, self._peak)

    def _check(self, block: int, verb: str) -> None:
        if not 0 < block < len(self._refs) or self._refs[block] == 0:
            raise MetraleError(
                f"block pool: expected to {verb} a block in use, got block {block}; this is a bug in the caller",
                code="cache.refs",
            )
