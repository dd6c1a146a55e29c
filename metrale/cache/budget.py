"""How many K/V blocks fit in memory."""

from __future__ import annotations

from dataclasses import dataclass

from metrale.cache.groups import CachePlan
from metrale.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Budget:
    """The outcome: blocks (the dummy block included), bytes of one, bytes of all."""

    blocks: int
    block_bytes: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of all blocks."""
        return self.blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class Demand:
    """What the cache is for: the longest context, the longest chunk, and how many sequences may run at once.

    chosen: why this context, when the user did not name it.
    """

    context_tokens: int
    chunk_tokens: int
    rows: int
    block_tokens: int
    chosen: str = ""


def plan_blocks(plan: CachePlan, demand: Demand, *, block_bytes: int, free_bytes: int, limit_bytes: int | None) -> Budget:
    """Choose the number of blocks: what all rows could use at full context, as far as memory goes.

    limit_bytes: the memory the user gives the cache; None: what is free. One sequence of the whole context must fit.
    Raises: CapacityError (``capacity.memory``) with the numbers when it does not, or when the limit is over what is free.
    """
    one = plan.sequence_blocks(demand.context_tokens, demand.chunk_tokens, demand.block_tokens)
    room = free_bytes if limit_bytes is None else limit_bytes
    if room > free_bytes:
        raise CapacityError(
            f"K/V cache: expected {_mib(room)} as configured, got {_mib(free_bytes)} free; lower the cache's "
            "memory or free some",
            code="capacity.memory",
        )
    fits = room // block_bytes - 1
    if fits < one:
        per = block_bytes * len(plan.groups) // demand.block_tokens
        most = max(0, fits) // len(plan.groups) * demand.block_tokens
        why = f", {demand.chosen}" if demand.chosen else ""
        remedy = f" or set a context of at most {most} tokens" if most else f", at least {_mib((1 + one) * block_bytes)}"
        raise CapacityError(
            f"K/V cache: expected room for one context of {demand.context_tokens} tokens{why} ({one} blocks of "
            f"{_kib(block_bytes)}, {_mib(one * block_bytes)}; {_kib(per)} a token), got {_mib(room)}; "
            f"give it more memory{remedy}",
            code="capacity.memory",
        )
    return Budget(1 + min(fits, one * demand.rows), block_bytes)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _kib(nbytes: int) -> str:
    return f"{nbytes / 2**10:.1f} KiB"
