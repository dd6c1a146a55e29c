"""K/V pages and attention over them; every byte no token owns is NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.backends.base import BLOCK_TOKENS, Backend, QkNorm
from tests.helpers import Paged, assert_close, down, floats, paged, poisoned, poisoned_kv, up, up_batch
from tests.ops.test_norm import normed
from tests.ops.test_rope import angle_table, rotated, views


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, window: int | None, cap: float | None) -> np.ndarray:
    """Return one row's attention, a head at a time: q (Hq, D); k, v (n, Hk, D), the last key the row's own."""
    out = np.zeros(q.shape)
    for head in range(len(q)):
        keys, values = (x[:, head // (len(q) // x.shape[1])].astype(np.float64) for x in (k, v))
        scores = keys @ q[head].astype(np.float64) * np.float32(scale)
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        if window is not None:
            scores[: max(0, len(scores) - window)] = -np.inf
        p = np.exp(scores - scores.max())
        out[head] = (p / p.sum()) @ values
    return out


def check(backend: Backend, cache: Paged, seq: Any, index: Any, *, heads: int, scale: float = 0.3, window: int | None = None,
          cap: float | None = None) -> None:
    """Attend for the rows (seq, index) and compare each with the plain statement."""
    rng = np.random.default_rng(17)
    dim = cache.layer.dim
    q, out = floats(backend, rng, len(seq), heads, dim), poisoned(backend, len(seq), heads, dim)
    backend.stream.ops.attention(out, up(backend, q), cache.layer, up_batch(backend, seq, index), cache.tables, scale=scale,
                                 window=window, softcap=cap)
    got = down(backend, out)
    for t, (s, i) in enumerate(zip(seq, index, strict=True)):
        if s < 0:
            np.testing.assert_array_equal(got[t], 0)
            continue
        want = attended(q[t], cache.k[s][: i + 1], cache.v[s][: i + 1], scale=scale, window=window, cap=cap)
        # Errors of the scores (dim terms) pass through the exponential; those of the sum grow with the keys.
        size = np.abs(cache.v[s][: i + 1]).max() * (1 + scale * np.abs(q[t]).sum(-1, keepdims=True) * 3)
        assert_close(got[t], want, backend.activation_dtype, n=dim + i + 1, magnitude=size)


# Lengths at and past the ends of blocks.
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 100, 257])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (5, 5, 20), (4, 1, 96)])
def test_one_row_at_the_end(backend: Backend, length: int, heads: int, kv_heads: int, dim: int) -> None:
    cache = paged(backend, np.random.default_rng(length), [length], kv_heads, dim)
    check(backend, cache, [0], [length - 1], heads=heads)


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4), rows=st.integers(1, 9),
       shape=st.sampled_from([(2, 1, 8), (6, 3, 20), (3, 3, 33), (8, 2, 64)]), window=st.sampled_from([None, 1, 7, 16, 33]),
       cap=st.sampled_from([None, 2.0, 50.0]), seed=st.integers(0, 999))
def test_any_rows(backend: Backend, lengths: list[int], rows: int, shape: tuple[int, int, int], window: int | None,
                  cap: float | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, kv_heads, dim = shape
    cache = paged(backend, rng, lengths, kv_heads, dim)
    seq = rng.integers(-1, len(lengths), rows)
    index = np.array([rng.integers(lengths[s]) if s >= 0 else rng.integers(99) for s in seq])
    check(backend, cache, seq, index, heads=heads, window=window, cap=cap)


def test_a_prompt_sees_only_its_past(backend: Backend) -> None:
    """All rows of a prompt in one call: row t sees keys 0..t."""
    cache = paged(backend, np.random.default_rng(2), [37], 3, 16)
    check(backend, cache, np.zeros(37, int), np.arange(37), heads=6)
    check(backend, cache, np.zeros(37, int), np.arange(37), heads=6, window=5)


def test_large_scores_do_not_overflow(backend: Backend) -> None:
    cache = paged(backend, np.random.default_rng(2), [40], 2, 24)
    check(backend, cache, [0, 0], [39, 20], heads=4, scale=60.0 if backend.activation_dtype == "f32" else 1.0)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_scores_far_from_zero(backend: Backend, shift: float) -> None:
    """A common offset of all scores cancels, however large."""
    rng = np.random.default_rng(3)
    cache = paged(backend, rng, [19], 1, 4)
    k = np.zeros((19, 1, 4), np.float32)
    k[..., 0], k[..., 1] = 1, np.arange(19)[:, None] % 4
    cache.k[0] = k
    backend.stream.ops.kv_write(cache.layer, up(backend, k), up(backend, cache.v[0]),
                                up_batch(backend, np.zeros(19, int), np.arange(19)), cache.tables)
    q = np.array([[[shift, 0.5, 0, 0]]], np.float32)
    out = poisoned(backend, 1, 1, 4)
    backend.stream.ops.attention(out, up(backend, q), cache.layer, up_batch(backend, [0], [18]), cache.tables, scale=1.0,
                                 window=None, softcap=None)
    want = attended(np.array([[0, 0.5, 0, 0]]), k, cache.v[0], scale=1.0, window=None, cap=None)
    # A score is rounded near 1e4: its error there, as an exponent, is a relative one of the result.
    assert_close(down(backend, out)[0], want, backend.activation_dtype, n=19, magnitude=4000.0)


def test_only_padding(backend: Backend) -> None:
    cache = paged(backend, np.random.default_rng(2), [3], 2, 24)
    check(backend, cache, [-1, -1, -1], [0, 5, 16], heads=4)


# --- pages -----------------------------------------------------------------------------------------------------------


def all_blocks(backend: Backend, layer: Any, count: int) -> np.ndarray:
    return np.stack([np.stack(backend.kv_read(layer, block)) for block in range(count)])


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4), heads=st.integers(1, 3), dim=st.sampled_from([4, 20, 33]),
       seed=st.integers(0, 99))
def test_kv_write_fills_its_places_alone(backend: Backend, lengths: list[int], heads: int, dim: int, seed: int) -> None:
    cache = paged(backend, np.random.default_rng(seed), lengths, heads, dim)
    count = int(cache.layer.k.shape[0])
    want = np.full((count, 2, BLOCK_TOKENS, heads, dim), np.nan, np.float32)
    for row, (k, v) in enumerate(zip(cache.k, cache.v, strict=True)):
        for i in range(len(k)):
            want[cache.host_tables[row, i // BLOCK_TOKENS], :, i % BLOCK_TOKENS] = k[i], v[i]
    np.testing.assert_array_equal(all_blocks(backend, cache.layer, count), want)


def test_padding_rows_write_only_the_dummy_block(backend: Backend) -> None:
    rng = np.random.default_rng(1)
    layer = poisoned_kv(backend, 5, 2, 12)
    tables = up(backend, np.array([[4, 3], [2, 1]]))
    k, v = (floats(backend, rng, 4, 2, 12) for _ in range(2))
    batch = up_batch(backend, [-1, 1, -1, -1], [0, 17, 0, 40])
    backend.stream.ops.kv_write(layer, up(backend, k), up(backend, v), batch, tables)
    blocks = all_blocks(backend, layer, 5)
    np.testing.assert_array_equal(blocks[1, :, 1], np.stack([k[1], v[1]]))
    blocks[1, :, 1] = np.nan
    assert np.isnan(blocks[1:]).all()


def test_kv_zero_and_copy(backend: Backend) -> None:
    cache = paged(backend, np.random.default_rng(5), [60, 40], 3, 20)
    layer, count = cache.layer, int(cache.layer.k.shape[0])
    want = all_blocks(backend, layer, count)
    src, dst = np.array([2, -1, 5, 3]), np.array([7, 1, 4, -1])
    backend.stream.ops.kv_copy(layer, up(backend, src), up(backend, dst))
    want[7], want[4] = want[2], want[5]
    np.testing.assert_array_equal(all_blocks(backend, layer, count), want)
    backend.stream.ops.kv_zero(layer, up(backend, np.array([4, -1, 1, count - 1])))
    want[[4, 1, count - 1]] = 0
    np.testing.assert_array_equal(all_blocks(backend, layer, count), want)


def test_fresh_pages_are_zero_and_their_bytes_known(backend: Backend) -> None:
    layer = backend.alloc_kv(3, 5, 12)
    assert (layer.heads, layer.dim) == (5, 12)
    assert not all_blocks(backend, layer, 3).any()
    assert layer.k.nbytes + layer.v.nbytes == 3 * backend.kv_block_bytes(5, 12)


# --- the fused op ----------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 7), scope=st.sampled_from([None, "head", "full"]), turned=st.sampled_from([None, 8, 20]),
       seed=st.integers(0, 99))
def test_qkv_rope_write(backend: Backend, rows: int, scope: str | None, turned: int | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    hq, hk, dim = 6, 3, 20
    x = floats(backend, rng, rows, (hq + 2 * hk) * dim)
    q, k, v = views(backend, x, hq, hk, hk, dim=dim)
    index = rng.permutation(40)[:rows]
    position = index + 3
    layer, tables = poisoned_kv(backend, 5, hk, dim), np.array([[4, 1, 3], [0, 0, 0]])
    batch = up_batch(backend, np.zeros(rows, int), index, position=position)
    plain = [x[:, a * dim : b * dim].reshape(rows, b - a, dim) for a, b in ((0, hq), (hq, hq + hk), (hq + hk, hq + 2 * hk))]
    norms = None
    if scope is not None:
        sizes = (hq, hk) if scope == "full" else (1, 1)
        weights = [rng.standard_normal(n * dim).astype(np.float32) for n in sizes]
        norms = QkNorm(*(up(backend, w, "f32") for w in weights), eps=1e-6, offset=1.0, cast_first=False, scope=scope)
        for i, w in enumerate(weights):
            flat = plain[i].reshape(rows, -1) if scope == "full" else plain[i]
            plain[i] = normed(flat, w, 1e-6, 1.0).reshape(plain[i].shape)
    table = None if turned is None else angle_table(50, turned)
    device_table = None if table is None else up(backend, table, "f32")
    backend.stream.ops.qkv_rope_write(q, k, v, layer, batch, up(backend, tables), device_table, norms)
    if table is not None:
        plain[:2] = [rotated(part, table, position) for part in plain[:2]]
    size = 4 * np.abs(plain[0]).max() + 4 * np.abs(plain[1]).max()
    assert_close(down(backend, q), plain[0], backend.activation_dtype, n=hq * dim, magnitude=size)
    for t, i in enumerate(index):
        keys, values = backend.kv_read(layer, int(tables[0, i // BLOCK_TOKENS]))
        assert_close(keys[i % BLOCK_TOKENS], plain[1][t], backend.activation_dtype, n=hq * dim, magnitude=size)
        np.testing.assert_array_equal(values[i % BLOCK_TOKENS], plain[2][t])
