"""Rotating queries and keys, and normalising them first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.backends.base import Backend
from tests.helpers import assert_close, down, floats, up
from tests.ops.test_norm import normed


def views(backend: Backend, x: np.ndarray, *heads: int, dim: int) -> list:
    """Upload rows of stacked heads; return (T, heads, D) views into the one buffer."""
    buffer, start, out = up(backend, x), 0, []
    for count in heads:
        part = buffer[:, start * dim : (start + count) * dim]
        out.append(part.reshape(x.shape[0], count, dim))
        start += count
    return out


def angle_table(positions: int, dims: int) -> np.ndarray:
    angles = np.outer(np.arange(positions), 10000.0 ** (-np.arange(dims // 2) / (dims // 2)))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rotated(x: np.ndarray, table: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Turn each pair (i, i + d/2) as a complex number."""
    half = table.shape[1] // 2
    out = x.astype(np.float64)
    for t, p in enumerate(position):
        turn = table[p, :half].astype(np.float64) + 1j * table[p, half:]
        z = (x[t, :, :half] + 1j * x[t, :, half : 2 * half].astype(np.float64)) * turn
        out[t, :, :half], out[t, :, half : 2 * half] = z.real, z.imag
    return out


# dims of a head and how many of them turn: all, or a part (a tail past the vector width included).
@pytest.mark.parametrize(("dim", "turned"), [(64, 64), (20, 12), (80, 32), (6, 2), (96, 96)])
@given(rows=st.integers(1, 6), heads=st.sampled_from([(1, 1), (6, 3), (5, 1)]), seed=st.integers(0, 99))
def test_rope(backend: Backend, dim: int, turned: int, rows: int, heads: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    hq, hk = heads
    x = floats(backend, rng, rows, (hq + 2 * hk) * dim)
    table, position = angle_table(41, turned), rng.integers(0, 41, rows)
    q, k, v = views(backend, x, hq, hk, hk, dim=dim)
    backend.stream.ops.rope(q, k, up(backend, table, "f32"), up(backend, position))
    for got, start, count in ((q, 0, hq), (k, hq, hk)):
        want = x[:, start * dim : (start + count) * dim].reshape(rows, count, dim)
        size = np.abs(want).max() * 2
        assert_close(down(backend, got), rotated(want, table, position), backend.activation_dtype, magnitude=size)
    np.testing.assert_array_equal(down(backend, v), x[:, (hq + hk) * dim :].reshape(rows, hk, dim))


@pytest.mark.parametrize("scope", ["head", "full"])
@given(rows=st.integers(1, 5), heads=st.sampled_from([(1, 1), (6, 3), (5, 1)]), dim=st.sampled_from([6, 20, 64]),
       offset=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 99))
def test_qk_norm(backend: Backend, scope: str, rows: int, heads: tuple[int, int], dim: int, offset: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    hq, hk = heads
    x = floats(backend, rng, rows, (hq + 2 * hk) * dim)
    q, k, v = views(backend, x, hq, hk, hk, dim=dim)
    weights = [rng.standard_normal(dim * (n if scope == "full" else 1)).astype(np.float32) for n in heads]
    backend.stream.ops.qk_norm(q, k, *(up(backend, w, "f32") for w in weights), eps=1e-6, offset=offset, cast_first=False,
                               scope=scope)
    for got, start, count, weight in ((q, 0, hq, weights[0]), (k, hq, hk, weights[1])):
        part = x[:, start * dim : (start + count) * dim]
        want = normed(part if scope == "full" else part.reshape(rows, count, dim), weight, 1e-6, offset)
        assert_close(down(backend, got), want.reshape(rows, count, dim), backend.activation_dtype, n=hq * dim)
    np.testing.assert_array_equal(down(backend, v), x[:, (hq + hk) * dim :].reshape(rows, hk, dim))
