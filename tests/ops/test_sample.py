"""Choosing tokens: argmax, filters, Gumbel-max over Philox, against plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.backends.base import Backend
from metrale.backends.reference.choosing import gumbel, philox
from tests.helpers import HostRows, down, poisoned, up

MASK = 0xFFFFFFFF


# --- the plain statement -----------------------------------------------------------------------------------------------


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python integers (Salmon et al. 2011)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK, (a >> 32) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def noise(token: int, index: int, seed: int, choice: int) -> float:
    word = philox_words((token // 4, index + 1, choice, 0), (seed & MASK, seed >> 32))[token % 4]
    return -math.log(-math.log((word + 0.5) / 2**32))


def survivors(logits: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """Return the ids the filters leave, most likely first."""
    alive = [i for i, x in enumerate(logits) if not math.isnan(x) and x > -math.inf]
    alive.sort(key=lambda i: (-logits[i], i))
    alive = alive[:top_k] if top_k else alive
    weights = [math.exp((logits[i] - logits[alive[0]]) / temperature) for i in alive]
    if top_p < 1:
        total, reached, kept = math.fsum(weights), 0.0, 0
        while kept < len(alive) and reached < top_p:
            reached += weights[kept] / total
            kept += 1
        alive = alive[: max(kept, 1)]
    return [i for i, w in zip(alive, weights, strict=False) if w >= min_p]


def draw(backend: Backend, logits: np.ndarray, rows: HostRows, seq: list[int], index: list[int]) -> list[int]:
    before = np.array(logits, np.float32)
    device, ids = up(backend, before, "f32"), poisoned(backend, len(seq), dtype="i32")
    space = poisoned(backend, *logits.shape, dtype="f32")
    backend.stream.ops.sample(ids, device, up(backend, seq), up(backend, index), rows.upload(backend), space)
    np.testing.assert_array_equal(down(backend, device), before)
    return down(backend, ids).tolist()


# --- Philox ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counter", "key", "words"), [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])  # fmt: skip
def test_philox_known_answers(counter: tuple, key: tuple, words: tuple) -> None:
    """The known answers that the authors publish with Random123."""
    assert philox_words(counter, key) == words
    assert philox(np.array([counter], np.uint32), key)[0].tolist() == list(words)


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**20), choice=st.integers(0, 127))
def test_noise_depends_on_seed_place_and_choice(backend: Backend, seed: int, index: int, choice: int) -> None:
    """With equal logits the largest noise wins."""
    vocab = 37
    rows = HostRows(2).set(1, seed=seed, choice=choice, temperature=1.0)
    got = draw(backend, np.zeros((1, vocab), np.float32), rows, [1], [index])[0]
    scores = [noise(token, index, seed, choice) for token in range(vocab)]
    assert scores[got] >= max(scores) - 1e-5


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    n = 2000
    ids = [int(np.argmax(logits + gumbel(4, seed=(5, 6), token_index=i, choice=0))) for i in range(n)]
    counts = np.bincount(ids, minlength=4)
    assert ((counts - n * np.exp(logits)) ** 2 / (n * np.exp(logits))).sum() < 16.3  # 99.9% of chi-square, 3 degrees


RARE = (1134, 7069, 7)  # token, index, seed: found by search, one word in 33 million is as large


def test_the_noise_is_finite_at_the_end_of_the_range(backend: Backend) -> None:
    """A word so large that (x + 0.5) * 2^-32 is 1 in float32: its noise is 21, not infinite."""
    token, index, seed = RARE
    word = philox_words((token // 4, index + 1, 0, 0), (seed, 0))[token % 4]
    assert np.float32(word) * np.float32(2.0**-32) == 1
    logits = np.zeros((1, token + 3), np.float32)
    logits[0, token] = -40
    assert draw(backend, logits, HostRows(1).set(0, seed=seed, temperature=1.0), [0], [index])[0] != token
    logits[0, token] = -1
    assert draw(backend, logits, HostRows(1).set(0, seed=seed, temperature=1.0), [0], [index]) == [token]


# --- sampling ----------------------------------------------------------------------------------------------------------


@given(data=st.data(), rows=st.integers(1, 6), vocab=st.sampled_from([1, 3, 16, 50, 257]), spread=st.sampled_from([0.5, 4.0]),
       seed=st.integers(0, 999))
def test_sample(backend: Backend, data: st.DataObject, rows: int, vocab: int, spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    host = HostRows(rows + 1)
    seq = [int(s) for s in rng.permutation(rows + 1)[:rows]]
    index = rng.integers(0, 500, rows).tolist()
    logits = (rng.standard_normal((rows, vocab)) * spread).astype(np.float32)
    settings = [{"temperature": float(np.float32(data.draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])))),
                 "top_k": data.draw(st.sampled_from([0, 1, 5, 40, 1000])),
                 "top_p": float(np.float32(data.draw(st.sampled_from([1.0, 0.9, 0.41, 0.03])))),
                 "min_p": float(np.float32(data.draw(st.sampled_from([0.0, 0.07, 0.5, 1.0]))))} for _ in seq]
    for row, setting in zip(seq, settings, strict=True):
        host.set(row, seed=1000 * seed + row, choice=row, **setting)
    got = draw(backend, logits, host, seq, index)
    for t, (row, setting) in enumerate(zip(seq, settings, strict=True)):
        if setting["temperature"] == 0:
            assert got[t] == int(np.argmax(logits[t]))
            continue
        kept = survivors(logits[t].astype(float).tolist(), **setting)
        scores = {i: float(logits[t, i]) / setting["temperature"] + noise(i, index[t], 1000 * seed + row, row) for i in kept}
        assert scores.get(got[t], -math.inf) >= max(scores.values()) - 1e-4


def test_the_neighbours_do_not_matter(backend: Backend) -> None:
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((4, 61)).astype(np.float32)
    rows = HostRows(4)
    for row in range(4):
        rows.set(row, seed=77, temperature=1.0, top_p=0.8)
    together = draw(backend, logits, rows, [0, 1, 2, 3], [9, 8, 9, 7])
    for t, index in enumerate((9, 8, 9, 7)):
        assert draw(backend, logits[t : t + 1], rows, [t], [index]) == [together[t]]


def chosen_ids(backend: Backend, logits: list[float], **settings: float) -> set[int]:
    """Return every id that 200 draws give: one row, many places."""
    rows = HostRows(1).set(0, seed=3, **settings)
    matrix = np.tile(np.array(logits, np.float32), (200, 1))
    return set(draw(backend, matrix, rows, [0] * 200, list(range(200))))


def test_top_k_ties_go_to_the_lowest_ids(backend: Backend) -> None:
    assert chosen_ids(backend, [0, 2, 1, 2, 1, 1], temperature=9.0, top_k=3) == {1, 2, 3}


def test_top_p_ties_go_to_the_lowest_ids(backend: Backend) -> None:
    """Probabilities 4/14 twice, then 2/14 three times: 0.8 needs two of the three."""
    assert chosen_ids(backend, np.log([2, 4, 2, 4, 2]).tolist(), temperature=1.0, top_p=0.8) == {0, 1, 2, 3}


def test_long_ties_go_to_the_lowest_ids(backend: Backend) -> None:
    """Hundreds of equal logits, past any block a kernel works in."""
    logits = np.zeros(700)
    logits[600] = 1e-3
    assert chosen_ids(backend, logits.tolist(), temperature=1.0, top_k=7) == {600, 0, 1, 2, 3, 4, 5}
    assert chosen_ids(backend, logits.tolist(), temperature=1.0, top_p=6.5 / 700) == {600, 0, 1, 2, 3, 4, 5}


def test_top_p_counts_what_top_k_left(backend: Backend) -> None:
    """Of 4, 3, 2, 1: top-k 2 leaves 4/7 and 3/7, and 4/7 reaches 0.5; over all four it would not."""
    logits = np.log([4, 3, 2, 1]).tolist()
    assert chosen_ids(backend, logits, temperature=1.0, top_k=2, top_p=0.5) == {0}
    assert chosen_ids(backend, logits, temperature=1.0, top_p=0.5) == {0, 1}


def test_the_filters_work_at_temperature(backend: Backend) -> None:
    logits = np.log([8, 4, 2, 1]).tolist()
    assert chosen_ids(backend, logits, temperature=1.0, top_p=0.5) == {0}
    assert chosen_ids(backend, logits, temperature=50.0, top_p=0.6) == {0, 1, 2}
    assert chosen_ids(backend, logits, temperature=1.0, min_p=0.3) == {0, 1}
    assert chosen_ids(backend, logits, temperature=3.0, min_p=0.55) == {0, 1, 2}


def test_one_token_always_remains(backend: Backend) -> None:
    assert chosen_ids(backend, [1, 3, 3, 2], temperature=1.0, top_p=1e-6) == {1}
    assert chosen_ids(backend, [1, 3, 2], temperature=1.0, min_p=1.0) == {1}
    assert chosen_ids(backend, [5.0], temperature=1.0, top_k=1, top_p=0.1, min_p=1.0) == {0}


def test_a_tiny_temperature_is_greedy(backend: Backend) -> None:
    assert chosen_ids(backend, [1, 3, 3.001, 2], temperature=1e-5) == {2}


def test_nan_and_bans_are_never_drawn(backend: Backend) -> None:
    logits = [np.nan, 1, -np.inf, 2, np.nan, 1]
    assert chosen_ids(backend, logits, temperature=5.0) == {1, 3, 5}
    assert chosen_ids(backend, logits, temperature=5.0, top_k=5, top_p=0.99) == {1, 3, 5}
    assert chosen_ids(backend, logits, temperature=0.0) == {3}
    for temperature in (0.0, 1.0):
        assert chosen_ids(backend, [-np.inf, np.nan, -np.inf], temperature=temperature) == {0}


def test_padding_rows_get_zero(backend: Backend) -> None:
    rows = HostRows(2).set(1, temperature=1.0, seed=9)
    logits = np.full((3, 19), -5.0, np.float32)
    logits[:, 7] = 50
    assert draw(backend, logits, rows, [-1, 1, -1], [0, 4, 3]) == [0, 7, 0]


# --- argmax ------------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 6), vocab=st.sampled_from([1, 2, 15, 16, 33, 257, 1025]), levels=st.integers(1, 5),
       nans=st.booleans(), seed=st.integers(0, 999))
def test_argmax(backend: Backend, rows: int, vocab: int, levels: int, nans: bool, seed: int) -> None:
    """Few different values, so that most rows tie."""
    rng = np.random.default_rng(seed)
    logits = rng.choice([-np.inf, -2.5, 0.0, 3.0, 3e38][:levels], (rows, vocab)).astype(np.float32)
    if nans:
        logits[rng.random((rows, vocab)) < 0.4] = np.nan
    ids = poisoned(backend, rows, dtype="i32")
    backend.stream.ops.argmax(ids, up(backend, logits, "f32"))
    want = []
    for row in logits:
        best = 0
        for i, x in enumerate(row):
            if x > (row[best] if row[best] == row[best] else -np.inf):
                best = i
        want.append(best)
    assert down(backend, ids).tolist() == want


def test_argmax_of_nothing_and_of_infinity(backend: Backend) -> None:
    logits = np.full((4, 19), np.nan, np.float32)
    logits[1] = -np.inf
    logits[2, [5, 9]] = np.inf
    logits[3, 18] = -np.inf
    ids = poisoned(backend, 4, dtype="i32")
    backend.stream.ops.argmax(ids, up(backend, logits, "f32"))
    assert down(backend, ids).tolist() == [0, 0, 5, 0]
