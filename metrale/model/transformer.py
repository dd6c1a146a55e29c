"""TransformerModel: the concerns of an open model, wired together. What each does stands in its own file."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, cast

from metrale.backends.base import Backend
from metrale.config.engine import EngineConfig
from metrale.config.spec import ModelSpec
from metrale.model.batch import DecodeBatch
from metrale.model.chunks import PrefillChunks
from metrale.model.compact import Compact
from metrale.model.core import Core, Diagnosis
from metrale.model.decode import Decode
from metrale.model.diagnose import Diagnose
from metrale.model.execute import Execute
from metrale.model.lifecycle import HostSequence, Lifecycle
from metrale.model.plan import Chunk, Fork, PromptLogprob, SequenceSpec, StepPlan, StepResult, TokenResult
from metrale.model.prefill import Prefill
from metrale.model.protocols import ModelLimits, ModelStats, SavedSequence, SequenceView
from metrale.model.scoring import Scoring
from metrale.model.streams import Streams
from metrale.weights.loader import Weights


class TransformerModel:
    """An open model on one backend; implements `protocols.Model`, whose docstrings are not repeated here."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, config: EngineConfig, backend: Backend, *, diagnosis: Diagnosis | None = None
    ) -> None:
        """Allocate caches and buffers. The backend stays the caller's.

        Raises: CapacityError (``capacity.memory``) when they do not fit.
        """
        self.spec = spec
        self._core = core = Core(spec, weights, config, backend, diagnosis if diagnosis is not None else Diagnosis())
        self._streams = Streams(core)
        self._lifecycle = Lifecycle(core, self.settle)
        self._compact = Compact(core, self.settle)
        self._chunks = PrefillChunks(core)
        self._prefill = Prefill(core, self._chunks)
        self._batch = DecodeBatch(core)
        self._decode = Decode(self._batch)
        self._execute = Execute(self._lifecycle, self._chunks, self._batch)
        self._scoring = Scoring(core, self._lifecycle, self._chunks)
        self._diagnose = Diagnose(core, self._lifecycle, self._chunks)
        self._lifecycle.on_free.append(self._chunks.forget)

    # -- lifecycle --

    @property
    def limits(self) -> ModelLimits:
        """Return the fixed sizes."""
        return self._core.limits

    def alloc_sequence(self, spec: SequenceSpec) -> SequenceView:
        """Give a sequence a row."""
        return self._lifecycle.alloc(spec).view()

    def free_sequence(self, seq_id: int) -> None:
        """Release a sequence."""
        self._lifecycle.free(seq_id)

    def fork_sequence(self, fork: Fork) -> SequenceView:
        """Make a sequence that shares another's full blocks."""
        return self._lifecycle.fork(fork).view()

    def save_sequence(self, seq_id: int) -> SavedSequence:
        """Move a sequence to the host."""
        return self._lifecycle.save(seq_id)

    def restore_sequence(self, saved: SavedSequence) -> SequenceView:
        """Bring a sequence back from the host."""
        return self._lifecycle.restore(cast(HostSequence, saved)).view()

    def compact_sequence(self, seq_id: int, row: int) -> None:
        """Move a sequence to another free row."""
        self._compact.move(seq_id, row)

    def compact(self) -> None:
        """Move sequences until the rows in use are the lowest ones."""
        self._compact.pack()

    def detach_row(self, seq_id: int) -> int:
        """Take the row from a sequence that will not run again."""
        return self._lifecycle.detach(seq_id)

    def sequence(self, seq_id: int) -> SequenceView:
        """Return a view of a live sequence."""
        return self._core.find(seq_id).view()

    def live_sequences(self) -> tuple[int, ...]:
        """Return the ids alive."""
        return tuple(self._core.sequences)

    def blocks_for(self, tokens: int) -> int:
        """Return the K/V blocks a sequence of so many tokens needs."""
        limits = self._core.limits
        return self._core.cache.sequence_blocks(tokens, limits.chunk_tokens, limits.block_tokens)

    @property
    def free_blocks(self) -> int:
        """Return how many K/V blocks are free."""
        return self._core.pool.free

    @property
    def free_rows(self) -> int:
        """Return how many more sequences can be allocated."""
        return self._core.rows.free

    def close(self) -> None:
        """Free all sequences and graphs."""
        for seq_id in self.live_sequences():
            self._lifecycle.free(seq_id)
        self._core.drop()

    # -- forward --

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan's parts in order."""
        return self._execute.run(plan)

    def prefill(self, seq_id: int) -> TokenResult:
        """Run all tokens not yet launched."""
        return self._prefill.run(seq_id)

    def prefill_chunk(self, chunk: Chunk) -> TokenResult | None:
        """Run one chunk."""
        return self._chunks.run(chunk)

    def decode(self, seq_id: int) -> TokenResult:
        """Advance one sequence by one token."""
        return self._decode.run(seq_id)

    def decode_batch(self, seq_ids: Items[int]) -> tuple[TokenResult, ...]:
        """Advance sequences by one token each."""
        return self._batch.run(seq_ids)

    def take_prompt_logprobs(self, seq_id: int) -> tuple[PromptLogprob, ...]:
        """Return and forget the prompt logprobs gathered so far."""
        return self._chunks.take_prompt_logprobs(seq_id)

    # -- logits --

    def step_logits(self) -> Any:
        """Return the logits of the last step that sampled."""
        return self._scoring.of_step()

    def score(self, tokens: Items[int]) -> Any:
        """Return the logits at each of the tokens."""
        return self._scoring.score(tokens)

    # -- graphs --

    def suppress_graphs(self, reason: str) -> None:
        """Run eagerly until the reason is allowed again."""
        self._core.gate.suppress(reason)

    def allow_graphs(self, reason: str) -> None:
        """Take a reason back."""
        self._core.gate.allow(reason)

    def drop_graphs(self, reason: str) -> None:
        """Destroy every graph."""
        self.settle()
        self._batch.drop_graphs(reason)

    def graph_keys(self) -> tuple[tuple[Any, ...], ...]:
        """Return the keys captured, least recently used first."""
        return self._core.graphs.held()

    # -- streams --

    def settle(self) -> None:
        """Wait until no step is in flight: steps are read before their call returns, so only the stream remains."""
        self._streams.synchronize()

    def synchronize(self) -> None:
        """Wait until the device's queue is empty."""
        self._streams.synchronize()

    # -- diagnosis --

    @property
    def stats(self) -> ModelStats:
        """Return the counters."""
        return self._diagnose.stats

    def check_guards(self) -> tuple[str, ...]:
        """Return the names of buffers whose guard bands were written."""
        return self._core.broken_guards()

    def locate_fault(self, tokens: Items[int]) -> str | None:
        """Return where a run of tokens first goes bad, or None."""
        return self._diagnose.locate_fault(tokens)

    def top_tokens(self, row: int = 0, k: int = 5) -> tuple[tuple[int, float], ...]:
        """Return the k best tokens of a row of the last step."""
        return self._diagnose.top_tokens(row, k)
