"""The surface of TransformerModel as small Protocols: the engine sees nothing else.

Rules of every method:

* One thread calls a model; nothing here locks. Sequences are named by ids the engine chooses, each used once.
* A method that raises has changed nothing the host knows of: no block, row, event or open capture is left behind, other
  sequences go on unchanged, and the same call may be made again. Blocks that a failed step had reserved stay with the
  sequence until it is freed.
* `RequestError`: the arguments are wrong (unknown id ``sequence.unknown``, not prefilled ``sequence.state``, ...).
  `CapacityError`: no free block ``capacity.blocks``, no free row ``capacity.rows``, context full ``capacity.context``;
  free or preempt something and call again. `DeviceError`: the device failed.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

from metrale.model.plan import Chunk, Fork, PromptLogprob, SequenceSpec, StepPlan, StepResult, TokenResult


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The fixed sizes of an open model.

    context_tokens: longest token list. rows: most sequences alive at once, also the widest decode batch. chunk_tokens:
    longest prefill chunk. block_tokens: tokens of a K/V block. blocks: K/V blocks, the dummy block not counted.
    vocab_size: columns of the logits.
    """

    context_tokens: int
    rows: int
    chunk_tokens: int
    block_tokens: int
    blocks: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What the engine may know of a sequence; a copy, it does not follow the sequence.

    tokens: known tokens. launched: tokens whose K/V the device has been asked to write. prefilled: may be decoded
    (launched is len(tokens) - 1 or more). row: its row of the row state, None when detached. blocks: K/V blocks held,
    shared ones included.
    """

    seq_id: int
    tokens: tuple[int, ...]
    prompt_len: int
    launched: int
    prefilled: bool
    row: int | None
    blocks: int


@dataclass(frozen=True, slots=True)
class ModelStats:
    """Counters since the model was opened, and the present use of blocks and rows."""

    decode_steps: int
    prefill_chunks: int
    graph_captures: int
    graph_replays: int
    eager_steps: int
    graphs: int
    free_blocks: int
    free_rows: int
    peak_blocks: int
    failed_steps: int


class ModelLifecycle(Protocol):
    """Sequences from birth to release."""

    @property
    def limits(self) -> ModelLimits:
        """Return the fixed sizes."""
        ...

    def alloc_sequence(self, spec: SequenceSpec) -> SequenceView:
        """Give a sequence a row; no block is taken before its first chunk.

        Raises: RequestError for an id in use (``sequence.exists``), no tokens (``prompt.empty``), more than the context
        holds less one (``prompt.length``), a token out of range (``prompt.token``); CapacityError ``capacity.rows``.
        """
        ...

    def free_sequence(self, seq_id: int) -> None:
        """Release everything the sequence holds; an id that is not alive is ignored. Never fails on the device's account."""
        ...

    def fork_sequence(self, fork: Fork) -> SequenceView:
        """Make a sequence that shares the parent's full blocks and owns a copy of the partial one.

        The parent must have launched its tokens up to `fork.at` (that is, be prefilled that far).
        Raises: RequestError ``sequence.state`` otherwise; CapacityError for a row or a block.
        """
        ...

    def save_sequence(self, seq_id: int) -> SavedSequence:
        """Copy the sequence's K/V to the host and free it on the device (preemption by copy)."""
        ...

    def restore_sequence(self, saved: SavedSequence) -> SequenceView:
        """Bring a saved sequence back under its id: it goes on with the same bits. `saved` stays usable after a failure."""
        ...

    def compact_sequence(self, seq_id: int, row: int) -> None:
        """Move a sequence to another free row. Text does not change. Raises: RequestError ``sequence.row`` if taken."""
        ...

    def detach_row(self, seq_id: int) -> int:
        """Take the row from a sequence that will not run again (its blocks stay until it is freed); return the row."""
        ...

    def sequence(self, seq_id: int) -> SequenceView:
        """Return a view of a live sequence. Raises: RequestError ``sequence.unknown``."""
        ...

    def live_sequences(self) -> tuple[int, ...]:
        """Return the ids alive, in order of allocation."""
        ...

    def blocks_for(self, tokens: int) -> int:
        """Return the K/V blocks a sequence of so many tokens needs, over all groups."""
        ...

    @property
    def free_blocks(self) -> int:
        """Return how many K/V blocks are free."""
        ...

    @property
    def free_rows(self) -> int:
        """Return how many more sequences can be allocated."""
        ...

    def close(self) -> None:
        """Free all sequences and graphs; harmless twice. The backend stays open: its owner closes it."""
        ...


class SavedSequence(Protocol):
    """A sequence on the host: owns its memory, belongs to the model (or an equal one) that saved it."""

    @property
    def seq_id(self) -> int:
        """Return the sequence's id."""
        ...

    @property
    def nbytes(self) -> int:
        """Return the bytes of K/V held."""
        ...


class ModelForward(Protocol):
    """Running tokens through the model. Every method has its tokens on the host when it returns."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan's parts in order.

        A part that raises a MetraleError becomes a `StepFailure` and the later parts still run (a chunk after a failed
        chunk of the same sequence, or a decode row whose chunk failed, fails with ``sequence.state``; a decode batch
        fails as a whole). Other exceptions (Ctrl-C among them) propagate: parts already done stay done, and
        `sequence(id).tokens` says which.
        """
        ...

    def prefill(self, seq_id: int) -> TokenResult:
        """Run all tokens not yet launched, in chunks of `limits.chunk_tokens`, and return the next token."""
        ...

    def prefill_chunk(self, chunk: Chunk) -> TokenResult | None:
        """Run one chunk; return the next token after the last chunk, None after others.

        Raises: RequestError ``chunk.range`` unless start is the launched length and start < stop <= len(tokens), with at
        most `limits.chunk_tokens` tokens; CapacityError ``capacity.blocks``.
        """
        ...

    def decode(self, seq_id: int) -> TokenResult:
        """Advance one sequence by one token."""
        ...

    def decode_batch(self, seq_ids: Items[int]) -> tuple[TokenResult, ...]:
        """Advance the sequences by one token each; results in the order given.

        Raises: RequestError ``sequence.state`` for a sequence not prefilled or named twice; CapacityError
        ``capacity.blocks`` or ``capacity.context`` before anything runs.
        """
        ...

    def take_prompt_logprobs(self, seq_id: int) -> tuple[PromptLogprob, ...]:
        """Return and forget the prompt logprobs gathered so far by `prefill_chunk` (`execute` hands them over itself)."""
        ...


class ModelLogits(Protocol):
    """Looking at numbers: for tests, evaluation and diagnosis; not on a serving path."""

    def step_logits(self) -> Any:
        """Return the logits of the last step that sampled, (rows, V) float32 on the host, in row order.

        Penalties and bias, where a row has any, are already in them unless the batch asked for logprobs.
        """
        ...

    def score(self, tokens: Items[int]) -> Any:
        """Run tokens as a sequence of its own and return the logits at each, (len(tokens), V) float32 on the host.

        Takes and releases a row and blocks. Raises like `alloc_sequence` and `prefill_chunk`.
        """
        ...


class ModelGraphs(Protocol):
    """Captured steps."""

    def suppress_graphs(self, reason: str) -> None:
        """Run eagerly until the same reason is allowed again; reasons add up."""
        ...

    def allow_graphs(self, reason: str) -> None:
        """Take a reason back; harmless when it is not there."""
        ...

    def drop_graphs(self, reason: str) -> None:
        """Destroy every graph after settling (weights, buffers or routes have changed)."""
        ...

    def graph_keys(self) -> tuple[tuple[Any, ...], ...]:
        """Return the keys captured, least recently used first."""
        ...


class ModelStreams(Protocol):
    """Ordering with the device."""

    def settle(self) -> None:
        """Wait until no step is in flight: launched and committed lengths agree."""
        ...

    def synchronize(self) -> None:
        """Wait until the device's queue is empty."""
        ...


class ModelDiagnosis(Protocol):
    """Finding out what went wrong."""

    @property
    def stats(self) -> ModelStats:
        """Return the counters."""
        ...

    def check_guards(self) -> tuple[str, ...]:
        """Return the names of buffers whose guard bands were written (empty without `enable_guards`)."""
        ...

    def locate_fault(self, tokens: Items[int]) -> str | None:
        """Run tokens eagerly, a check after every layer; return "layer 3: ..." for the first bad output, or None."""
        ...

    def top_tokens(self, row: int = 0, k: int = 5) -> tuple[tuple[int, float], ...]:
        """Return the k best (token, logit) of a row of the last step, best first."""
        ...


class Model(ModelLifecycle, ModelForward, ModelLogits, ModelGraphs, ModelStreams, ModelDiagnosis, Protocol):
    """Everything the engine may call."""
