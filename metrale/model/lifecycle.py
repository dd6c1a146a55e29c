"""Sequences from birth to release: allocate, fork, save, restore, detach, free."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from metrale.backends.base import BLOCK_TOKENS
from metrale.cache.block_table import BlockTable
from metrale.errors import RequestError
from metrale.model.core import Core
from metrale.model.plan import Fork, RowSampling, SequenceSpec
from metrale.model.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SavedTable:
    """One group's K/V on the host: `length` logical blocks, of which those from `start` on were held."""

    length: int
    start: int
    pages: tuple[tuple[Any, ...], ...]  # a held block: K and V of every array, in order


@dataclass(frozen=True, slots=True)
class HostSequence:
    """A sequence saved on the host."""

    seq_id: int
    tokens: tuple[int, ...]
    prompt_len: int
    sampling: RowSampling
    prompt_logprobs: int | None
    launched: int
    prefilled: bool
    tables: tuple[SavedTable, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of K/V held."""
        return sum(int(page.nbytes) for table in self.tables for block in table.pages for page in block)


class Lifecycle:
    """Birth, copies and release of sequences. `settle` waits until no step is in flight."""

    def __init__(self, core: Core, settle: Callable[[], None]) -> None:
        """Work on a model's core."""
        self._core = core
        self._settle = settle
        self.on_free: list[Callable[[int], None]] = []

    def alloc(self, spec: SequenceSpec) -> Sequence:
        """See `ModelLifecycle.alloc_sequence`."""
        self._check_tokens(spec)
        return self._birth(spec, launched=0, prefilled=False)

    def free(self, seq_id: int) -> None:
        """See `ModelLifecycle.free_sequence`. The id goes first and every resource has its own turn, so that none can leak."""
        seq = self._core.sequences.pop(seq_id, None)
        if seq is None:
            return
        with ExitStack() as turns:  # unwound last to first, each whatever the others did
            for hook in self.on_free:
                turns.callback(hook, seq_id)
            turns.callback(seq.release_row)
            for table in seq.tables:
                turns.callback(table.release_all)
        seq.reserved = 0

    def detach(self, seq_id: int) -> int:
        """See `ModelLifecycle.detach_row`."""
        self._settle()
        seq = self._core.find(seq_id)
        row = seq.row
        seq.release_row()
        return row

    def fork(self, fork: Fork) -> Sequence:
        """See `ModelLifecycle.fork_sequence`."""
        core = self._core
        self._settle()
        parent = core.find(fork.parent_id)
        at = fork.at
        seen = [core.cache.first_block(g, at, BLOCK_TOKENS) for g in range(len(parent.tables))]
        if (
            not 0 <= at < len(parent.tokens)
            or at > parent.launched
            or any(t.start > s for t, s in zip(parent.tables, seen, strict=True))
        ):
            raise RequestError(
                f"fork of sequence {parent.seq_id}: expected a token it has launched and still holds the window of, got "
                f"index {at} of {parent.launched} launched; fork right after prefill",
                code="sequence.state",
            )
        core.recover()
        spec = SequenceSpec(fork.seq_id, tuple(parent.tokens[: at + 1]), min(parent.prompt_len, at + 1), fork.sampling)
        child = self._birth(spec, launched=at, prefilled=True)
        try:
            full = at // BLOCK_TOKENS
            for mine, theirs in zip(child.tables, parent.tables, strict=True):
                theirs.share_into(mine, full)
            child.reserved = full * BLOCK_TOKENS
            if at % BLOCK_TOKENS:
                core.room.reserve(child, at, core.limits.context_tokens)
                with core.step([child]):
                    core.room.prepare_fresh()
                    core.room.copy(
                        [(g, parent.tables[g].blocks[full], child.tables[g].blocks[full]) for g in range(len(child.tables))]
                    )
        except BaseException:
            self.free(fork.seq_id)
            raise
        return child

    def save(self, seq_id: int) -> HostSequence:
        """See `ModelLifecycle.save_sequence`."""
        core = self._core
        self._settle()
        seq = core.find(seq_id)
        core.recover()
        core.room.prepare_fresh()
        tables = []
        for group, table in enumerate(seq.tables):
            held = table.blocks[table.start :]
            pages = tuple(tuple(core.backend.download(p) for p in core.room.pages(group, block)) for block in held)
            tables.append(SavedTable(len(table), table.start, pages))
        saved = HostSequence(
            seq.seq_id,
            tuple(seq.tokens),
            seq.prompt_len,
            seq.sampling,
            seq.prompt_logprobs,
            seq.launched,
            seq.prefilled,
            tuple(tables),
        )
        self.free(seq_id)
        return saved

    def restore(self, saved: HostSequence) -> Sequence:
        """See `ModelLifecycle.restore_sequence`."""
        core = self._core
        core.recover()
        spec = SequenceSpec(saved.seq_id, saved.tokens, saved.prompt_len, saved.sampling, saved.prompt_logprobs)
        seq = self._birth(spec, launched=saved.launched, prefilled=saved.prefilled)
        try:
            for table, old in zip(seq.tables, saved.tables, strict=True):
                table.blocks.extend([0] * old.start)
                table.start = old.start
                table.extend(core.pool.alloc(old.length - old.start))
            seq.reserved = core.words.limit(seq)
            with core.step([seq]):
                core.room.prepare_fresh()
                for group, (table, old) in enumerate(zip(seq.tables, saved.tables, strict=True)):
                    for block, pages in zip(table.blocks[table.start :], old.pages, strict=True):
                        for page, host in zip(core.room.pages(group, block), pages, strict=True):
                            core.backend.upload(page, host)
        except BaseException:
            self.free(saved.seq_id)
            raise
        return seq

    def _birth(self, spec: SequenceSpec, *, launched: int, prefilled: bool) -> Sequence:
        core = self._core
        if spec.seq_id in core.sequences:
            raise RequestError(
                f"sequence {spec.seq_id}: expected an id that is not in use, got one that is; choose another",
                code="sequence.exists",
            )
        guard = core.rows.claim()
        groups = len(core.cache.groups)
        tables = [BlockTable(core.pool) for _ in range(groups)]
        seq = Sequence(
            spec.seq_id,
            list(spec.tokens),
            spec.prompt_len,
            spec.sampling,
            spec.prompt_logprobs,
            guard,
            tables,
            launched=launched,
            prefilled=prefilled,
            staged=[0] * groups,
        )
        core.sequences[spec.seq_id] = seq
        return seq

    def _check_tokens(self, spec: SequenceSpec) -> None:
        limits = self._core.limits
        if not spec.tokens:
            raise RequestError("prompt: expected at least one token, got none; say something", code="prompt.empty")
        if len(spec.tokens) >= limits.context_tokens:
            raise RequestError(
                f"prompt: expected fewer than {limits.context_tokens} tokens, got {len(spec.tokens)}; shorten it or open "
                "the model with a larger max_context",
                code="prompt.length",
            )
        wrong = next((t for t in spec.tokens if not 0 <= t < limits.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"prompt: expected token ids from 0 to {limits.vocab_size - 1}, got {wrong}; use this model's tokenizer",
                code="prompt.token",
            )
        if not 0 < spec.prompt_len <= len(spec.tokens):
            raise RequestError(
                f"prompt_len: expected 1 to {len(spec.tokens)}, got {spec.prompt_len}; it counts the prompt's tokens",
                code="prompt.length",
            )
