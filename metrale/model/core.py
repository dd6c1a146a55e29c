"""What the model's concerns share: device buffers, bookkeeping, and the return to a known state after a failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from metrale.backends.base import BLOCK_TOKENS, Backend, KVLayer, Ops, RowBatch, RowLayout, RowState
from metrale.cache.blocks import BlockPool
from metrale.cache.groups import CachePlan
from metrale.config.engine import EngineConfig
from metrale.config.spec import ModelSpec
from metrale.errors import RequestError
from metrale.log import get_logger
from metrale.model.gate import Gate
from metrale.model.graphs import GraphCache
from metrale.model.net import Net
from metrale.model.protocols import ModelLimits
from metrale.model.room import Room
from metrale.model.row_words import RowWords
from metrale.model.sequence import RowPool, Sequence
from metrale.model.sizing import plan_cache
from metrale.model.staging import PinnedMetaStaging
from metrale.weights.loader import Weights

log = get_logger(__name__)

GUARD_WORDS = 256  # on both sides of a guarded buffer
GUARD_BYTE = 0xA5


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Checks that cost memory or time, off by default.

    guards: bands around row state, logits and K/V pages that no kernel may write. poison: fresh K/V blocks are NaN
    instead of zeros, so that reading what was never written shows.
    """

    guards: bool = False
    poison: bool = False


@dataclass(slots=True)
class Counters:
    """What `ModelStats` reports."""

    decode_steps: int = 0
    prefill_chunks: int = 0
    eager_steps: int = 0
    failed_steps: int = 0


class Core:
    """Buffers and bookkeeping of one open model. Concern modules work on it; it decides nothing of theirs."""

    def __init__(self, spec: ModelSpec, weights: Weights, config: EngineConfig, backend: Backend, diagnosis: Diagnosis) -> None:
        """Allocate everything a model ever needs.

        Raises: CapacityError (``capacity.memory``) when K/V cache or buffers do not fit.
        """
        self.spec, self.backend, self.config, self.diagnosis = spec, backend, config, diagnosis
        self.counters = Counters()
        self.sequences: dict[int, Sequence] = {}
        self.gate = Gate(graphs=config.graphs)
        self.graphs = GraphCache(16 + config.max_rows)
        self._guards: dict[str, Any] = {}
        self._dirty = False
        sized = plan_cache(spec, config, backend)
        self.cache: CachePlan = sized.plan
        self.limits = ModelLimits(
            sized.context, config.max_rows, config.chunk_tokens, BLOCK_TOKENS, sized.budget.blocks - 1, spec.vocab
        )
        self.net = Net(
            backend,
            spec,
            weights,
            context=sized.context,
            rows=max(config.chunk_tokens, config.max_rows),
            head_rows=config.max_rows,
        )
        self._allocate_kv(sized.budget.blocks)
        self._allocate_state()
        self._allocate_step()
        backend.stream.synchronize()

    def _allocate_kv(self, blocks: int) -> None:
        """Allocate the pages; with guards, one block more than the pool knows of, which nothing may write."""
        self.pool = BlockPool(blocks, born_zero=not self.diagnosis.poison)
        guard = 1 if self.diagnosis.guards else 0
        self.arrays: list[KVLayer] = [self.backend.alloc_kv(blocks + guard, heads, dim) for heads, dim in self.cache.arrays]
        if guard:
            for i, array in enumerate(self.arrays):
                self._guard(f"pages {i}, keys", array.k[blocks])
                self._guard(f"pages {i}, values", array.v[blocks])

    def _allocate_state(self) -> None:
        """Allocate the row state, its rings, and what stages them."""
        backend, limits = self.backend, self.limits
        blocks = -(-limits.context_tokens // BLOCK_TOKENS)
        self.layout = RowLayout(limits.rows, blocks, limits.context_tokens, len(self.cache.groups))
        self.state = RowState(self._guarded("row state", self.layout.words, "i32"), self.layout)
        backend.upload(self.state.words[: limits.rows], np.full(limits.rows, -1, np.int32))
        layers = range(len(self.spec.layers))
        self.net.attach(
            [self.arrays[self.cache.array_of(i)] for i in layers], [self.state.table(self.cache.group_of(i)) for i in layers]
        )
        self.rows = RowPool(limits.rows)
        self.staging = PinnedMetaStaging(backend, self.config.result_depth, self.state, limits.chunk_tokens)
        self.patches, self.chunks, self.results = self.staging.patches, self.staging.chunks, self.staging.results
        self.words = RowWords(backend, self.state, self.patches)
        self.room = Room(backend, self.cache, self.pool, self.arrays, poison=self.diagnosis.poison)

    def _allocate_step(self) -> None:
        """Allocate the buffers of a step's two ends; the layers have their own."""
        backend, rows, vocab = self.backend, self.limits.rows, self.limits.vocab_size
        self.batch = RowBatch(*(backend.alloc((rows,), "i32", zero=True) for _ in range(4)))
        self.ids = backend.alloc((rows,), "i32", zero=True)
        self.numbers = backend.alloc((rows,), "i32")  # 0, 1, 2, ...: copies rows by gathering them all
        backend.upload(self.numbers, np.arange(rows, dtype=np.int32))
        self.logits = self._guarded("logits", rows * vocab, "f32").reshape(rows, vocab)
        self.scores = backend.alloc((rows, vocab), "f32")
        self.scratch = backend.alloc((rows, vocab), "f32")
        self.counts = backend.alloc((rows, vocab), "i32", zero=True)
        self.sampled_rows = 0

    @property
    def ops(self) -> Ops:
        """Return the ops of the stream that steps run on."""
        return self.backend.stream.ops

    # -- sequences --

    def find(self, seq_id: int) -> Sequence:
        """Return a live sequence. Raises: RequestError ``sequence.unknown``."""
        seq = self.sequences.get(seq_id)
        if seq is None:
            raise RequestError(
                f"sequence {seq_id}: expected a live sequence, got an id that is not alive; allocate it first",
                code="sequence.unknown",
            )
        return seq

    def make_room(self, seq: Sequence, index: int, tokens: int) -> None:
        """Give back what rows at `index` and later no longer see, and reserve blocks for `tokens` tokens.

        Raises: CapacityError ``capacity.context``, ``capacity.blocks``.
        """
        if tokens > seq.reserved:
            self.room.slide(seq, index, self.patches, self.layout.table)
            self.room.reserve(seq, tokens, self.limits.context_tokens)

    # -- failures --

    @contextmanager
    def step(self, seqs: Iterable[Sequence]) -> Iterator[None]:
        """Run a step's device work; whatever is raised inside makes the device's copy of the host's state suspect.

        The sequences' tokens and lengths go back to what they were, also when Ctrl-C comes between two lines of bookkeeping.
        Nothing on the device is touched then: `recover` does it at the start of the next step.
        """
        before = [(seq, len(seq.tokens), seq.launched, seq.in_flight, seq.prefilled) for seq in seqs]
        try:
            yield
        except BaseException:
            self.invalidate()
            self.counters.failed_steps += 1
            for seq, tokens, launched, in_flight, prefilled in before:
                del seq.tokens[tokens:]
                seq.launched, seq.in_flight, seq.prefilled = launched, in_flight, prefilled
            raise

    def invalidate(self) -> None:
        """Declare the device's copy of the host's state suspect."""
        self._dirty = True

    def recover(self) -> None:
        """Bring the device back to what the host knows, if a step has failed since the last time.

        Raises: DeviceError when the device does not answer; the state stays suspect then.
        """
        if not self._dirty:
            return
        stream = self.backend.stream
        stream.abort_capture()
        stream.synchronize()
        self.staging.reset()
        self.words.forget_order()
        self.backend.upload(self.counts, np.zeros(tuple(self.counts.shape), np.int32))
        for seq in self.sequences.values():
            seq.clean = False
        stream.synchronize()
        self._dirty = False
        log.info("recovered from a failed step; %d sequences are staged again", len(self.sequences))

    # -- guards --

    def _guarded(self, name: str, words: int, dtype: str) -> Any:
        """Allocate zeroed 4-byte words, between two guard bands where diagnosis asks for them."""
        if not self.diagnosis.guards:
            return self.backend.alloc((words,), dtype, zero=True)
        whole = self.backend.alloc((words + 2 * GUARD_WORDS,), dtype, zero=True)
        self._guard(f"{name} below", whole[:GUARD_WORDS])
        self._guard(f"{name} above", whole[GUARD_WORDS + words :])
        return whole[GUARD_WORDS : GUARD_WORDS + words]

    def _guard(self, name: str, band: Any) -> None:
        pattern = np.full(band.nbytes, GUARD_BYTE, np.uint8).view(band.dtype).reshape(tuple(band.shape))
        self.backend.upload(band, pattern)
        self._guards[name] = band

    def broken_guards(self) -> tuple[str, ...]:
        """Return the names of the guard bands that something has written."""
        found = []
        for name, band in self._guards.items():
            if (np.ascontiguousarray(self.backend.download(band)).view(np.uint8) != GUARD_BYTE).any():
                found.append(name)
        return tuple(found)

    def drop(self) -> None:
        """Let go of the device's memory."""
        self.sequences.clear()
        self._guards.clear()
        self.graphs.drop_all()
