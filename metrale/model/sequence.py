"""A sequence on the model's side: tokens, lengths, block tables, and the row it owns."""

from __future__ import annotations

from dataclasses import dataclass, field

from metrale.cache.block_table import BlockTable
from metrale.errors import CapacityError, MetraleError
from metrale.model.plan import RowSampling
from metrale.model.protocols import SequenceView


class RowPool:
    """Rows of the row state, handed out lowest first."""

    def __init__(self, rows: int) -> None:
        """Make a pool of rows 0 .. rows - 1."""
        self._taken = [False] * rows

    @property
    def free(self) -> int:
        """Return how many rows are free."""
        return self._taken.count(False)

    def claim(self, row: int | None = None) -> RowGuard:
        """Take a row (the lowest free one, or the one asked for) and return the guard that owns it.

        Raises: CapacityError (``capacity.rows``) when none is free or the one asked for is taken.
        """
        if row is None and not all(self._taken):
            row = self._taken.index(False)
        if row is None or not 0 <= row < len(self._taken) or self._taken[row]:
            what = "a free row" if row is None else f"row {row} to be free"
            raise CapacityError(
                f"row state: expected {what}, got none of {len(self._taken)}; free a sequence or open the model "
                "with more sequences",
                code="capacity.rows",
            )
        self._taken[row] = True
        return RowGuard(self, row)

    def release(self, row: int) -> None:
        """Put a row back. Raises: MetraleError (``row.release``) for a row that is free."""
        if not self._taken[row]:
            raise MetraleError(f"row state: expected row {row} to be in use, got a free one; this is a bug", code="row.release")
        self._taken[row] = False


class RowGuard:
    """Ownership of one row: released exactly once, by whoever holds the guard."""

    __slots__ = ("_pool", "row")

    def __init__(self, pool: RowPool, row: int) -> None:
        """Own a claimed row."""
        self._pool: RowPool | None = pool
        self.row = row

    def release(self) -> None:
        """Put the row back; harmless twice."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.release(self.row)


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and what the device holds for them.

    launched: tokens whose K/V has been launched. A prefilled sequence that is settled has launched == len(tokens) - 1.
    in_flight: results of launched steps that the host has not read. `committed` is what the host knows.
    clean: the row's words on the device agree with the host's; False asks for all of them to be staged again.
    staged: a group's table entries that the device has, valid while clean.
    """

    seq_id: int
    tokens: list[int]
    prompt_len: int
    sampling: RowSampling
    prompt_logprobs: int | None
    guard: RowGuard | None
    tables: list[BlockTable]
    launched: int = 0
    in_flight: int = 0
    prefilled: bool = False
    clean: bool = False
    staged: list[int] = field(default_factory=list)
    reserved: int = 0

    @property
    def committed(self) -> int:
        """Return the number of tokens the host knows."""
        return len(self.tokens)

    @property
    def row(self) -> int:
        """Return the sequence's row. Raises: MetraleError (``sequence.detached``) when it has none."""
        if self.guard is None:
            raise MetraleError(
                f"sequence {self.seq_id}: expected a row, got a detached sequence; only free it", code="sequence.detached"
            )
        return self.guard.row

    @property
    def blocks(self) -> int:
        """Return the K/V blocks held, over all groups."""
        return sum(table.held for table in self.tables)

    def release_row(self) -> None:
        """Give the row back; harmless twice."""
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.release()

    def view(self) -> SequenceView:
        """Return the copy that the engine may see."""
        return SequenceView(
            self.seq_id,
            tuple(self.tokens),
            self.prompt_len,
            self.launched,
            self.prefilled,
            None if self.guard is None else self.guard.row,
            self.blocks,
        )
