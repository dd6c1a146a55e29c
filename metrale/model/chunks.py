"""One prefill chunk: stage its rows, run the layers, and on the last chunk choose the first token.

After the last chunk the row holds the chosen token and its index, so the sequence is ready to decode.
"""

from __future__ import annotations

from collections.abc import Callable

from metrale.backends.base import Array, RowBatch
from metrale.errors import RequestError
from metrale.model.core import Core
from metrale.model.logits import choose, prompt_logprobs, token_result
from metrale.model.plan import Chunk, PromptLogprob, TokenResult
from metrale.model.sequence import Sequence

AfterForward = Callable[[Sequence, Chunk], None]


class PrefillChunks:
    """Prefill in chunks. `after_forward_ok` runs after a chunk that succeeded, and only then.

    It is the one place where work that depends on a finished forward (a drafter's own prefill) is attached; a hook catches
    what it raises itself, since the chunk has happened by then.
    """

    def __init__(self, core: Core) -> None:
        """Work on a model's core."""
        self._core = core
        self.after_forward_ok: list[AfterForward] = []
        self._prompt_logprobs: dict[int, list[PromptLogprob]] = {}

    def run(self, chunk: Chunk) -> TokenResult | None:
        """Run one chunk. See `ModelForward.prefill_chunk`."""
        core = self._core
        seq = self._member(chunk)
        last = chunk.stop == len(seq.tokens)
        core.recover()
        core.make_room(seq, chunk.start, chunk.stop)
        found: list[PromptLogprob] = []
        result = None
        with core.step([seq]):
            batch, hidden = self.forward(seq, chunk)
            if seq.prompt_logprobs is not None:
                found = prompt_logprobs(core, seq, chunk.start, chunk.stop, hidden)
            if last:
                result = self._finish(seq, batch, hidden)
                seq.tokens.append(result.token)
                seq.prefilled = True
            seq.launched = chunk.stop
        core.counters.prefill_chunks += 1
        if found:
            self._prompt_logprobs.setdefault(seq.seq_id, []).extend(found)
        for hook in self.after_forward_ok:
            hook(seq, chunk)
        return result

    def take_prompt_logprobs(self, seq_id: int) -> tuple[PromptLogprob, ...]:
        """Return and forget what has been gathered for a sequence."""
        return tuple(self._prompt_logprobs.pop(seq_id, ()))

    def forget(self, seq_id: int) -> None:
        """Forget a sequence that has been freed."""
        self._prompt_logprobs.pop(seq_id, None)

    def _member(self, chunk: Chunk) -> Sequence:
        core = self._core
        seq = core.find(chunk.seq_id)
        if seq.prefilled or seq.guard is None:
            raise RequestError(
                f"sequence {seq.seq_id}: expected one that is not prefilled and has a row, got another; decode it",
                code="sequence.state",
            )
        most = min(len(seq.tokens), chunk.start + core.limits.chunk_tokens)
        if chunk.start != seq.launched or not chunk.start < chunk.stop <= most:
            raise RequestError(
                f"chunk of sequence {seq.seq_id}: expected [start, stop) from {seq.launched} to at most {most}, got "
                f"[{chunk.start}, {chunk.stop}); chunks follow one another",
                code="chunk.range",
            )
        return seq

    def stage(self, seq: Sequence, chunk: Chunk) -> RowBatch:
        """Stage a chunk's words and rows, inside a step; return its rows."""
        core = self._core
        ops = core.ops
        core.room.prepare_fresh()
        core.words.stage(seq)
        core.patches.apply(ops)
        core.words.accepted(seq)
        batch = core.chunks.stage(seq.tokens[chunk.start : chunk.stop], seq.row, chunk.start)
        ops.rows_prefill(batch, core.state)
        return batch

    def forward(self, seq: Sequence, chunk: Chunk) -> tuple[RowBatch, Array]:
        """Stage the chunk and run the layers, inside a step; return its rows and their hidden states (T, H)."""
        batch = self.stage(seq, chunk)
        hidden = self._core.net.forward(self._core.ops, batch)
        self._core.chunks.accepted()
        return batch, hidden

    def _finish(self, seq: Sequence, batch: RowBatch, hidden: Array) -> TokenResult:
        """Choose the token after the prompt and read it."""
        core = self._core
        count = int(batch.ids.shape[0])
        row = batch.rows(count - 1, count)
        logits = core.logits[:1]
        core.net.head(core.ops, logits, hidden[count - 1 : count])
        choose(core, core.ops, row, logits, logprobs=seq.sampling.logprobs is not None)
        core.sampled_rows = 1
        ticket = core.results.launched(1, core.patches.queued)
        ids = core.results.read(ticket)
        core.patches.read_until(ticket.patches)
        seq.launched = len(seq.tokens)
        return token_result(core, seq, ids[0], ticket, 0)
