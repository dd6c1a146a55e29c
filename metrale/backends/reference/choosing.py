"""Choosing tokens: penalties, filters, Gumbel-max over Philox counters, log-probabilities."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from metrale.backends.base import FIELD, MAX_TOP_LOGPROBS, ResultRing, RowState
from metrale.backends.reference.arrays import F64
from metrale.backends.reference.rows import biases, fields, histories, number

_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)


def penalize(logits: Any, seq: Any, index: Any, state: RowState, counts: Any) -> None:
    """See `Ops.penalize`. `counts` is not needed here and stays zero."""
    for t in range(len(seq)):
        row = int(seq[t])
        if row >= 0:
            history = histories(state)[row, : int(index[t]) + 1]
            _repetition(logits[t], history, number(state, row, "repetition"))
            after = history[int(fields(state)[row, FIELD["prompt_len"]]) :]
            _presence(logits[t], after, number(state, row, "presence"), number(state, row, "frequency"))
            _bias(logits[t], int(index[t]) + 1, *biases(state, row))


def _repetition(logits: Any, history: Any, factor: float) -> None:
    seen = np.unique(history)
    values = logits[seen].astype(np.float64)
    logits[seen] = np.where(values > 0, values / factor, values * factor)


def _presence(logits: Any, history: Any, presence: float, frequency: float) -> None:
    seen, count = np.unique(history, return_counts=True)
    logits[seen] = logits[seen].astype(np.float64) - (frequency * count + presence)


def _bias(logits: Any, place: int, ids: Any, values: Any, until: Any) -> None:
    for token, value, end in zip(ids, values, until, strict=True):
        if place < end:
            logits[token] = value if np.isneginf(value) else logits[token] + value


def philox(counters: NDArray[Any], key: tuple[int, int]) -> NDArray[Any]:
    """Return Philox4x32-10 of (n, 4) uint32 counters, (n, 4) uint32.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"
    """
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((product1 >> _HALF) ^ c1 ^ np.uint64(k0), product1 & _LOW,
                          (product0 >> _HALF) ^ c3 ^ np.uint64(k1), product0 & _LOW)
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def gumbel(vocab: int, *, seed: tuple[int, int], token_index: int, choice: int) -> F64:
    """Return the noise of every token id for one drawn token, (V,) float64."""
    counters = np.zeros(((vocab + 3) // 4, 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 1:3] = token_index, choice
    uniform = (philox(counters, seed).reshape(-1)[:vocab] + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log(uniform)))


def sample(ids: Any, logits: Any, seq: Any, index: Any, state: RowState, scratch: Any) -> None:
    """See `Ops.sample`. `scratch` is not needed here."""
    for t in range(len(seq)):
        row = int(seq[t])
        ids[t] = 0 if row < 0 else _choose(logits[t], int(index[t]), state, row)


def _choose(logits: Any, index: int, state: RowState, row: int) -> int:
    temperature = number(state, row, "temperature")
    if temperature == 0:
        return best(logits)
    scaled = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64)) / temperature
    words = fields(state)[row]
    left = filtered(scaled, int(words[FIELD["top_k"]]), number(state, row, "top_p"), number(state, row, "min_p"))
    seed = (int(words[FIELD["seed_lo"]]) & 0xFFFFFFFF, int(words[FIELD["seed_hi"]]) & 0xFFFFFFFF)
    noise = gumbel(len(logits), seed=seed, token_index=index + 1, choice=int(words[FIELD["choice"]]))
    scores = np.full(len(logits), -np.inf)
    scores[left] = scaled[left] + noise[left]
    return int(np.argmax(scores))


def filtered(scaled: F64, top_k: int, top_p: float, min_p: float) -> NDArray[Any]:
    """Return the ids that the filters leave, most likely first; `scaled` (V,) are logits / temperature without NaN."""
    order = np.argsort(-scaled, kind="stable")
    order = order[scaled[order] > -np.inf]
    if top_k > 0:
        order = order[:top_k]
    if len(order) == 0:
        return order
    top = scaled[order[0]]
    with np.errstate(invalid="ignore"):
        likelihood = np.where(scaled[order] == top, 1.0, np.exp(scaled[order] - top))
    if top_p < 1:
        reached = np.cumsum(likelihood / likelihood.sum()) >= top_p
        order = order[: int(np.argmax(reached)) + 1 if reached.any() else len(order)]
    return np.asarray(order[likelihood[: len(order)] >= min_p])


def best(logits: Any) -> int:
    """Return the id of the largest logit; ties to the lowest id, NaN never wins, nothing to choose from: 0."""
    return int(np.argmax(np.where(np.isnan(logits), -np.inf, logits)))


def argmax(ids: Any, logits: Any) -> None:
    """See `Ops.argmax`."""
    for t in range(len(ids)):
        ids[t] = best(logits[t])


def logprobs(ring: ResultRing, logits: Any, ids: Any, seq: Any, state: RowState) -> None:
    """See `Ops.logprobs`."""
    entry = int(ring.cursor[0]) % ring.header.shape[0]
    for t in range(len(seq)):
        asked = int(fields(state)[int(seq[t]), FIELD["logprobs"]]) if seq[t] >= 0 else -1
        if asked >= 0:
            logp = log_softmax(logits[t])
            order = np.argsort(-logp, kind="stable")[: min(asked, MAX_TOP_LOGPROBS)]
            ring.logprob[entry, t] = logp[int(ids[t])]
            ring.top_ids[entry, t, : len(order)] = order
            ring.top_logprobs[entry, t, : len(order)] = logp[order]


def log_softmax(logits: Any) -> F64:
    """Return the logarithms of the probabilities of one row, (V,) float64; NaN counts as -inf."""
    values = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    shifted = values - values.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
