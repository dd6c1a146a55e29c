"""Quantizing rows to int8: exact on every backend."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from metrale.backends.base import Backend
from tests.helpers import floats, poisoned_q, quantized, up


def run(backend: Backend, x: np.ndarray) -> list[np.ndarray]:
    out = poisoned_q(backend, *x.shape)
    backend.stream.ops.quantize(out, up(backend, x))
    return [backend.download(part) for part in out]


@given(rows=st.integers(1, 9), blocks=st.integers(1, 7), scale=st.sampled_from([1e-6, 1.0, 3e4]), seed=st.integers(0, 999))
def test_quantize_is_exact(backend: Backend, rows: int, blocks: int, scale: float, seed: int) -> None:
    x = floats(backend, np.random.default_rng(seed), rows, 32 * blocks, scale=scale)
    for got, want in zip(run(backend, x), quantized(x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_halves_round_to_even(backend: Backend) -> None:
    x = np.full((1, 32), 127.0, np.float32)
    x[0, :6] = 0.5, 1.5, 2.5, -0.5, -1.5, -2.5
    data, scales, _ = run(backend, x)
    assert data[0, :7].tolist() == [0, 2, 2, 0, -2, -2, 127]
    assert scales[0, 0] == 1


def test_zero_and_tiny_blocks(backend: Backend) -> None:
    x = np.zeros((2, 64), np.float32)
    x[0, 40] = 1.0
    if backend.activation_dtype != "f16":
        x[1, :32] = 1e-39 if backend.activation_dtype == "f32" else 0
    data, scales, sums = run(backend, x)
    assert scales[:, 0].tolist() == [0, 0]
    assert scales[0, 1] == np.float32(1) / np.float32(127)
    assert not data[:, :32].any()
    assert not sums[1].any()


def test_nan_and_infinity_are_not_hidden(backend: Backend) -> None:
    x = np.ones((1, 128), np.float32)
    x[0, 7], x[0, 70], x[0, 100] = np.nan, -np.inf, np.nan
    x[0, 101] = np.inf
    data, scales, sums = run(backend, x)
    assert np.isnan(scales[0, [0, 3]]).all()
    assert np.isposinf(scales[0, 2])
    assert not data[0, :32].any()
    assert not data[0, 64:].any()
    assert data[0, 32:64].tolist() == [127] * 32
    assert sums[0].tolist() == [0, 0, 16 * 127, 16 * 127, 0, 0, 0, 0]


def test_the_rest_adds_the_bits_that_were_lost(backend: Backend) -> None:
    """quantize and quantize_rest together hold a value to 1/(127 * 254) of its block's maximum; the ops round as stated."""
    x = floats(backend, np.random.default_rng(5), 3, 96)
    high, low = poisoned_q(backend, 3, 96), poisoned_q(backend, 3, 96)
    backend.stream.ops.quantize(high, up(backend, x))
    backend.stream.ops.quantize_rest(low, up(backend, x), high)
    first, second = ([backend.download(part) for part in q] for q in (high, low))
    value = first[0].astype(np.float32).reshape(3, 3, 32) * first[1][:, :, None]
    for got, want in zip(second, quantized(x - value.reshape(3, 96)), strict=True):
        np.testing.assert_array_equal(got, want)
    both = value + second[0].astype(np.float32).reshape(3, 3, 32) * second[1][:, :, None]
    worst = np.abs(both - x.reshape(3, 3, 32)).max(-1)
    assert (worst <= np.abs(x).reshape(3, 3, 32).max(-1) / (127 * 254) * 1.01).all()
