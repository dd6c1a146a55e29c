"""Log-probabilities of chosen tokens and their best rivals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.backends.base import MAX_TOP_LOGPROBS, Backend
from tests.helpers import HostRows, assert_close, result_ring, up


def log_softmax(row: np.ndarray) -> list[float]:
    values = [-math.inf if math.isnan(v) else float(v) for v in row]
    top = max(values)
    total = math.log(math.fsum(math.exp(v - top) for v in values))
    return [v - top - total for v in values]


@given(asked=st.lists(st.sampled_from([-1, 0, 1, 5, 20]), min_size=1, max_size=5), vocab=st.sampled_from([7, 20, 97, 300]),
       cursor=st.integers(1, 9), seed=st.integers(0, 999))
def test_logprobs(backend: Backend, asked: list[int], vocab: int, cursor: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = HostRows(6)
    seq = rng.permutation(6)[: len(asked)]
    for row, k in zip(seq, asked, strict=True):
        rows.set(row, logprobs=k, temperature=3.0)  # the temperature is not to matter
    seq = np.append(seq, -1)[:6]
    logits = np.round(rng.standard_normal((len(seq), vocab)) * 4).astype(np.float32)  # ties
    logits[:, 2], logits[:, 3] = np.nan, -np.inf
    ids = rng.integers(4, vocab, len(seq))
    ring, host = result_ring(backend, 3, 6, cursor=cursor)
    before = {name: array.copy() for name, array in host.items()}
    backend.stream.ops.logprobs(ring, up(backend, logits, "f32"), up(backend, ids), up(backend, seq), rows.upload(backend))
    backend.stream.synchronize()
    entry = cursor % 3
    for t, k in enumerate(asked):
        if k < 0:
            continue
        want = log_softmax(logits[t])
        best = sorted(range(vocab), key=lambda i: (-want[i], i))[: min(k, vocab)]
        assert_close(host["logprob"][entry, t], want[ids[t]], "f32", n=vocab, magnitude=20)
        assert host["top_ids"][entry, t, : len(best)].tolist() == best
        assert_close(host["top_logprobs"][entry, t, : len(best)], [want[i] for i in best], "f32", n=vocab, magnitude=20)
        before["logprob"][entry, t] = host["logprob"][entry, t]
        for name in ("top_ids", "top_logprobs"):
            before[name][entry, t, : len(best)] = host[name][entry, t, : len(best)]
    for name, array in host.items():
        np.testing.assert_array_equal(array, before[name], name)
    assert backend.download(ring.cursor).tolist() == [cursor]


@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_logprobs_of_shifted_logits(backend: Backend, shift: float) -> None:
    ring, host = result_ring(backend, 2, 1, cursor=2)
    logits = np.full((1, 1024), shift, np.float32)
    backend.stream.ops.logprobs(ring, up(backend, logits, "f32"), up(backend, [1000]), up(backend, [0]),
                                HostRows(1).set(0, logprobs=MAX_TOP_LOGPROBS).upload(backend))
    backend.stream.synchronize()
    assert_close(host["logprob"][0, 0], -math.log(1024), "f32", n=1024)
    assert host["top_ids"][0, 0].tolist() == list(range(MAX_TOP_LOGPROBS))
