"""The decode step: what is captured, and what the host does around it.

As captured: apply the patch entry, fill the rows, run the layers and the head, choose, make the chosen ids the rows' next
tokens, publish. In the steady state the host touches nothing but the graph and the result ring.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from metrale.backends.base import Ops, RowBatch
from metrale.errors import CaptureError, DeviceError, RequestError
from metrale.log import get_logger
from metrale.model.argmax import Ticket
from metrale.model.core import Core
from metrale.model.graph_keys import GraphKey, decode_key, ladder_of
from metrale.model.logits import choose, token_result
from metrale.model.plan import TokenResult
from metrale.model.sequence import Sequence

log = get_logger(__name__)


class DecodeBatch:
    """Decode steps over any number of prefilled sequences."""

    def __init__(self, core: Core) -> None:
        """Work on a model's core."""
        self._core = core
        self._ladder = ladder_of(core.backend.name)

    def run(self, seq_ids: Items[int]) -> tuple[TokenResult, ...]:
        """Advance the sequences by one token each. See `ModelForward.decode_batch`."""
        core = self._core
        seqs = self._members(seq_ids)
        if not seqs:
            return ()
        core.recover()
        for seq in seqs:
            core.make_room(seq, seq.launched, seq.launched + 1)
        with core.step(seqs):
            ticket = self._launch(seqs)
            ids = core.results.read(ticket)
            results = tuple(token_result(core, seq, ids[row], ticket, row) for row, seq in enumerate(seqs))
            core.patches.read_until(ticket.patches)
            for seq, result in zip(seqs, results, strict=True):
                seq.tokens.append(result.token)
                seq.in_flight -= 1
        return results

    def _members(self, seq_ids: Items[int]) -> list[Sequence]:
        core = self._core
        seqs = [core.find(seq_id) for seq_id in seq_ids]
        wrong = next((s for s in seqs if not s.prefilled or s.guard is None), None)
        if wrong is not None or len({*seq_ids}) != len(seqs):
            what = (
                "each sequence once, got one twice" if wrong is None else f"prefilled sequences with a row, got {wrong.seq_id}"
            )
            raise RequestError(f"decode batch: expected {what}; prefill it to its last token first", code="sequence.state")
        return seqs

    def _launch(self, seqs: list[Sequence]) -> Ticket:
        """Stage, key and run one step; host lengths advance when the device has accepted it."""
        core = self._core
        core.room.prepare_fresh()
        for seq in seqs:
            core.words.stage(seq)
        logprobs = any(seq.sampling.logprobs is not None for seq in seqs)
        key = decode_key(len(seqs), self._ladder, core.limits.rows, logprobs=logprobs)
        core.words.stage_order([seq.row for seq in seqs], key.rung)
        core.patches.seal(core.ops)
        self.run_step(key)
        core.patches.accepted()
        core.sampled_rows = len(seqs)
        core.counters.decode_steps += 1
        for seq in seqs:
            core.words.accepted(seq)
            seq.launched += 1
            seq.in_flight += 1
        return core.results.launched(key.rung, core.patches.queued)

    def run_step(self, key: GraphKey) -> None:
        """Replay the key's graph, or capture and launch it, or run the step eagerly when graphs are declined."""
        core = self._core
        if core.gate.admits(key):
            graph = core.graphs.get(key)
            if graph is None:
                try:
                    graph = core.graphs.capture(core.backend.stream, key, lambda: self.body(core.ops, key))
                except DeviceError as error:
                    core.gate.capture_failed(key, error)
            if graph is not None:
                with core.graphs.pinned(key):
                    graph.launch()
                core.graphs.replays += 1
                return
        if core.backend.stream.capturing:
            raise CaptureError(
                "decode step: expected no open capture before an eager step, got one; this is a bug", code="capture.open"
            )
        self.body(core.ops, key)
        core.counters.eager_steps += 1

    def drop_graphs(self, reason: str) -> None:
        """Destroy every graph; nothing is in flight. Keys that failed to capture get another try."""
        core = self._core
        log.info("dropping %d graphs: %s", len(core.graphs), reason)
        core.graphs.drop_all()
        core.gate.forget_failures()

    def body(self, ops: Ops, key: GraphKey) -> None:
        """Issue the ops of one step; the same whether they are recorded or run."""
        core = self._core
        batch: RowBatch = core.batch.rows(0, key.rung)
        logits = core.logits[: key.rung]
        ops.rows_patch(core.state, core.patches.ring)
        ops.rows_begin(batch, core.state)
        core.net.head(ops, logits, core.net.forward(ops, batch))
        choose(core, ops, batch, logits, logprobs=key.logprobs)
