"""From logits to chosen tokens, and logits for those who want to look at them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from metrale.backends.base import Array, Ops, RowBatch
from metrale.model.argmax import Ticket
from metrale.model.core import Core
from metrale.model.plan import PromptLogprob, TokenResult
from metrale.model.sequence import Sequence


def choose(core: Core, ops: Ops, batch: RowBatch, logits: Any, *, logprobs: bool) -> None:
    """Issue the tail of a step: penalties, sampling, log-probabilities, commit, publish.

    With `logprobs` the penalties go to a copy, since the model's own distribution is reported for ids chosen later.
    """
    rows = int(logits.shape[0])
    ids, scores = core.ids[:rows], logits
    if logprobs:
        scores = core.scores[:rows]
        ops.gather_rows(scores, logits, core.numbers[:rows])
    ops.penalize(scores, batch.seq, batch.index, core.state, core.counts[:rows])
    ops.sample(ids, scores, batch.seq, batch.index, core.state, core.scratch[:rows])
    if logprobs:
        ops.logprobs(core.results.ring, logits, ids, batch.seq, core.state)
    ops.rows_commit(ids, batch.seq, batch.index, core.state)
    ops.publish(core.results.ring, ids, batch.seq, core.state)


def token_result(core: Core, seq: Sequence, token: int, ticket: Ticket, row: int) -> TokenResult:
    """Return what a step yielded for a sequence, whose next token this is.

    A row whose logits are all NaN yields id 0. So only when that id was chosen is a logit looked at, its own: one number
    of a row, and in the steady state none.
    """
    finite = token != 0 or not np.isnan(core.backend.download(core.logits[row][:1])).any()
    k = seq.sampling.logprobs
    if k is None:
        return TokenResult(seq.seq_id, seq.launched, token, finite=finite)
    logprob, top = core.results.logprobs(ticket, row, k)
    return TokenResult(seq.seq_id, seq.launched, token, logprob, top, finite and not np.isnan(logprob))


def row_logits(core: Core, hidden: Array) -> Iterator[Any]:
    """Yield the logits of hidden rows on the host, in parts of at most `limits.rows`, (n, V) float32 each."""
    rows = int(hidden.shape[0])
    for start in range(0, rows, core.limits.rows):
        stop = min(start + core.limits.rows, rows)
        core.net.head(core.ops, core.logits[: stop - start], hidden[start:stop])
        yield core.backend.download(core.logits[: stop - start])


def prompt_logprobs(core: Core, seq: Sequence, start: int, stop: int, hidden: Array) -> list[PromptLogprob]:
    """Return the log-probabilities of the prompt's tokens that rows [start, stop) predict."""
    found: list[PromptLogprob] = []
    index = start + 1
    assert seq.prompt_logprobs is not None
    for logits in row_logits(core, hidden[: max(0, min(stop, seq.prompt_len - 1) - start)]):
        for row in logits:
            found.append(_prompt_logprob(seq, index, row, seq.prompt_logprobs))
            index += 1
    return found


def _prompt_logprob(seq: Sequence, index: int, logits: Any, k: int) -> PromptLogprob:
    """Return one token's log-probability and the k best; NaN counts as -inf, ties go to the lower id."""
    values = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    with np.errstate(invalid="ignore"):  # a row that is all NaN
        shifted = values - values.max()
    logp = shifted - np.log(np.exp(shifted).sum())
    best = np.argsort(-logp, kind="stable")[:k]
    token = seq.tokens[index]
    return PromptLogprob(seq.seq_id, index, token, float(logp[token]), tuple((int(i), float(logp[i])) for i in best))
