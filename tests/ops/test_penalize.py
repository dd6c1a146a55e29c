"""Penalties, biases and bans."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from metrale.backends.base import MAX_BIAS, Backend
from tests.helpers import HostRows, assert_close, down, up

V = 53


def run(backend: Backend, logits: np.ndarray, seq: list[int], index: list[int], rows: HostRows) -> np.ndarray:
    device, counts = up(backend, logits, "f32"), up(backend, np.zeros(logits.shape, int))
    state = rows.upload(backend)
    backend.stream.ops.penalize(device, up(backend, seq), up(backend, index), state, counts)
    assert not down(backend, counts).any()
    np.testing.assert_array_equal(backend.download(state.words), rows.words)
    return down(backend, device)


def expected(logits: np.ndarray, tokens: list[int], rows: HostRows, row: int, bias: list[tuple[int, float, int]]) -> np.ndarray:
    """Apply the definition a token at a time; `tokens` are the row's [0, index]."""
    out = logits.astype(np.float64)
    for token in set(tokens):
        out[token] = out[token] / rows.get(row, "repetition") if out[token] > 0 else out[token] * rows.get(row, "repetition")
    after = tokens[int(rows.get(row, "prompt_len")) :]
    for token in set(after):
        out[token] -= rows.get(row, "frequency") * after.count(token) + rows.get(row, "presence")
    for token, value, until in bias:
        if len(tokens) < until:
            out[token] += value
    return out


@given(data=st.data(), rows=st.integers(1, 4), seed=st.integers(0, 999))
def test_penalties(backend: Backend, data: st.DataObject, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    host = HostRows(5, max_tokens=29)
    seq = [*rng.permutation(5)[:rows].tolist(), -1]
    index = [data.draw(st.integers(0, 28)) for _ in seq]
    logits = rng.standard_normal((len(seq), V)).astype(np.float32) * 4
    want = logits.astype(np.float64)
    for t, row in enumerate(seq[:-1]):
        host.set(row, repetition=data.draw(st.sampled_from([1.0, 1.3, 0.5])),
                 presence=data.draw(st.sampled_from([0.0, 0.7, -1.0])),
                 frequency=data.draw(st.sampled_from([0.0, 0.4, -0.2])), prompt_len=data.draw(st.integers(0, 30)))
        tokens = rng.integers(0, 9, 29).tolist()  # repeats; those past the index do not count
        host.history(row, tokens)
        bias = [(int(rng.integers(V)), float(np.float32(rng.normal())), int(rng.integers(40))) for _ in range(rng.integers(4))]
        bias += [(int(rng.integers(V)), -np.inf, 99)]
        host.bias(row, *bias)
        want[t] = expected(logits[t], tokens[: index[t] + 1], host, row, bias)
    got = run(backend, logits, seq, index, host)
    assert_close(got, want, "f32", magnitude=np.where(np.isfinite(want), np.abs(want), 0) + 16)


def test_neutral_rows_keep_their_bits(backend: Backend) -> None:
    logits = np.random.default_rng(1).standard_normal((2, V)).astype(np.float32)
    logits[0, 3], logits[1, 4] = np.nan, -0.0
    rows = HostRows(2).history(0, range(20)).history(1, range(20))
    assert run(backend, logits, [1, 0], [12, 19], rows).tobytes() == logits.tobytes()


def test_a_full_bias_table_and_the_same_token_twice(backend: Backend) -> None:
    entries = [(i % V, 0.25, 10) for i in range(MAX_BIAS)]
    rows = HostRows(2).bias(1, *entries).history(1, [0])
    got = run(backend, np.zeros((1, V), np.float32), [1], [0], rows)
    np.testing.assert_array_equal(got[0], [0.25 * sum(i % V == token for i in range(MAX_BIAS)) for token in range(V)])


def test_bans_end_where_they_should(backend: Backend) -> None:
    """`until` is a token index: a ban until 5 holds while tokens 0..4 are chosen."""
    rows = HostRows(1).bias(0, (2, -np.inf, 5)).history(0, range(10))
    for index, banned in ((2, True), (3, True), (4, False), (7, False)):
        got = run(backend, np.ones((1, V), np.float32), [0], [index], rows)
        assert np.isneginf(got[0, 2]) == banned
        assert got[0, [0, 1, 3]].tolist() == [1, 1, 1]


def test_a_ban_beats_an_infinite_logit(backend: Backend) -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, 7] = np.inf
    assert np.isneginf(run(backend, logits, [0], [0], HostRows(1).bias(0, (7, -np.inf, 9)).history(0, [1]))[0, 7])
